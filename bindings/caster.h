// Python tensors to TensorView: DLPack's C exchange table where the type has one, a __dlpack__() capsule elsewhere.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "glm5/tensor.h"

namespace glm5::python {

namespace py = pybind11;

// A tensor borrowed from a Python object; `owner` keeps a capsule alive where one was needed.
struct Borrowed {
  DLTensor tensor{};
  bool read_only = false;
  py::object owner;
};

// False when `object` offers no DLPack at all; throws what the producer raised, or ContractError when the tensor
// cannot be read here (other device, strided, no memory behind it).
bool borrow(py::handle object, Borrowed& out);

}  // namespace glm5::python

namespace pybind11::detail {

template <>
struct type_caster<glm5::TensorView> {
  PYBIND11_TYPE_CASTER(glm5::TensorView, const_name("Tensor"));

  bool load(handle object, bool) {
    if (!glm5::python::borrow(object, borrowed_)) return false;
    value = glm5::TensorView(borrowed_.tensor, borrowed_.read_only);
    return true;
  }

 private:
  glm5::python::Borrowed borrowed_;
};

// Not the caster of pybind11/stl.h: that one drops the inner caster, and the capsule with it, before the call.
template <>
struct type_caster<std::optional<glm5::TensorView>> {
  PYBIND11_TYPE_CASTER(std::optional<glm5::TensorView>, const_name("Tensor | None"));

  bool load(handle object, bool convert) {
    if (object.is_none()) return true;
    if (!inner_.load(object, convert)) return false;
    value = static_cast<glm5::TensorView&>(inner_);
    return true;
  }

 private:
  type_caster<glm5::TensorView> inner_;
};

}  // namespace pybind11::detail
