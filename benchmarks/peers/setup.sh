#!/usr/bin/env bash
# Usage: setup.sh [FOLDER]. Makes a virtual environment with the peers that cpu_model.py measures beside glm5sdk.
# llama.cpp is compiled for this processor from the sources that llama-cpp-python ships (a quarter of an hour on two
# idle cores); JOBS=n compiles with n jobs. Can be run again: it goes on where it was stopped. A peer that cannot be
# installed is left out, and the benchmark says that it is absent.
set -euo pipefail
folder=${1:-.venv-peers}
python=${PYTHON:-python3}
llama=${LLAMA_CPP:-llama-cpp-python==0.3.36}

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
folder=$(cd "$folder" && pwd -P)
pip=("$folder/bin/pip" --disable-pip-version-check)
"${pip[@]}" install --quiet numpy gguf cmake ninja
failed=()

# Only libllama and what it computes with: no tools, no server, no chat templates. The Python part then finds it
# through LLAMA_CPP_LIB_PATH, which the benchmark sets.
unpack_llama() {
  [ ! -d "$sources" ] || return 0
  rm -rf "$folder/download" "$sources.part" && mkdir -p "$sources.part" &&
    "${pip[@]}" download --quiet --no-deps --no-binary :all: --dest "$folder/download" "$llama" &&
    tar -xzf "$folder"/download/*.tar.gz -C "$sources.part" --strip-components 1 && mv "$sources.part" "$sources"
}
build_llama() {
  sources=$folder/llama-sources build=$folder/llama-build
  unpack_llama &&
    "$folder/bin/cmake" -S "$sources/vendor/llama.cpp" -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$folder/bin/ninja" \
      -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DLLAMA_BUILD_COMMON=OFF \
      -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF \
      -DLLAMA_BUILD_APP=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF &&
    "$folder/bin/cmake" --build "$build" --target llama --parallel "${JOBS:-1}" &&
    CMAKE_ARGS=-DLLAMA_BUILD=OFF "${pip[@]}" install --quiet "$sources"
}

build_llama || failed+=(llama.cpp)
if [ "${#failed[@]}" -ne 0 ]; then
  echo "not installed: ${failed[*]}; the benchmark reports them as absent" >&2
  exit 1
fi
