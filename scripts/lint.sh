#!/usr/bin/env bash
# Usage: lint.sh [--fix]. Runs every check even after one failed, then says which did.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
bin=$VENV/bin
mapfile -t native < <(find csrc bindings -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) | sort)

if [ "${1:-}" = --fix ]; then
  "$bin/ruff" check --fix .
  "$bin/ruff" format .
  [ "${#native[@]}" -eq 0 ] || "$bin/clang-format" -i "${native[@]}"
  exit
fi

failed=()
check() {
  local name=$1
  shift
  "$@" || failed+=("$name")
}
check ruff "$bin/ruff" check .
check ruff-format "$bin/ruff" format --check .
check mypy "$bin/mypy"
check import-contracts "$bin/lint-imports"
check codespell "$bin/codespell"
check docs "$PY" scripts/write_docs.py --check
check sizes "$PY" scripts/check_sizes.py
[ "${#native[@]}" -eq 0 ] || check clang-format "$bin/clang-format" --dry-run --Werror "${native[@]}"
[ "${#failed[@]}" -eq 0 ] || die "lint failed: ${failed[*]}"
