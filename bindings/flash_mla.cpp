#include "glm5/ops/flash_mla.h"

#include "bind.h"

namespace glm5::python {

void bind_flash_mla(py::module_& module) {
  def_op<&glm5::flash_mla>(module, "flash_mla", "q", "kv_cache", "block_table", "request_ids", "kv_lens", "scale",
                           "v_dim", "format", "out", "lse");
}

}  // namespace glm5::python
