#include "glm5/ops/hadamard.h"

#include "bind.h"

namespace glm5::python {

void bind_hadamard(py::module_& module) {
  def_op<&glm5::hadamard>(module, "hadamard", "x", "y");
}

}  // namespace glm5::python
