#include "glm5/ops/mla_preprocess.h"

#include "bind.h"

namespace glm5::python {

void bind_mla_preprocess(py::module_& module) {
  def_op<&glm5::mla_preprocess>(module, "mla_preprocess", "hidden", "w_q_a", "q_a_norm", "w_q_b", "w_kv_a", "kv_a_norm",
                                "w_uk", "positions", "cos_sin", "kv_cache", "slots", "eps", "interleaved", "format",
                                "q", "q_latent");
}

}  // namespace glm5::python
