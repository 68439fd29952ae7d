#include "glm5/ops/rms_norm_bwd.h"

#include "bind.h"

namespace glm5::python {

void bind_rms_norm_bwd(py::module_& module) {
  def_op<&glm5::rms_norm_bwd>(module, "rms_norm_bwd", "grad_y", "x", "weight", "eps", "grad_x", "grad_weight");
}

}  // namespace glm5::python
