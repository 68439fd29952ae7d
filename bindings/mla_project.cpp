#include "glm5/ops/mla_project.h"

#include "bind.h"

namespace glm5::python {

void bind_mla_project(py::module_& module) {
  def_op<&glm5::mla_project>(module, "mla_project", "hidden", "w_q_a", "q_a_norm", "w_q_b", "w_kv_a", "kv_a_norm",
                             "w_uk", "positions", "cos_sin", "eps", "interleaved", "q", "kv", "q_latent");
}

}  // namespace glm5::python
