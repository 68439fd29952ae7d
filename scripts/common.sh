# shellcheck shell=bash
# Sourced by every script here: where the tree is, which Python runs, how to stop with one clear line.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$ROOT"
VENV=$ROOT/.venv
PY=$VENV/bin/python
TORCH=${TORCH:-torch==2.13.0}
BACKENDS=${BACKENDS-cpu sim} # folders of backends/ that are built from source here; sim is for development alone
export PIP_DISABLE_PIP_VERSION_CHECK=1

die() {
  printf 'glm5sdk: %s\n' "$*" >&2
  exit 1
}
