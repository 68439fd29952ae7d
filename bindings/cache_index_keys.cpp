#include "glm5/ops/cache_index_keys.h"

#include "bind.h"

namespace glm5::python {

void bind_cache_index_keys(py::module_& module) {
  def_op<&glm5::cache_index_keys>(module, "cache_index_keys", "rows", "index_cache", "slots", "format");
}

}  // namespace glm5::python
