// Where in a kernel something happened: every device function of the simulator takes the place of its call.
#pragma once

namespace glm5::sim {

struct Site {
  const char* file = nullptr;
  int line = 0;
};

// The last parameter of a device function: filled in at the call.
#define GLM5_SIM_SITE                        \
  ::glm5::sim::Site at = ::glm5::sim::Site { \
    __builtin_FILE(), __builtin_LINE()       \
  }

}  // namespace glm5::sim
