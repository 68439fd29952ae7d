#include "glm5/ops/linear.h"

#include "bind.h"

namespace glm5::python {

void bind_linear(py::module_& module) {
  def_op<&glm5::linear>(module, "linear", "x", "w", "bias", "y");
}

}  // namespace glm5::python
