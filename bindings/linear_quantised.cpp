#include "glm5/ops/linear_quantised.h"

#include "bind.h"

namespace glm5::python {

// An overload of linear: a weight of few bits comes as two tensors.
void bind_linear_quantised(py::module_& module) {
  def_op<&glm5::linear_quantised>(module, "linear", "x", "values", "scales", "bias", "y");
}

}  // namespace glm5::python
