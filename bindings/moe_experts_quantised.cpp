#include "glm5/ops/moe_experts_quantised.h"

#include <pybind11/stl.h>

#include "bind.h"

namespace glm5::python {

// An overload of moe_experts: weights of few bits come as two tensors each.
void bind_moe_experts_quantised(py::module_& module) {
  def_op<&glm5::moe_experts_quantised>(module, "moe_experts", "x", "ids", "weights", "gate_up", "gate_up_scales",
                                       "down", "down_scales", "limit", "y");
}

}  // namespace glm5::python
