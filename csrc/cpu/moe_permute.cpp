#include "glm5/ops/moe_permute.h"

#include <cstring>

#include "cpu/kernel.h"
#include "cpu/rows/routing.h"

GLM5_KERNEL(moe_permute,
            (const Context& ctx, const TensorView& x, const TensorView& ids, int64_t num_experts,
             const TensorView& rows, const TensorView& row_ids, const TensorView& offsets),
            (ctx, x, ids, num_experts, rows, row_ids, offsets)) {
  (void)ctx;
  const int64_t n = x.dim(1), active = ids.dim(1), slots = ids.numel();
  const int32_t* experts = ids.data<int32_t>();
  int32_t *order = row_ids.out<int32_t>(), *bounds = offsets.out<int32_t>();
  if (num_experts < 0) fail("moe_permute: num_experts is %lld, needs 0 or more", static_cast<long long>(num_experts));
  check_ids("moe_permute", experts, ids.dim(0), active, num_experts);
  for_float_type("moe_permute: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* from = x.data<T>();
    T* to = rows.out<T>();
    sort_slots(experts, slots, num_experts, order, bounds);
    parallel_for(slots, rows_per_range(n), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (order[r] >= 0) {
          std::memcpy(static_cast<void*>(to + r * n), from + order[r] / active * n, n * sizeof(T));
        } else {
          std::memset(static_cast<void*>(to + r * n), 0, n * sizeof(T));
        }
      }
    });
  });
}
