#include "glm5/ops/flash_mla_bwd.h"

#include "bind.h"

namespace glm5::python {

void bind_flash_mla_bwd(py::module_& module) {
  def_op<&glm5::flash_mla_bwd>(module, "flash_mla_bwd", "grad_out", "grad_lse", "q", "kv_cache", "block_table",
                               "request_ids", "kv_lens", "scale", "v_dim", "format", "grad_q", "grad_kv");
}

}  // namespace glm5::python
