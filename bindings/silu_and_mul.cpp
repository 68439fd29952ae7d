#include "glm5/ops/silu_and_mul.h"

#include <pybind11/stl.h>

#include "bind.h"

namespace glm5::python {

void bind_silu_and_mul(py::module_& module) {
  def_op<&glm5::silu_and_mul>(module, "silu_and_mul", "x", "limit", "y");
}

}  // namespace glm5::python
