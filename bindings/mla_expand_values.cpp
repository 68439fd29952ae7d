#include "glm5/ops/mla_expand_values.h"

#include "bind.h"

namespace glm5::python {

void bind_mla_expand_values(py::module_& module) {
  def_op<&glm5::mla_expand_values>(module, "mla_expand_values", "out", "w_uv", "y");
}

}  // namespace glm5::python
