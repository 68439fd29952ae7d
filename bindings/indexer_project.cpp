#include "glm5/ops/indexer_project.h"

#include "bind.h"

namespace glm5::python {

void bind_indexer_project(py::module_& module) {
  def_op<&glm5::indexer_project>(module, "indexer_project", "hidden", "q_latent", "w_q", "w_k", "k_norm_weight",
                                 "k_norm_bias", "w_weights", "positions", "cos_sin", "interleaved", "eps", "iq", "ik",
                                 "iw");
}

}  // namespace glm5::python
