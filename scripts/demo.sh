#!/usr/bin/env bash
# Sets up, then trains, saves, loads and samples a tiny GLM-5. GLM5_DEMO_SECONDS shortens the training.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
scripts/setup.sh train
"$PY" scripts/demo.py "$@"
