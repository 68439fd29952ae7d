#include "glm5/ops/quantize_per_group.h"

#include "bind.h"

namespace glm5::python {

void bind_quantize_per_group(py::module_& module) {
  def_op<&glm5::quantize_per_group>(module, "quantize_per_group", "x", "q", "scale");
}

}  // namespace glm5::python
