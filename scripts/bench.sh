#!/usr/bin/env bash
# Times every op on this machine; arguments go to pytest (for example -k linear).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
"$PY" -m pytest benchmarks "$@"
