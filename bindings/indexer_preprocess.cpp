#include "glm5/ops/indexer_preprocess.h"

#include "bind.h"

namespace glm5::python {

void bind_indexer_preprocess(py::module_& module) {
  def_op<&glm5::indexer_preprocess>(module, "indexer_preprocess", "hidden", "q_latent", "w_q", "w_k", "k_norm_weight",
                                    "k_norm_bias", "w_weights", "positions", "cos_sin", "index_cache", "slots",
                                    "interleaved", "eps", "format", "iq", "iw");
}

}  // namespace glm5::python
