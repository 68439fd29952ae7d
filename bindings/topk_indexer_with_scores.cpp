#include "glm5/ops/topk_indexer_with_scores.h"

#include "bind.h"

namespace glm5::python {

void bind_topk_indexer_with_scores(py::module_& module) {
  def_op<&glm5::topk_indexer_with_scores>(module, "topk_indexer_with_scores", "iq", "iw", "index_cache", "block_table",
                                          "request_ids", "kv_lens", "topk", "max_kv_len", "format", "workspace_bytes",
                                          "indices", "scores");
}

}  // namespace glm5::python
