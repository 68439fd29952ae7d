#include "glm5/ops/concat_and_cache_mla.h"

#include "bind.h"

namespace glm5::python {

void bind_concat_and_cache_mla(py::module_& module) {
  def_op<&glm5::concat_and_cache_mla>(module, "concat_and_cache_mla", "rows", "kv_cache", "slots", "v_dim", "format");
}

}  // namespace glm5::python
