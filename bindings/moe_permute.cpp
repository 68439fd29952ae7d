#include "glm5/ops/moe_permute.h"

#include "bind.h"

namespace glm5::python {

void bind_moe_permute(py::module_& module) {
  def_op<&glm5::moe_permute>(module, "moe_permute", "x", "ids", "num_experts", "rows", "row_ids", "offsets");
}

}  // namespace glm5::python
