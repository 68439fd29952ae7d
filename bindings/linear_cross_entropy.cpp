#include "glm5/ops/linear_cross_entropy.h"

#include "bind.h"

namespace glm5::python {

void bind_linear_cross_entropy(py::module_& module) {
  def_op<&glm5::linear_cross_entropy>(module, "linear_cross_entropy", "hidden", "lm_head", "targets", "loss", "lse");
}

}  // namespace glm5::python
