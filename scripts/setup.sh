#!/usr/bin/env bash
# Usage: setup.sh [train|dev]. Makes .venv with an exact torch, then glm5sdk and its native backends, editable.
# Stamps in .venv say what was installed from which inputs: a second run with the same inputs takes a second.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
extra=${1:-}

find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "Python is ${PYTHON:-python3} ($("${PYTHON:-python3}" --version 2>&1 || true)), needs 3.11 or newer; name one: make PYTHON=/path/to/python3.12"
}

check_compiler() {
  local cxx=${CXX:-c++}
  command -v "$cxx" >/dev/null || die "C++ compiler $cxx is missing, needs one that knows C++20 (Debian and Ubuntu: apt-get install g++); name one: CXX=..."
  echo 'int main() { auto f = []<class T>(T x) { return x; }; return f(0); }' | "$cxx" -std=c++20 -x c++ -fsyntax-only - ||
    die "C++ compiler $cxx is too old, needs C++20 (GCC 11, Clang 14 or newer); name another: CXX=..."
}

make_venv() {
  local python
  # Scripts in a virtual environment hold its absolute path: after a move it is made anew.
  if [ -x "$PY" ] && [ "$(cat "$VENV/.root" 2>/dev/null || echo "$ROOT")" = "$ROOT" ] && "$PY" -m pip --version >/dev/null 2>&1; then return; fi
  python=$(find_python)
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$python has no venv or no ensurepip, needs both (Debian and Ubuntu: apt-get install python3-venv)"
  echo "making $VENV with $("$python" --version)"
  "$python" -m venv --clear "$VENV"
}

install_packages() {
  # torch goes first and by exact version: left to the resolver it may be another build, gigabytes larger.
  # shellcheck disable=SC2086 # TORCH may carry pip options
  "$PY" -m pip install --quiet --progress-bar off $TORCH
  "$PY" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$VENV/.torch-pin"
  "$PY" -m pip install --quiet --progress-bar off -c "$VENV/.torch-pin" 'scikit-build-core>=0.11' 'pybind11>=3.0' cmake ninja
  "$PY" -m pip install --quiet --progress-bar off -c "$VENV/.torch-pin" --no-build-isolation -e ".${extra:+[$extra]}"
}

packages_key() { { echo "$ROOT $TORCH"; "$PY" --version; cat pyproject.toml scripts/setup.sh; } | sha256sum; }

# Python sources are read in place; native sources, and the list of files, decide whether to build again.
# A backend is not built again for another one's kernels.
native_key() {
  local dirs=(csrc bindings "backends/$1") others='^$'
  case $1 in
  cpu) others='^csrc/(cuda|sim)/' ;;
  sim) others='^csrc/cpu/' ;;
  esac
  { packages_key; find "${dirs[@]}" -type f -not -path '*/build/*' -not -name '*.pyc' -not -name '*.so' | grep -vE "$others" | sort
    find "${dirs[@]}" CMakeLists.txt -type f -not -path '*/build/*' -not -name '*.py' -not -name '*.pyc' -not -name '*.so' -print0 |
      grep -zvE "$others" | sort -z | xargs -0 cat; } | sha256sum
}

fresh() { [ "$(cat "$VENV/.stamp-$1" 2>/dev/null)" = "$2" ]; }

make_venv
key=$(packages_key)
if ! fresh "packages-${extra:-base}" "$key" && ! fresh packages-dev "$key"; then
  echo "installing $TORCH and glm5sdk${extra:+[$extra]} into .venv"
  install_packages
  echo "$key" >"$VENV/.stamp-packages-${extra:-base}"
fi
for backend in $BACKENDS; do
  key=$(native_key "$backend")
  fresh "$backend" "$key" && continue
  check_compiler
  echo "building backends/$backend"
  "$PY" -m pip install --quiet --progress-bar off -c "$VENV/.torch-pin" --no-build-isolation --no-deps -e "backends/$backend"
  echo "$key" >"$VENV/.stamp-$backend"
done
echo "$ROOT" >"$VENV/.root"
