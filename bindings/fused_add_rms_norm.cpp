#include "glm5/ops/fused_add_rms_norm.h"

#include "bind.h"

namespace glm5::python {

void bind_fused_add_rms_norm(py::module_& module) {
  def_op<&glm5::fused_add_rms_norm>(module, "fused_add_rms_norm", "x", "residual", "weight", "eps", "y",
                                    "residual_out");
}

}  // namespace glm5::python
