"""Usage: nvrtc_compile.py [architecture ...]. Compiles the CUDA sources as a run-time compiler would, without a GPU.

The compiler is that of the wheel nvidia-cuda-nvrtc, or the library that NVRTC names.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = "glm5::cuda::attention"
FORMS = {
    "rms_norm.cu": ["glm5::cuda::rms_norm_kernel<float>", "glm5::cuda::rms_norm_kernel<glm5::dev::bf16>"],
    "sparse_flash_attention.cu": [
        f"{ATTENTION}_bf16_kernel<glm5::cuda::PlainCache<glm5::dev::bf16>>",
        f"{ATTENTION}_bf16_kernel<glm5::cuda::ByteCache>",
        f"{ATTENTION}_f32_kernel<glm5::cuda::PlainCache<float>>",
        f"{ATTENTION}_f32_kernel<glm5::cuda::ByteCache>",
        "glm5::cuda::merge_splits_kernel<float>",
    ],
    "topk_indexer.cu": [
        "glm5::cuda::topk_indexer_kernel<glm5::dev::bf16, glm5::cuda::PlainKeys<glm5::dev::bf16>>",
        "glm5::cuda::topk_indexer_kernel<glm5::dev::bf16, glm5::cuda::ByteKeys>",
        "glm5::cuda::topk_indexer_kernel<float, glm5::cuda::PlainKeys<float>>",
        "glm5::cuda::topk_merge_kernel<void>",
    ],
    "topk_indexer_with_scores.cu": ["glm5::cuda::topk_indexer_kernel<float, glm5::cuda::ByteKeys>"],
}


def library() -> ctypes.CDLL:
    """The run-time compiler.

    Raises:
        SystemExit: there is none.
    """
    named = os.environ.get("NVRTC")
    spec = None if named else find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [named] if named else [str(p) for f in folders for p in sorted(Path(f).glob("*/lib/libnvrtc.so*"))]
    if not found:
        sys.exit("nvrtc: no compiler, needs the wheel nvidia-cuda-nvrtc, or a library by name: NVRTC=...")
    return ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)


def compile_source(nvrtc: ctypes.CDLL, path: Path, names: list[str], arch: str) -> int:
    """Bytes of the cubin of one source with the named kernels.

    Args:
        nvrtc: the compiler.
        path: of the source.
        names: C++ expressions of the kernels to keep.
        arch: e.g. `90a`.

    Raises:
        SystemExit: it does not compile; shows the compiler's words.
    """
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(), 0, None, None)
    for name in names:
        nvrtc.nvrtcAddNameExpression(program, name.encode())
    options = [f"--gpu-architecture=sm_{arch}", "--std=c++17", "--fmad=false", f"-I{ROOT / 'csrc'}"]
    given = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        sys.exit(f"{path.name}: NVRTC refuses it for sm_{arch}:\n{log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    return int(size.value)


def main() -> None:
    """Compile every source that has forms; a source without forms is an error."""
    sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    if missing := [p.name for p in sources if p.name not in FORMS]:
        sys.exit(f"nvrtc: no kernels are named for {', '.join(missing)}, needs a line in FORMS")
    nvrtc = library()
    for arch in sys.argv[1:] or ["80", "90a", "100", "120"]:
        for path in sources:
            print(f"sm_{arch:5} {compile_source(nvrtc, path, FORMS[path.name], arch):8} bytes  {path.name}")


if __name__ == "__main__":
    main()
