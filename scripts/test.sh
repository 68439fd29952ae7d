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
