#include "sim/cuda/fault.h"

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include <dlfcn.h>
#include <ucontext.h>

#include "sim/cuda/block.h"
#include "sim/cuda/guarded.h"

namespace glm5::sim {
namespace {

struct sigaction previous_segv, previous_bus;

void on_signal(int number, siginfo_t* info, void* context) {
  Block* block = Block::current();
  const void* pc = nullptr;
  bool wrote = false;
#if defined(__x86_64__)
  const auto* machine = static_cast<const ucontext_t*>(context);
  pc = reinterpret_cast<const void*>(machine->uc_mcontext.gregs[REG_RIP]);
  wrote = (machine->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#elif defined(__aarch64__)
  pc = reinterpret_cast<const void*>(static_cast<const ucontext_t*>(context)->uc_mcontext.pc);
#endif
  if (block != nullptr) block->fail_in_signal(info->si_addr, pc, wrote);
  // Not ours: whoever was here before decides; without anybody the access is repeated and ends the process.
  struct sigaction& previous = number == SIGSEGV ? previous_segv : previous_bus;
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(number, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(number);
  } else {
    sigaction(number, &previous, nullptr);
  }
}

void install() {
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &previous_segv);
  sigaction(SIGBUS, &action, &previous_bus);
}

// A stack of its own for the handler: the fibre's may be what overflowed.
struct SignalStack {
  std::unique_ptr<char[]> memory;
  SignalStack() {
    stack_t now{};
    if (sigaltstack(nullptr, &now) == 0 && (now.ss_flags & SS_DISABLE) == 0) return;
    constexpr size_t kBytes = size_t{64} << 10;
    memory.reset(new char[kBytes]);
    stack_t mine{};
    mine.ss_sp = memory.get();
    mine.ss_size = kBytes;
    sigaltstack(&mine, nullptr);
  }
  ~SignalStack() {
    if (memory == nullptr) return;
    stack_t off{};
    off.ss_flags = SS_DISABLE;
    sigaltstack(&off, nullptr);
  }
};

// The line of the kernel that an instruction belongs to: the innermost that is no device function's.
std::string line_of(const void* pc) {
  Dl_info info{};
  if (pc == nullptr || dladdr(pc, &info) == 0 || info.dli_fname == nullptr) return "";
  const auto offset = reinterpret_cast<uintptr_t>(pc) - reinterpret_cast<uintptr_t>(info.dli_fbase);
  std::string name(info.dli_fname), quoted = "'";
  for (char c : name) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  char number[32];
  std::snprintf(number, sizeof number, "' 0x%llx", static_cast<unsigned long long>(offset));
  FILE* pipe = popen(("addr2line -i -e " + quoted + number + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return "";
  std::string found;
  char line[512];
  while (std::fgets(line, sizeof line, pipe) != nullptr) {
    line[std::strcspn(line, "\n")] = '\0';
    char* discriminator = std::strstr(line, " (discriminator");
    if (discriminator != nullptr) *discriminator = '\0';
    if (std::strchr(line, '?') != nullptr) continue;
    // Paths begin where the tree does, wherever it was built.
    const char* tree = std::strstr(line, "csrc/");
    const char* path = tree == nullptr ? line : tree;
    const bool tool = std::strstr(path, "sim/cuda/") != nullptr && std::strstr(path, "selftest") == nullptr;
    if (found.empty() && !tool && std::strstr(path, "/dev/") == nullptr) found = path;
  }
  pclose(pipe);
  return found;
}

}  // namespace

SignalGuard::SignalGuard() {
  static std::once_flag once;
  std::call_once(once, install);
  static thread_local SignalStack stack;
  (void)stack;
}

void describe_bad_access(char* to, size_t size, const void* address, const void* pc, bool wrote, bool stack_overflow,
                         Site known) {
  char where[256] = "";
  if (stack_overflow) {
    std::snprintf(where, sizeof where, ": the thread's stack is full");
  } else {
    Guarded::describe(where, sizeof where, address);
  }
  const std::string line =
      known.file == nullptr ? line_of(pc) : std::string(known.file) + ":" + std::to_string(known.line);
  std::snprintf(to, size, "invalid %s address %p%s%s%s", wrote ? "write to" : "access to", address, where,
                line.empty() ? "" : ", at ", line.c_str());
}

}  // namespace glm5::sim
