#include "glm5/ops/window_stride_indices.h"

#include "bind.h"

namespace glm5::python {

void bind_window_stride_indices(py::module_& module) {
  def_op<&glm5::window_stride_indices>(module, "window_stride_indices", "kv_lens", "window", "stride", "topk",
                                       "indices");
}

}  // namespace glm5::python
