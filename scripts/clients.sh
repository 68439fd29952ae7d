#!/usr/bin/env bash
# Usage: clients.sh [pytest arguments]. Other people's clients, in an environment of their own, against `glm5 serve`.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
clients=$ROOT/build/clients
packages=('litellm' 'lm-eval[api]==0.4.13' 'guidellm==0.8.1')
key=$({ echo "$TORCH ${packages[*]}"; "$PY" --version; } | sha256sum)
if [ "$(cat "$clients/.stamp" 2>/dev/null)" != "$key" ]; then
  echo "installing ${packages[*]} into build/clients"
  "$PY" -m venv --clear "$clients"
  # torch goes first and by exact version, as in setup.sh: another build may be gigabytes larger.
  # shellcheck disable=SC2086 # TORCH may carry pip options
  "$clients/bin/python" -m pip install --quiet --progress-bar off $TORCH
  "$clients/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$clients/.torch-pin"
  "$clients/bin/python" -m pip install --quiet --progress-bar off -c "$clients/.torch-pin" "${packages[@]}"
  echo "$key" >"$clients/.stamp"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false GLM5SDK_CLIENTS=$clients/bin/python
"$PY" -m pytest tests/clients "$@"
