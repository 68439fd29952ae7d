#!/usr/bin/env bash
# Usage: cuda_compile.sh [architecture ...]. Compiles every CUDA kernel for each architecture, without a GPU. A spill,
# local memory or a warning is an error. PTX stands in csrc/cuda/dev only.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
nvcc=${NVCC:-nvcc}
[ "$#" -gt 0 ] || set -- 80 90a 100 120
mapfile -t kernels < <(find csrc/cuda -maxdepth 1 -name '*.cu' | sort)

if found=$(grep -rnE '\b(asm|__asm__)\b|__shared__|__syncthreads|__shfl|__ballot' csrc/cuda --include='*.cu' --include='*.cuh' --include='*.h' |
  grep -v '^csrc/cuda/dev/'); then
  die "PTX and warp intrinsics belong in csrc/cuda/dev:
$found"
fi
command -v "$nvcc" >/dev/null || die "nvcc is missing, needs CUDA 12.8 or newer; name it: NVCC=/usr/local/cuda/bin/nvcc"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0
for arch in "$@"; do
  for kernel in "${kernels[@]}"; do
    if ! "$nvcc" -std=c++17 -O3 -fmad=false -Werror all-warnings -Icsrc -Icsrc/include -Xptxas -v \
      -gencode "arch=compute_$arch,code=sm_$arch" -cubin -o /dev/null "$kernel" >"$log" 2>&1; then
      cat "$log" >&2
      failed=1
      continue
    fi
    python3 scripts/ptxas_report.py "$kernel" "$arch" <"$log" || failed=1
  done
done
[ "$failed" -eq 0 ] || die "some kernels do not compile as they must"
