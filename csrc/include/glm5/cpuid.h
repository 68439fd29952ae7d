// Which instruction level this processor and its operating system allow.
#pragma once

#include "glm5/context.h"

namespace glm5 {

// The highest level whose instructions, and those of every level below it, may be executed here.
Level cpu_level();

}  // namespace glm5
