#include "glm5/ops/sample.h"

#include "bind.h"

namespace glm5::python {

void bind_sample(py::module_& module) {
  def_op<&glm5::sample>(module, "sample", "logits", "temperature", "top_k", "top_p", "min_p", "seed", "position", "ids",
                        "logprob", "logprob_processed");
}

}  // namespace glm5::python
