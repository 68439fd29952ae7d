#include "glm5/ops/silu_and_mul_bwd.h"

#include <pybind11/stl.h>

#include "bind.h"

namespace glm5::python {

void bind_silu_and_mul_bwd(py::module_& module) {
  def_op<&glm5::silu_and_mul_bwd>(module, "silu_and_mul_bwd", "grad_y", "x", "limit", "grad_x");
}

}  // namespace glm5::python
