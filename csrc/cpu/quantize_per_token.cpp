#include "glm5/ops/quantize_per_token.h"

#include "cpu/kernel.h"
#include "cpu/quantize_groups.h"

GLM5_KERNEL(quantize_per_token, (const Context& ctx, const TensorView& x, const TensorView& q, const TensorView& scale),
            (ctx, x, q, scale)) {
  (void)ctx;
  quantize_groups("quantize_per_token", x, x.dim(1), q, scale);
}
