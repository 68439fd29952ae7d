#include "glm5/ops/fused_add_rms_norm_bwd.h"

#include "bind.h"

namespace glm5::python {

void bind_fused_add_rms_norm_bwd(py::module_& module) {
  def_op<&glm5::fused_add_rms_norm_bwd>(module, "fused_add_rms_norm_bwd", "grad_y", "grad_residual_out", "x",
                                        "residual", "weight", "eps", "grad_x", "grad_residual", "grad_weight");
}

}  // namespace glm5::python
