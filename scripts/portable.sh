#!/usr/bin/env bash
# Kernels where they were not built for: x86-64 under emulated older processors, AArch64 cross-compiled and emulated.
# Tools that are missing are named and their part is left out, unless GLM5_PORTABLE=all makes that an error.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
missing=0
need() {
  local tool=$1 package=$2
  command -v "$tool" >/dev/null && return
  echo "portable: $tool is missing, its part is left out (Debian and Ubuntu: apt-get install $package)"
  missing=1
  return 1
}
out=build/portable
mkdir -p "$out"

if [ "$(uname -m)" = x86_64 ]; then
  # Other targets' builds have a library of that name, too.
  builds=$(ls -d build/*/csrc/CMakeFiles/glm5_cpu_baseline.dir 2>/dev/null | sed 's|CMakeFiles/.*|libglm5_kernels.a|')
  # shellcheck disable=SC2086 # one word a build
  kernels=$([ -z "$builds" ] || ls -t $builds 2>/dev/null | head -1 || true)
  [ -n "$kernels" ] || die "portable: no build/*/csrc/libglm5_kernels.a of the CPU, needs the CPU backend built: make setup"
  "${CXX:-c++}" -std=c++17 -O1 -Icsrc/include tests/portable/probe.cpp "$kernels" -pthread -o "$out/probe"
  echo "this processor:"
  "$out/probe"
  if need qemu-x86_64 qemu-user; then
    for cpu in core2duo Nehalem Haswell; do
      echo "emulated $cpu:"
      qemu-x86_64 -cpu "$cpu" "$out/probe" 2>"$out/qemu.log" || { cat "$out/qemu.log" >&2; die "portable: the kernels failed on an emulated $cpu"; }
    done
  fi
fi

if need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu && need qemu-aarch64 qemu-user; then
  "$VENV/bin/cmake" -S . -B "$out/aarch64" -G Ninja -DCMAKE_MAKE_PROGRAM="$VENV/bin/ninja" -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DGLM5_BINDINGS=OFF -DGLM5_PROBE=ON >/dev/null
  "$VENV/bin/cmake" --build "$out/aarch64" -j"$(nproc)" --target probe >"$out/aarch64.log" 2>&1 || { tail -40 "$out/aarch64.log" >&2; die "portable: the AArch64 build failed"; }
  echo "emulated AArch64:"
  qemu-aarch64 -L /usr/aarch64-linux-gnu "$out/aarch64/probe"
fi
[ $missing = 0 ] || [ "${GLM5_PORTABLE:-}" != all ] || die "portable: tools are missing and GLM5_PORTABLE=all asks for every part"
