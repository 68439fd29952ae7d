#include "glm5/ops/quantize_per_token.h"

#include "bind.h"

namespace glm5::python {

void bind_quantize_per_token(py::module_& module) {
  def_op<&glm5::quantize_per_token>(module, "quantize_per_token", "x", "q", "scale");
}

}  // namespace glm5::python
