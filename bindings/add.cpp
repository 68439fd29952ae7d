#include "glm5/ops/add.h"

#include "bind.h"

namespace glm5::python {

void bind_add(py::module_& module) {
  def_op<&glm5::add>(module, "add", "x", "y", "z");
}

}  // namespace glm5::python
