"""The checks of one example of one pair: inputs are drawn once, the implementation runs a handful of times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from glm5sdk.core.errors import Glm5Error
from glm5sdk.registry import CATALOGUE, Impl, Op, backends, use
from glm5sdk.registry.resolved import native_arguments, workspace_size
from glm5sdk.testing.failure import CheckFailed
from glm5sdk.testing.inputs import Example, as_device, clone, forward_of, rules_of, tensors_of
from glm5sdk.testing.memory import ABSENT, HUGE, Guarded
from glm5sdk.testing.oracle import Oracle, consult, named_results
from glm5sdk.testing.rows import check_rows
from glm5sdk.testing.tolerance import compare_results, same_bits

__all__ = ["PairChecks"]


class PairChecks:
    """All checks of one implementation of one op.

    Args:
        op: the op.
        impl: the implementation.
        backend: for `composed`: the backend whose kernels it should be made of.
    """

    def __init__(self, op: Op[..., Any], impl: Impl, backend: str | None = None) -> None:
        self.op, self.impl = op, impl
        loaded = backends().get(impl.backend if impl.kind == "native" else backend or "")
        self.device = loaded.device.type if loaded is not None and loaded.device is not None else "cpu"
        self.threads = loaded.threads if loaded is not None else None
        # A backend may take less than the op: what its kernels refuse, the decomposition gets from the reference.
        inner = (backend, "reference") if backend and impl.kind == "composed" else ()
        self._names = (impl.name, *inner)

    def selected(self) -> AbstractContextManager[None]:
        """Inside, the op runs this implementation where the call lies in its envelope."""
        return use(*self._names)

    def covers(self, example: Example) -> bool:
        """Whether the example lies inside the implementation's envelope."""
        values = as_device(consult(self.op, example).arguments, self.device)
        with self.selected():
            chosen = self.op.explain(*values.values()).choice
        return chosen.impl is self.impl

    def run(self, example: Example) -> None:
        """Every check on one example.

        Raises:
            CheckFailed: the first broken promise.
        """
        oracle = consult(self.op, example)
        values = as_device(oracle.arguments, self.device)
        with self.selected():
            plain, invariant = self._plain(values)
            compare_results(self.op, oracle, plain, example.exact)
            self._properties(values, plain)
            if self.impl.kind == "native":
                self._guards(values, plain)
            else:
                again = oracle.same if self._is_oracle() else self._call(values)
                self._same("deterministic", "in a second run", again, plain)
            self._strides(values, plain, oracle, example)
            if invariant:
                check_rows(self.op, values, plain, self._call, example.seed)
            self._threads(values, plain)
            self._fused(values, plain)
            self._prepared(values, plain)
            self._fake(values, plain)

    def _is_oracle(self) -> bool:
        """Whether the oracle has just run this very function."""
        return self.impl.kind == "reference" and forward_of(self.op) is None and self.device == "cpu"

    # Calls

    def _call(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """The public call on copies: neither a cache that is meant to be written nor a fault may reach the original."""
        return self._call_with(clone(values))

    def _call_with(self, mine: Mapping[str, Any]) -> dict[str, Tensor]:
        try:
            with torch.no_grad():
                returned = self.op(*mine.values())
        except Glm5Error as error:
            raise CheckFailed("runs", f"legal inputs were refused: {error}") from error
        return named_results(self.op, returned, mine)

    def _plain(self, values: Mapping[str, Any]) -> tuple[dict[str, Tensor], bool]:
        """Results of the plain call, and whether every implementation that took part claims to be row-invariant."""
        mine = clone(values)
        with ExitStack() as stack:
            calls = stack.enter_context(_counting(self.impl))
            fallen = [stack.enter_context(_counting(i)) for i in _references() if i is not self.impl]
            results = self._call_with(mine)
        if not calls:
            raise CheckFailed("explain", f"explain() says {self.impl.name} runs, but something else ran")
        for name, tensor in tensors_of(mine).items():
            if name not in self.op.mutates and not same_bits(tensor, tensors_of(values)[name]):
                raise CheckFailed("inputs", f"{name} was written to, needs to stay as it was")
        return results, self.impl.invariant and not any(fallen)

    def _properties(self, values: Mapping[str, Any], plain: Mapping[str, Tensor]) -> None:
        rules = rules_of(self.op)
        if rules is not self.op.tests:
            return
        for check in rules.properties:
            try:
                check(values, tuple(plain[name] for name in self.op.outputs))
            except AssertionError as error:
                raise CheckFailed("property", f"{getattr(check, '__name__', check)}: {error}") from error

    # Memory and repetition

    def _guards(self, values: Mapping[str, Any], plain: Mapping[str, Tensor]) -> None:
        first = self._guarded(values, ABSENT)
        again = self._guarded(values, ABSENT)
        for name, tensor in first.items():
            if not same_bits(tensor, again[name]):
                raise CheckFailed("deterministic", f"{name}: two equal calls gave different bits")
        self._same("unwritten", "into memory full of NaN and -1", first, plain)
        self._same("unwritten", "into memory full of huge values", self._guarded(values, HUGE), plain)

    def _guarded(self, values: Mapping[str, Any], fill: int) -> dict[str, Tensor]:
        """The native call itself, everything between sentinels."""
        held = {name: Guarded.holding(t) for name, t in tensors_of(values).items() if t.is_contiguous()}
        mine = {name: held[name].tensor if name in held else value for name, value in values.items()}
        with torch.no_grad():
            bound = self.op.contract.bind(*mine.values())
            shapes = [(tuple(t.shape), t.dtype, t.device) for t in self.op.contract.alloc(bound)]
            outs = [Guarded(*shape, fill) for shape in shapes]
            scratch: list[Guarded] = []
            size = workspace_size(self.impl, self.op, bound)
            if size is not None:
                scratch.append(Guarded((size,), torch.uint8, bound.device, fill))
            self.impl.fn(
                *native_arguments(self.op, bound.args), *(o.tensor for o in outs), *(s.tensor for s in scratch)
            )
        named = {**held, **dict(zip(self.op.outputs, outs, strict=True))}
        for name, guarded in [*named.items(), *(("workspace", s) for s in scratch)]:
            if damage := guarded.damage():
                raise CheckFailed("guards", f"{name} was overwritten up to {damage}")
        for name, tensor in tensors_of(values).items():
            if name in held and name not in self.op.mutates and not same_bits(held[name].tensor, tensor):
                raise CheckFailed("inputs", f"{name} was written to, needs to stay as it was")
        return named_results(self.op, tuple(o.tensor for o in outs), mine)

    def _same(self, check: str, how: str, got: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> None:
        for name, want in plain.items():
            if not same_bits(got[name], want):
                raise CheckFailed(check, f"{name}: {how} it has other bits than at first")

    def _strides(
        self, values: Mapping[str, Any], plain: Mapping[str, Tensor], oracle: Oracle, example: Example
    ) -> None:
        odd = {
            name: _spread(value) if isinstance(value, Tensor) and name not in self.op.mutates else value
            for name, value in clone(values).items()
        }
        got = self._call_with(odd)
        if self.impl.kind == "native" or self.impl.invariant:
            self._same("strides", "from inputs with gaps", got, plain)
        elif not all(same_bits(got[name], want) for name, want in plain.items()):
            # Plain torch may choose another loop for a tensor of one column with a stride of two.
            compare_results(self.op, oracle, got, example.exact)

    def _threads(self, values: Mapping[str, Any], plain: Mapping[str, Tensor]) -> None:
        if self.threads is None:
            return
        before = self.threads()
        try:
            for count in {1, 3} - {before}:
                self.threads(count)
                self._same("threads", f"on {count} threads", self._call(values), plain)
        finally:
            self.threads(before)

    def _fused(self, values: Mapping[str, Any], plain: Mapping[str, Tensor]) -> None:
        """A fused kernel rounds where the ops it fuses round: the same bits within a backend."""
        if self.impl.kind != "native" or not any(i.kind == "composed" for i in self.op.implementations()):
            return
        with ExitStack() as stack:
            fallen = [stack.enter_context(_counting(i)) for i in _references()]
            stack.enter_context(use("composed", self.impl.name))
            got = self._call(values)
        if not any(fallen):
            self._same("fused", "from the ops it fuses", got, plain)

    def _prepared(self, values: Mapping[str, Any], plain: Mapping[str, Tensor]) -> None:
        """A packed weight gives the bits of the plain one, and comes back exactly."""
        if self.impl.layout is None:
            return
        packed = dict(values)
        for name in (n for n, r in self.op.inputs.items() if getattr(r, "is_weight", False)):
            packed[name] = self.op.prepare(values[name])
            back, mine = self.op.unprepare(packed[name]), values[name]
            if isinstance(mine, Tensor) and not (isinstance(back, Tensor) and same_bits(back, mine)):
                raise CheckFailed("prepared", f"{name}: unprepare(prepare(w)) is not w")
        self._same("prepared", "from a prepared weight", self._call(packed), plain)

    # The registry's word

    def _fake(self, values: Mapping[str, Any], plain: Mapping[str, Tensor]) -> None:
        with _counting(self.impl) as calls, FakeTensorMode() as mode:
            mine = {
                name: mode.from_tensor(v) if isinstance(v, Tensor) else v.map(mode.from_tensor) if _weight(v) else v
                for name, v in values.items()
            }
            got = named_results(self.op, self.op(*mine.values()), mine)
        if calls and self.impl.kind == "native":
            raise CheckFailed("fake", "a tensor without memory reached the kernel")
        for name, want in plain.items():
            have = got[name]
            if (have.shape, have.dtype, have.device) != (want.shape, want.dtype, want.device):
                raise CheckFailed(
                    "fake",
                    f"{name} is {have.dtype} {tuple(have.shape)} on {have.device} for the compiler, "
                    f"needs {want.dtype} {tuple(want.shape)} on {want.device}",
                )


def _references() -> list[Impl]:
    """The reference of every op: a decomposition is no more invariant than what it is made of."""
    return [impl for op in CATALOGUE.values() for impl in op.implementations() if impl.kind == "reference"]


def _weight(value: Any) -> bool:
    return hasattr(value, "tensors") and hasattr(value, "map")


def _spread(value: Tensor) -> Tensor:
    """The same values with gaps between elements, behind an odd start."""
    if value.dim() == 0 or value.numel() == 0:
        return value
    wide = torch.zeros(*value.shape[:-1], 2 * value.shape[-1] + 1, dtype=value.dtype, device=value.device)
    view = wide[..., 1::2]
    view.copy_(value)
    return view


@contextmanager
def _counting(impl: Impl) -> Iterator[list[int]]:
    """How often an implementation's function was entered meanwhile."""
    calls: list[int] = []
    function = impl.fn

    def counted(*args: Any) -> Any:
        calls.append(len(args))
        return function(*args)

    object.__setattr__(impl, "fn", counted)  # the row is frozen against accidents, not against its own test
    try:
        yield calls
    finally:
        object.__setattr__(impl, "fn", function)
