// An op's native signature on the CUDA simulator: tensors move to guarded memory and back.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <tuple>
#include <utility>

#include "caster.h"
#include "glm5/context.h"
#include "sim/cuda/guarded.h"

namespace glm5::python {

template <class T>
struct Named {
  const T& value;
  const char* name;
};

// An argument as the kernel gets it.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const Named<T>& argument) : value_(argument.value) {}
  const T& get() const { return value_; }
  void copy_back() {}

 private:
  T value_;
};
template <>
class OnDevice<TensorView> {
 public:
  explicit OnDevice(const Named<TensorView>& argument) : memory_(argument.value, argument.name) {}
  const TensorView& get() const { return memory_.view(); }
  void copy_back() { memory_.copy_back(); }

 private:
  sim::Guarded memory_;
};

// A kernel that breaks a rule throws before anything is copied back: the caller's tensors stay as they were.
template <auto Function, class... Values, size_t... I>
void run_on_device(const std::optional<TensorView>& workspace, std::index_sequence<I...>,
                   const Named<Values>&... named) {
  std::tuple<OnDevice<Values>...> arguments(named...);
  Context ctx;
  std::optional<sim::Guarded> scratch;
  if (workspace.has_value()) {
    scratch.emplace(*workspace, "workspace");
    ctx.workspace = scratch->view().out<uint8_t>();
    ctx.workspace_bytes = scratch->view().numel();
  }
  Function(ctx, std::get<I>(arguments).get()...);
  (std::get<I>(arguments).copy_back(), ...);
  if (scratch.has_value()) scratch->copy_back();
}

template <auto Function, class... Arguments, class... Names>
void def_op(py::module_& module, const char* name, void (*)(const Context&, Arguments...), Names... names) {
  static_assert(sizeof...(Arguments) == sizeof...(Names), "name every argument of the op, in order");
  module.def(
      name,
      [names...](Arguments... arguments, const std::optional<TensorView>& workspace) {
        run_on_device<Function, std::decay_t<Arguments>...>(workspace, std::index_sequence_for<Arguments...>{},
                                                            Named<std::decay_t<Arguments>>{arguments, names}...);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(names)..., py::arg("workspace") = py::none());
}

}  // namespace glm5::python
