#include "glm5/ops/grouped_gemm_quantised.h"

#include "bind.h"

namespace glm5::python {

// An overload of grouped_gemm: a weight of few bits comes as two tensors.
void bind_grouped_gemm_quantised(py::module_& module) {
  def_op<&glm5::grouped_gemm_quantised>(module, "grouped_gemm", "x", "values", "scales", "offsets", "y");
}

}  // namespace glm5::python
