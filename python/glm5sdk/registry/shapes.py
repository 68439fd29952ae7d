"""The shape language: `"a[T, 2*I]"` read once, used for contracts, fake tensors, test inputs, costs and benchmark ids.

Grammar, on purpose no more than this:

    rule     = word "[" dim ("," dim)* "]" ["?"]      a tensor; "?" = may be None
             | "= " name                              an int argument that names an axis
    word     = a | f32 | i32 | i64 | u8 | q8 | any | W | kv_cache | index_cache | <name of a dtype argument>
               q8 = int8 or float8_e4m3fn
    dim      = term ("+" term)*                       sums
    term     = factor ("*" factor)*                   products
    factor   = integer | name | name "/" integer      names are axes, see docs/ops.md; "/" rounds up
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from glm5sdk.core.errors import ContractError

__all__ = ["AxisRule", "Dim", "TensorRule", "parse_rule"]

_TENSOR = re.compile(r"^(\w+)\[([^\]]*)\](\??)$")
_AXIS = re.compile(r"^= (\w+)$")
_FACTOR = re.compile(r"^([A-Za-z]\w*)(?:/([1-9]\d*))?$")
CACHE_WORDS = ("kv_cache", "index_cache")


@dataclass(frozen=True)
class Dim:
    """A sum of products of axis names and integers, e.g. `C+R` or `2*I`."""

    terms: tuple[tuple[int, tuple[str, ...]], ...]
    text: str

    @property
    def is_name(self) -> bool:
        """Whether this is a bare axis name, which binds the axis."""
        return len(self.terms) == 1 and self.terms[0][0] == 1 and len(self.terms[0][1]) == 1 and "/" not in self.text

    def names(self) -> Iterator[str]:
        """Axis names in order of appearance."""
        for _, names in self.terms:
            yield from (name.partition("/")[0] for name in names)

    def evaluate(self, axes: Mapping[str, int]) -> int:
        """The size for known axes."""
        total = 0
        for factor, names in self.terms:
            for name in names:
                axis, _, part = name.partition("/")
                factor *= -(-axes[axis] // int(part)) if part else axes[axis]
            total += factor
        return total

    def solve_for(self, unknown: str) -> tuple[str, str]:
        """Python expressions (numerator, divisor): `unknown == numerator / divisor`, given the size in `_size`."""
        rest, divisor = [], None
        if "/" in self.text:
            raise ContractError(f"shape rule {self.text!r}: does not tell {unknown}, needs an argument that does")
        for factor, names in self.terms:
            if unknown not in names:
                rest.append("*".join([str(factor), *names]))
                continue
            others = [name for name in names if name != unknown]
            if divisor is not None or len(others) != len(names) - 1:
                raise ContractError(f"shape rule {self.text!r}: {unknown} stands twice, needs to be linear")
            divisor = "*".join([str(factor)] * (factor != 1 or not others) + others)
        if divisor is None:
            raise ContractError(f"shape rule {self.text!r}: does not contain {unknown}")
        return " - ".join(["_size", *rest]), divisor


@dataclass(frozen=True)
class TensorRule:
    """What one tensor argument or output must be."""

    word: str
    dims: tuple[Dim, ...]
    optional: bool = False

    @property
    def is_weight(self) -> bool:
        return self.word == "W"

    @property
    def is_cache(self) -> bool:
        return self.word in CACHE_WORDS

    def __str__(self) -> str:
        return f"{self.word}[{', '.join(d.text for d in self.dims)}]{'?' if self.optional else ''}"


@dataclass(frozen=True)
class AxisRule:
    """An int argument whose value is the size of an axis."""

    axis: str

    def __str__(self) -> str:
        return f"= {self.axis}"


def parse_dim(text: str) -> Dim:
    """Read one dimension, e.g. `"H*Dv"`."""
    terms = []
    for term in text.split("+"):
        factor, names = 1, []
        for part in (p.strip() for p in term.split("*")):
            if part.isdigit():
                factor *= int(part)
            elif _FACTOR.match(part):
                names.append(part)
            else:
                raise ContractError(f"shape rule: dimension is {text!r}, needs sums and products of names and integers")
        terms.append((factor, tuple(names)))
    return Dim(tuple(terms), text.strip())


def parse_rule(text: str) -> TensorRule | AxisRule:
    """Read one rule of the grammar above.

    Raises:
        ContractError: the text is not in the grammar.
    """
    if match := _AXIS.match(text):
        return AxisRule(match[1])
    match = _TENSOR.match(text)
    if match is None:
        raise ContractError(f"shape rule: text is {text!r}, needs 'word[dim, ...]' or '= AXIS'")
    dims = tuple(parse_dim(part) for part in match[2].split(",") if part.strip())
    return TensorRule(match[1], dims, match[3] == "?")
