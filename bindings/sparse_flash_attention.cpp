#include "glm5/ops/sparse_flash_attention.h"

#include "bind.h"

namespace glm5::python {

void bind_sparse_flash_attention(py::module_& module) {
  def_op<&glm5::sparse_flash_attention>(module, "sparse_flash_attention", "q", "kv_cache", "block_table", "request_ids",
                                        "indices", "scale", "v_dim", "format", "out", "lse");
}

}  // namespace glm5::python
