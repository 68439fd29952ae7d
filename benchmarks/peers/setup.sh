#!/usr/bin/env bash
# Usage: setup.sh [FOLDER]. Makes a virtual environment with the peers that cpu_model.py measures beside glm5sdk.
# llama.cpp is compiled for this processor from the sources that llama-cpp-python ships (half an hour on two cores);
# JOBS=n compiles with n jobs. A peer that cannot be installed is left out, and the benchmark says that it is absent.
set -euo pipefail
folder=${1:-.venv-peers}
python=${PYTHON:-python3}
llama=${LLAMA_CPP:-llama-cpp-python==0.3.36}

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
"$folder/bin/pip" install --quiet numpy gguf

# Only the library: no tools, no server, no image models.

export CMAKE_ARGS="${CMAKE_ARGS:-} -DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF \
 -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF"
export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-1}
failed=()
"$folder/bin/pip" install --no-binary llama-cpp-python "$llama" || failed+=(llama.cpp)
"$folder/bin/pip" install --quiet --only-binary :all: kt-kernel || failed+=(kt-kernel)
[ "${#failed[@]}" -eq 0 ] || echo "not installed: ${failed[*]}; the benchmark reports them as absent" >&2
