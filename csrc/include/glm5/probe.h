// What the processor reaches at best, measured: the ceilings that kernels are compared with.
#pragma once

#include <cstdint>

#include "glm5/context.h"

namespace glm5 {

// Bytes a second that all threads of the pool together read from a buffer of `bytes`, best of `repeats`; for memory
// bandwidth the buffer must be larger than the last cache. Throws ContractError unless both are positive.
double probe_read(int64_t bytes, int repeats);

enum class Product : int { f32 = 0, bf16 = 1, int8 = 2 };

// Operations a second (a multiply-add counts two) of a level's own dot product or fma instruction on registers, all
// threads together, running for about `seconds`. 0 when the level has no instruction for that product (it then
// computes in f32). Throws ContractError when the processor lacks the level.
double probe_product(Level level, Product product, double seconds);

}  // namespace glm5
