"""Child process: llama.cpp runs the workloads through the C functions that llama-cpp-python declares."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers.protocol import CHUNK, PeakMemory, Unsupported, Workload, median_seconds, refuse, serve, token_ids

LIBRARIES = Path(sys.prefix) / "llama-build" / "bin"
if LIBRARIES.is_dir():
    os.environ.setdefault("LLAMA_CPP_LIB_PATH", str(LIBRARIES))
try:
    import llama_cpp
    import numpy as np

    from peers import gguf_file
except (ImportError, OSError, RuntimeError) as error:
    refuse(f"llama.cpp is not installed here ({error}); benchmarks/peers/setup.sh makes it")


class Runner:
    """A model loaded from a GGUF file that is written beside the checkpoint the first time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.checkpoint, self.threads = options.checkpoint, options.threads
        self.model: Any = None
        self.loaded = ""
        if os.environ.get("GLM5_BENCH_VERBOSE") is None:
            self.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
            llama_cpp.llama_log_set(self.silent, None)
        llama_cpp.llama_backend_init()

    def about(self) -> dict[str, Any]:
        return {"version": llama_cpp.__version__, "architecture": gguf_file.ARCHITECTURE}

    def run(self, w: Workload) -> Any:
        if w.random_fill:
            raise Unsupported("its cache cannot be filled without running the prompt")
        if w.kind == "indexer":
            raise Unsupported("its indexer is not timed by itself")
        if w.kind == "memory":
            return self._memory(w)
        self._load(w.int8)
        if w.kind == "logits":
            with self._context(w, 1) as context:
                return self._prefill(context, w).tolist()
        if w.kind == "prefill":
            with self._context(w, 1) as context:
                return w.context / median_seconds(lambda: self._prefill(context, w), w.repeats)
        return self._decode(w)

    def _load(self, int8: bool) -> None:
        name = "model-q8_0.gguf" if int8 else "model-bf16.gguf"
        path = self.checkpoint / name
        if not path.exists():
            part = path.with_suffix(".part")
            gguf_file.write(self.checkpoint, part, int8)
            part.rename(path)
        if self.loaded == name:
            return
        if self.model is not None:
            llama_cpp.llama_model_free(self.model)
        parameters = llama_cpp.llama_model_default_params()
        parameters.load_mode, parameters.n_gpu_layers = llama_cpp.LLAMA_LOAD_MODE_NONE, 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise Unsupported(f"llama.cpp cannot load {name}")
        self.loaded = name
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    @contextlib.contextmanager
    def _context(self, w: Workload, room: int) -> Any:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = w.batch * (w.context + room)
        parameters.n_batch = parameters.n_ubatch = min(CHUNK, w.batch * w.context)
        parameters.n_seq_max = w.batch
        parameters.n_threads = parameters.n_threads_batch = self.threads
        context = llama_cpp.llama_init_from_model(self.model, parameters)
        if not context:
            raise Unsupported(f"llama.cpp cannot make a context of {w.batch} x {w.context + room} tokens")
        try:
            yield context
        finally:
            llama_cpp.llama_free(context)

    def _forget(self, context: Any, sequence: int, length: int) -> None:
        memory = llama_cpp.llama_get_memory(context)
        if not llama_cpp.llama_memory_seq_rm(memory, sequence, length, -1):
            raise Unsupported("its cache cannot forget the last tokens")

    def _step(self, context: Any, tokens: list[tuple[int, int, int]], want: set[int]) -> None:
        """Run (token, position, request)s; those numbered in `want` get logits."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, request) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = request
            batch.logits[i] = i in want
        status = llama_cpp.llama_decode(context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise Unsupported(f"llama_decode gave {status}")

    def _logits(self, context: Any, row: int) -> Any:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), shape=(self.vocabulary,)).copy()

    def _prefill(self, context: Any, w: Workload) -> Any:
        """Logits of the last position of the last request."""
        each = max(1, CHUNK // w.batch)
        ids = [token_ids(w.context, self.vocabulary, request) for request in range(w.batch)]
        for request in range(w.batch):
            self._forget(context, request, 0)
        for begin in range(0, w.context, each):
            end = min(begin + each, w.context)
            tokens = [(ids[r][p], p, r) for r in range(w.batch) for p in range(begin, end)]
            self._step(context, tokens, {len(tokens) - 1})
        return self._logits(context, len(tokens) - 1)

    def _decode(self, w: Workload) -> float:
        with self._context(w, w.steps) as context:
            self._prefill(context, w)
            first = [token_ids(1, self.vocabulary, request)[0] for request in range(w.batch)]

            def steps() -> None:
                for request in range(w.batch):
                    self._forget(context, request, w.context)
                ids = first
                for n in range(w.steps):
                    tokens = [(token, w.context + n, request) for request, token in enumerate(ids)]
                    self._step(context, tokens, set(range(w.batch)))
                    ids = [int(self._logits(context, row).argmax()) for row in range(w.batch)]

            return median_seconds(steps, w.repeats) / w.steps

    def _memory(self, w: Workload) -> int:
        if self.model is not None:
            raise Unsupported("memory needs a process of its own")
        if not (self.checkpoint / "model-bf16.gguf").exists():
            self._load(False)  # writes the file, which takes memory of its own
            raise Unsupported("the GGUF file had to be written first; run again")
        peak = PeakMemory()
        self._load(False)
        peak.restart()
        weights = llama_cpp.llama_model_size(self.model)
        with self._context(w, 1) as context:
            self._prefill(context, w)
        return peak.above() - weights


if __name__ == "__main__":
    serve(Runner)
