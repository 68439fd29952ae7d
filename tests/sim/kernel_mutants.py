"""Bugs to plant in the real kernels: where, what stands there, what replaces it, what the simulator says to that."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]

RACE = "data race|nothing has written|asynchronous copy of thread"
SYNC = "dev::sync_threads();\n"


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Attributes:
        name: of the bug.
        file: below csrc/cuda.
        old: text that stands there.
        new: text that replaces its first place.
        says: pattern of the fault.
    """

    name: str
    file: str
    old: str
    new: str
    says: str


BF16, F32, LOAD, SHAPE = (f"attention/{name}.cuh" for name in ("bf16", "f32", "load", "shape"))
BEST, SCORE = "topk/best.cuh", "topk/score.cuh"
PAD = "latent_pad + rope_pad;\n"
ROW = "return slot >= 0 ? cache.rows + slot * shape.row() : static_cast<const T*>(nullptr);"
MUTANTS = (
    Mutant("no barrier after the copy", BF16, f"      {SYNC}      score_keys", "      score_keys", RACE),
    Mutant("no wait for the copy", BF16, f"wait<0>();\n      {SYNC}", f"wait<1>();\n      {SYNC}", RACE),
    Mutant("softmax before all scores", BF16, f"tiles);\n      {SYNC}      softmax", "tiles);\n      softmax", RACE),
    Mutant("values before all of softmax", BF16, f"      {SYNC}      const float low", "      const float low", RACE),
    Mutant("first half refilled early", BF16, f"      {SYNC}      if (more) fetch", "      if (more) fetch", RACE),
    Mutant("second half refilled early", BF16, f"      {SYNC}      if (!more) break", "      if (!more) break", RACE),
    Mutant("merge before all factors", BF16, f"fresh);\n    {SYNC}", "fresh);\n", RACE),
    Mutant("scores of half a tile", F32, f"k, scores);\n        {SYNC}", "k, scores);\n", RACE),
    Mutant("absent rows read", LOAD, ROW, "return cache.rows + slot * shape.row();", "before the start of `kv_cache`"),
    Mutant("padding not cleared", LOAD, PAD, f"{PAD}  if (count == 64) return;\n", RACE),
    Mutant("one page too many", SHAPE, "page >= shape.pages)", "page > shape.pages)", "behind the end of `kv_cache`"),
    Mutant("one column too many", SHAPE, "column >= shape.latent)", "column > shape.latent)", "the end of `out`"),
    Mutant("sum before all parts", "rms_norm.cu", f"  {SYNC}", "", RACE),
    Mutant("rank before all votes", BEST, f"all += n;\n    }}\n    {SYNC}", "all += n;\n    }\n", RACE),
    Mutant("sum over heads too early", SCORE, f"    {SYNC}    if (h + kHead", "    if (h + kHead", RACE),
    Mutant("keys refilled early", SCORE, "if (h + kHeadTile >= shape.heads) after", "if (h == 0) after", RACE),
)
