#include "glm5/ops/moe_unpermute.h"

#include "bind.h"

namespace glm5::python {

void bind_moe_unpermute(py::module_& module) {
  def_op<&glm5::moe_unpermute>(module, "moe_unpermute", "rows", "row_ids", "weights", "y");
}

}  // namespace glm5::python
