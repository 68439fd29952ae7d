#!/usr/bin/env bash
# Builds the base wheel and one wheel per native backend into dist/.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
rm -rf dist
"$PY" -m build --wheel --no-isolation --outdir dist .
for backend in $BACKENDS; do
  [ "$backend" != sim ] || continue # a simulator is not published
  "$PY" -m build --wheel --no-isolation --outdir dist "backends/$backend"
done
ls -l dist
