#include "glm5/ops/quantize_per_group.h"

#include "cpu/kernel.h"
#include "cpu/quantize_groups.h"

GLM5_KERNEL(quantize_per_group, (const Context& ctx, const TensorView& x, const TensorView& q, const TensorView& scale),
            (ctx, x, q, scale)) {
  (void)ctx;
  quantize_groups("quantize_per_group", x, kGroup, q, scale);
}
