#include "glm5/ops/sparse_flash_attention_bwd.h"

#include "bind.h"

namespace glm5::python {

void bind_sparse_flash_attention_bwd(py::module_& module) {
  def_op<&glm5::sparse_flash_attention_bwd>(module, "sparse_flash_attention_bwd", "grad_out", "grad_lse", "q",
                                            "kv_cache", "block_table", "request_ids", "indices", "scale", "v_dim",
                                            "format", "grad_q", "grad_kv");
}

}  // namespace glm5::python
