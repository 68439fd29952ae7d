#include "glm5/ops/linear_entropy.h"

#include "bind.h"

namespace glm5::python {

void bind_linear_entropy(py::module_& module) {
  def_op<&glm5::linear_entropy>(module, "linear_entropy", "hidden", "lm_head", "entropy");
}

}  // namespace glm5::python
