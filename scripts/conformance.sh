#!/usr/bin/env bash
# Installs dist/*.whl into a clean environment outside the tree and runs the shipped conformance suite there, as a user would.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
wheels=("$ROOT"/dist/glm5sdk-*.whl "$ROOT"/dist/glm5sdk_cpu-*.whl)
[ -f "${wheels[0]}" ] && [ -f "${wheels[1]}" ] || die "dist/ has no wheels, needs glm5sdk and glm5sdk_cpu; run make wheels"
clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT
"$PY" -m venv "$clean/venv"
python=$clean/venv/bin/python
# shellcheck disable=SC2086 # TORCH may carry pip options
"$python" -m pip install --quiet --progress-bar off $TORCH
"$python" -m pip install --quiet --progress-bar off -c "$VENV/.torch-pin" "${wheels[0]}[test]" "${wheels[1]}"
cd "$clean"
"$python" - "$clean" <<'CHECK'
import importlib, pathlib, sys

for name in ("glm5sdk", "glm5sdk_cpu"):
    where = pathlib.Path(importlib.import_module(name).__file__).resolve()
    if not where.is_relative_to(pathlib.Path(sys.argv[1]).resolve()) or "site-packages" not in where.parts:
        sys.exit(f"{name}: import path is {where}, needs the wheel's site-packages")
    print(f"{name} comes from {where.parent}")
CHECK
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -p no:cacheprovider --pyargs glm5sdk.testing --backend cpu "$@"
