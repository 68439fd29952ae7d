#!/usr/bin/env bash
# Usage: test.sh smoke|merge|full|sweep [pytest arguments]. The tree's own tests, then the conformance suite that ships.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
tier=${1:-merge}
shift || true
case $tier in
smoke) marks="smoke" ;;
merge) marks="not full and not slow" ;;
full) marks="not slow" ;;
sweep) marks="" ;;
*) die "tier is $tier, needs smoke, merge, full or sweep" ;;
esac
# Two workers with one thread each: the size of the machines that check every change.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
"$PY" -m pytest -n "${WORKERS:-2}" -m "$marks" "$@" tests
"$PY" -m pytest -n "${WORKERS:-2}" --pyargs glm5sdk.testing --backend cpu --tier "$tier" "$@"
# The CUDA kernels on the simulator: the ops it has; what the reference does has just been tested.
if [[ " $BACKENDS " == *" sim "* ]]; then
  ops=$("$PY" -c 'from glm5sdk_sim.impls import ROWS; print(*(f"--op {row.op}" for row in ROWS))')
  # shellcheck disable=SC2086 # a list of options
  "$PY" -m pytest -n "${WORKERS:-2}" --pyargs glm5sdk.testing --backend cuda_sim --tier "$tier" $ops "$@"
fi
