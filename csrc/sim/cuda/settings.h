// How a run of the simulator is scheduled. A kernel without races gives the same bits under all settings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

namespace glm5::sim {

enum class Order : int { fifo, lifo, random };    // which ready thread of a block runs next
enum class Copies : int { late, early, random };  // when an asynchronous copy lands between its issue and its wait

struct Settings {
  Order order = Order::fifo;
  Copies copies = Copies::late;
  uint64_t seed = 0;  // of random choices; odd seeds lay tensors against the guard page below instead of above
};

constexpr const char* kReplayVariable = "GLM5SDK_CUDA_SIM";

// What the variable says ("order=random,copies=late,seed=7", any part may be missing), else what was configured.
// Throws ContractError for words it does not know.
Settings current_settings();
void configure(const Settings& settings);
Settings parse_settings(const char* text);
std::string to_string(const Settings& settings);

// A kernel broke a rule of the machine. The sentence names the kernel, block, thread and place, and how to replay it.
class KernelFault : public std::exception {
 public:
  explicit KernelFault(std::string sentence);
  ~KernelFault() override;
  const char* what() const noexcept override;

 private:
  std::string sentence_;
};

}  // namespace glm5::sim
