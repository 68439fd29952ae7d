#include "glm5/ops/moe_gate.h"

#include "bind.h"

namespace glm5::python {

void bind_moe_gate(py::module_& module) {
  def_op<&glm5::moe_gate>(module, "moe_gate", "x", "w", "bias", "topk", "n_group", "topk_group", "score", "renormalise",
                          "scale", "temperature", "ids", "weights");
}

}  // namespace glm5::python
