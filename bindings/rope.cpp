#include "glm5/ops/rope.h"

#include "bind.h"

namespace glm5::python {

void bind_rope(py::module_& module) {
  def_op<&glm5::rope>(module, "rope", "x", "positions", "cos_sin", "interleaved", "y");
}

}  // namespace glm5::python
