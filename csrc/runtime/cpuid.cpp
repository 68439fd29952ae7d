#include "glm5/cpuid.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace glm5 {
namespace {

#if defined(__x86_64__)
bool bit(unsigned word, int index) {
  return (word >> index) & 1u;
}

// Linux lends the 8 KiB of tile registers only to processes that ask; the answer holds for all their threads.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Register state the operating system saves (XCR0); without it wide registers would be lost at a task switch.
unsigned saved_state() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

Level detect() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return Level::baseline;
  const bool fma = bit(c, 12), osxsave = bit(c, 27), avx = bit(c, 28), f16c = bit(c, 29);
  if (!(fma && osxsave && avx && f16c)) return Level::baseline;
  const unsigned state = saved_state();
  if ((state & 0x6) != 0x6) return Level::baseline;  // xmm and ymm
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !bit(b, 5)) return Level::baseline;
  const bool amx = bit(d, 22) && bit(d, 24) && bit(d, 25);  // bf16, tiles, int8
  const bool f = bit(b, 16), dq = bit(b, 17), bw = bit(b, 30), vl = bit(b, 31), vnni = bit(c, 11);
  if (!(f && dq && bw && vl) || (state & 0xe6) != 0xe6) return Level::avx2;  // and opmask, both zmm halves
  if (!vnni) return Level::avx512;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !bit(a, 5)) return Level::avx512_vnni;
  if (!amx || (state & 0x60000) != 0x60000 || !may_use_tiles()) return Level::avx512_bf16;
  return Level::amx;
}
#else
Level detect() {
  return Level::baseline;
}
#endif

}  // namespace

Level cpu_level() {
  static const Level level = detect();
  return level;
}

}  // namespace glm5
