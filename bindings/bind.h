// How an op's native signature becomes a Python function.
#pragma once

#include <pybind11/pybind11.h>

#include "caster.h"
#include "glm5/context.h"

#if defined(GLM5_CUDA_SIM)
#include "bind_sim.h"
#endif

namespace glm5::python {

#if !defined(GLM5_CUDA_SIM)
// Throws ContractError unless this processor can run `level`.
Context context_for(int level);

template <auto Function, class... Arguments, class... Names>
void def_op(py::module_& module, const char* name, void (*)(const Context&, Arguments...), Names... names) {
  static_assert(sizeof...(Arguments) == sizeof...(Names), "name every argument of the op, in order");
  module.def(
      name, [](int level, Arguments... arguments) { Function(context_for(level), arguments...); },
      py::call_guard<py::gil_scoped_release>(), py::arg("level"), py::arg(names)...);
}
#endif

// Publishes Function as module.<name>(names...), on the CPU with the level before them; it runs without the GIL.
template <auto Function, class... Names>
void def_op(py::module_& module, const char* name, Names... names) {
  def_op<Function>(module, name, Function, names...);
}

}  // namespace glm5::python
