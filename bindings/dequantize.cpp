#include "glm5/ops/dequantize.h"

#include "bind.h"

namespace glm5::python {

void bind_dequantize(py::module_& module) {
  def_op<&glm5::dequantize>(module, "dequantize", "q", "scale", "y");
}

}  // namespace glm5::python
