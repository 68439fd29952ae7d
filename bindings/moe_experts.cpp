#include "glm5/ops/moe_experts.h"

#include <pybind11/stl.h>

#include "bind.h"

namespace glm5::python {

void bind_moe_experts(py::module_& module) {
  def_op<&glm5::moe_experts>(module, "moe_experts", "x", "ids", "weights", "w_gate_up", "w_down", "limit", "y");
}

}  // namespace glm5::python
