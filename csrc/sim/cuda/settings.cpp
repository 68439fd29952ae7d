#include "sim/cuda/settings.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "glm5/check.h"

namespace glm5::sim {
namespace {

constexpr const char* kOrders[] = {"fifo", "lifo", "random"};
constexpr const char* kCopies[] = {"late", "early", "random"};

std::mutex mutex;
Settings configured;

int word_of(const char* const (&words)[3], const std::string& word, const char* what) {
  for (int i = 0; i < 3; ++i) {
    if (word == words[i]) return i;
  }
  fail("cuda_sim: %s is \"%s\", needs %s, %s or %s", what, word.c_str(), words[0], words[1], words[2]);
}

}  // namespace

Settings parse_settings(const char* text) {
  Settings settings;
  const std::string all(text);
  for (size_t begin = 0; begin < all.size();) {
    size_t end = all.find(',', begin);
    if (end == std::string::npos) end = all.size();
    const std::string part = all.substr(begin, end - begin);
    const size_t equals = part.find('=');
    const std::string key = part.substr(0, equals), value = equals == std::string::npos ? "" : part.substr(equals + 1);
    if (key == "order") {
      settings.order = static_cast<Order>(word_of(kOrders, value, "order"));
    } else if (key == "copies") {
      settings.copies = static_cast<Copies>(word_of(kCopies, value, "copies"));
    } else if (key == "seed") {
      char* rest = nullptr;
      settings.seed = std::strtoull(value.c_str(), &rest, 10);
      if (value.empty() || *rest != '\0') fail("cuda_sim: seed is \"%s\", needs a number", value.c_str());
    } else {
      fail("cuda_sim: a setting is \"%s\", needs order=, copies= or seed=", part.c_str());
    }
    begin = end + 1;
  }
  return settings;
}

std::string to_string(const Settings& settings) {
  return std::string("order=") + kOrders[static_cast<int>(settings.order)] +
         ",copies=" + kCopies[static_cast<int>(settings.copies)] + ",seed=" + std::to_string(settings.seed);
}

Settings current_settings() {
  if (const char* text = std::getenv(kReplayVariable)) return parse_settings(text);
  const std::lock_guard<std::mutex> lock(mutex);
  return configured;
}

void configure(const Settings& settings) {
  const std::lock_guard<std::mutex> lock(mutex);
  configured = settings;
}

KernelFault::KernelFault(std::string sentence) : sentence_(std::move(sentence)) {}
KernelFault::~KernelFault() = default;
const char* KernelFault::what() const noexcept {
  return sentence_.c_str();
}

}  // namespace glm5::sim
