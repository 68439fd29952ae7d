#include "glm5/ops/grouped_gemm.h"

#include "bind.h"

namespace glm5::python {

void bind_grouped_gemm(py::module_& module) {
  def_op<&glm5::grouped_gemm>(module, "grouped_gemm", "x", "w", "offsets", "y");
}

}  // namespace glm5::python
