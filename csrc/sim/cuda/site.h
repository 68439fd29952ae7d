// Where in a kernel something happened: every device function of the simulator takes the place of its call.
#pragma once

namespace glm5::sim {

struct Site {
  const char* file = nullptr;
  int line = 0;

  // The place of the call whose default argument this is.
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    Site site;
    site.file = file;
    site.line = line;
    return site;
  }
};

// The last parameter of a device function: filled in at the call.
#define GLM5_SIM_SITE ::glm5::sim::Site at = ::glm5::sim::Site::here()

}  // namespace glm5::sim
