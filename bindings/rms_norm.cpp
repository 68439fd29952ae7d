#include "glm5/ops/rms_norm.h"

#include "bind.h"

namespace glm5::python {

void bind_rms_norm(py::module_& module) {
  def_op<&glm5::rms_norm>(module, "rms_norm", "x", "weight", "eps", "y");
}

}  // namespace glm5::python
