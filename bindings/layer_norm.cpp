#include "glm5/ops/layer_norm.h"

#include "bind.h"

namespace glm5::python {

void bind_layer_norm(py::module_& module) {
  def_op<&glm5::layer_norm>(module, "layer_norm", "x", "weight", "bias", "eps", "y");
}

}  // namespace glm5::python
