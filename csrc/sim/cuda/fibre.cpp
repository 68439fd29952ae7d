#include "sim/cuda/fibre.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define GLM5_SIM_ASAN 1
#else
#define GLM5_SIM_ASAN 0
#endif

namespace glm5::sim {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStack = GLM5_SIM_ASAN ? size_t{256} << 10 : size_t{64} << 10;

}  // namespace

#if GLM5_SIM_SWITCH
// Saves what a callee must keep on the old stack, takes it from the new one.
extern "C" void glm5_sim_switch(void** from, void* to);
asm(R"(
  .text
  .p2align 4
  .local glm5_sim_switch
  .type glm5_sim_switch,@function
glm5_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size glm5_sim_switch,.-glm5_sim_switch
)");
#endif

void switch_fibre(Fibre& from, Fibre& to, bool last) {
#if GLM5_SIM_ASAN
  __sanitizer_start_switch_fiber(last ? nullptr : &from.sanitizer, to.stack, to.bytes);
#else
  (void)last;
#endif
#if GLM5_SIM_SWITCH
  glm5_sim_switch(&from.sp, to.sp);
#else
  swapcontext(&from.context, &to.context);
#endif
#if GLM5_SIM_ASAN
  __sanitizer_finish_switch_fiber(from.sanitizer, nullptr, nullptr);
#endif
}

void fibre_begins() {
#if GLM5_SIM_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

void prepare_fibre(Fibre& fibre, void (*entry)(), unsigned colour) {
  const size_t shift = (colour * 832u) & 16383u & ~63u;
#if GLM5_SIM_SWITCH
  const uintptr_t top = (reinterpret_cast<uintptr_t>(fibre.stack) + fibre.bytes - shift) & ~uintptr_t{63};
  void** p = reinterpret_cast<void**>(top);
  *--p = nullptr;  // where entry would return to; keeps the alignment of a call
  *--p = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--p = nullptr;
  fibre.sp = p;
#else
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = fibre.stack;
  fibre.context.uc_stack.ss_size = fibre.bytes - shift;
  fibre.context.uc_link = nullptr;
  makecontext(&fibre.context, entry, 0);
#endif
#if GLM5_SIM_ASAN
  __asan_unpoison_memory_region(fibre.stack, fibre.bytes);
#endif
}

Stacks::~Stacks() {
  if (base_ != nullptr) munmap(base_, count_ * (kStack + kPage));
}

void Stacks::reserve(unsigned count) {
  if (count <= count_) return;
  void* base = mmap(nullptr, count * (kStack + kPage), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  if (base_ != nullptr) munmap(base_, count_ * (kStack + kPage));
  base_ = static_cast<char*>(base);
  count_ = count;
  for (unsigned i = 0; i < count; ++i) mprotect(base_ + i * (kStack + kPage), kPage, PROT_NONE);
}

char* Stacks::stack(unsigned i) const {
  return base_ + i * (kStack + kPage) + kPage;
}
size_t Stacks::bytes() const {
  return kStack;
}
int Stacks::guard_of(const void* address) const {
  const uintptr_t offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base_);
  if (base_ == nullptr || offset >= count_ * (kStack + kPage)) return -1;
  return offset % (kStack + kPage) < kPage ? static_cast<int>(offset / (kStack + kPage)) : -1;
}

}  // namespace glm5::sim
