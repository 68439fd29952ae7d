#include "glm5/ops/topk_indexer.h"

#include "bind.h"

namespace glm5::python {

void bind_topk_indexer(py::module_& module) {
  def_op<&glm5::topk_indexer>(module, "topk_indexer", "iq", "iw", "index_cache", "block_table", "request_ids",
                              "kv_lens", "topk", "max_kv_len", "format", "workspace_bytes", "indices");
}

}  // namespace glm5::python
