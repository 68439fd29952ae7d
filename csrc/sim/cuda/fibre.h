// Fibres: stacks to switch between. A CUDA thread is a fibre; all fibres of a block run on one thread of the system.
#pragma once

#include <cstddef>

#if defined(__x86_64__) && !defined(GLM5_SIM_UCONTEXT)
#define GLM5_SIM_SWITCH 1
#else
#include <ucontext.h>
#define GLM5_SIM_SWITCH 0
#endif

namespace glm5::sim {

struct Fibre {
#if GLM5_SIM_SWITCH
  void* sp = nullptr;
#else
  ucontext_t context;
#endif
  char* stack = nullptr;  // its lowest byte; null for the stack of the thread of the system
  size_t bytes = 0;
  void* sanitizer = nullptr;
};

// Leaves `from` and continues `to`; returns when somebody continues `from`. `last`: `from` never will be.
void switch_fibre(Fibre& from, Fibre& to, bool last);

// Lets `fibre` begin at `entry`, which must never return, when it is continued next. `colour` staggers the stacks over
// the sets of the cache. What it was doing before is abandoned.
void prepare_fibre(Fibre& fibre, void (*entry)(), unsigned colour);

// To be called first of all on a fibre that was just continued for the first time.
void fibre_begins();

// Equal stacks, each with a page below it that nothing may touch.
class Stacks {
 public:
  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  void reserve(unsigned count);
  char* stack(unsigned i) const;
  size_t bytes() const;
  // Which stack's guard page an address lies in, -1 for none.
  int guard_of(const void* address) const;

 private:
  char* base_ = nullptr;
  unsigned count_ = 0;
};

}  // namespace glm5::sim
