"""`@op`: one decorated function declares an op. Its signature is the public face, its body is the reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from glm5sdk.core.errors import ContractError
from glm5sdk.registry import plugins, select
from glm5sdk.registry.backward import backward_rules, reference_backward
from glm5sdk.registry.contract import Bound, Contract, compile_contract
from glm5sdk.registry.contract_source import names_in
from glm5sdk.registry.cost import Cost
from glm5sdk.registry.device import dtype_name
from glm5sdk.registry.explain import Explanation
from glm5sdk.registry.impl import CallInfo, Impl
from glm5sdk.registry.resolved import Resolved, run
from glm5sdk.registry.shapes import AxisRule, TensorRule, parse_rule
from glm5sdk.registry.testing_rules import TestRules
from glm5sdk.registry.torch_op import TorchView, is_compiling
from glm5sdk.registry.weight import Weight, WeightLike, as_weight

__all__ = ["BATCH_AXES", "CATALOGUE", "Op", "get_op", "op"]

P = ParamSpec("P")
R = TypeVar("R")

# Sizes that say how much work there is, not what kind: selection never sees them.
BATCH_AXES = frozenset({"T", "B", "P", "M", "Pmax"})
CATALOGUE: dict[str, Op[Any, Any]] = {}


class Op(Generic[P, R]):
    """An op: callable like the function it was declared by, plus everything derived from the declaration.

    Attributes:
        name: the op's name.
        inputs: rules by argument.
        outputs: rules by output.
        rows: the axis whose rows are independent of each other, or None.
        grad: arguments that have a gradient.
        mutates: arguments written in place.
        where: conditions on axes beyond the rules.
        reference: the decorated function itself: plain torch, the oracle.
        cost: axes and activation bytes -> Cost.
        tests: properties, geometries and input maker for the conformance suite.
        backward: the derived op `<name>_bwd`, None when `grad` is empty.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        *,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        rows: str | None,
        grad: Sequence[str] = (),
        mutates: Sequence[str] = (),
        composed: Callable[P, R] | None = None,
        backward: Callable[..., Any] | None = None,
        cost: Callable[[Mapping[str, int], int], Cost] | None = None,
        tests: TestRules | None = None,
        where: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        self.name = name or reference.__name__
        self.__name__ = self.name
        self.__doc__ = reference.__doc__
        self.__wrapped__ = reference
        self.__module__ = reference.__module__
        self.reference = reference
        self.signature = inspect.signature(reference)
        self.__signature__ = self.signature
        self.inputs = {k: parse_rule(v) for k, v in inputs.items()}
        self.outputs = {k: _output_rule(self.name, v) for k, v in outputs.items()}
        self.dtype_arguments = frozenset(
            n for n, p in self.signature.parameters.items() if "dtype" in str(p.annotation)
        )
        names = list(self.signature.parameters)
        weights = [n for n, rule in self.inputs.items() if isinstance(rule, TensorRule) and rule.is_weight]
        # By position, for the hot half of a call: the weights, and what a kernel is told.
        self.weight_positions = tuple(names.index(n) for n in weights)
        self.kernel_positions = tuple(i for i, n in enumerate(names) if n not in self.dtype_arguments)
        self.rewrites_arguments = bool(weights or self.dtype_arguments)
        self.rows, self.grad, self.mutates = rows, tuple(grad), tuple(mutates)
        # Conditions on scalar arguments are checked with the rest; only those on axes shape what tests draw.
        self.where = tuple(c for c in where if not names_in(c) & set(self.signature.parameters))
        self.cost = cost
        self.tests = tests or TestRules()
        self.contract: Contract = compile_contract(
            self.name,
            self.signature,
            self.inputs,
            self.outputs,
            self.mutates,
            BATCH_AXES | {rows or "T"},
            tuple(where),
        )
        self._built_in = [Impl(self.name, "reference", "reference", reference, priority=-2)]
        if composed is not None:
            self._built_in.insert(0, Impl(self.name, "composed", "composed", composed, priority=-1, invariant=True))
        self._selected: dict[Any, Impl] = {}
        self._epoch = -1
        self.backward: Op[..., Any] | None = None
        if self.grad:
            rules = backward_rules(self.name, self.signature, self.inputs, self.outputs, self.grad)
            self.backward = Op(
                reference_backward(self, rules, backward), inputs=rules.inputs, outputs=rules.outputs, rows=None,
                cost=cost and (lambda axes, size: cost(axes, size) + cost(axes, size)), where=where,
                name=f"{self.name}_bwd",
            )  # fmt: skip
        self.view = TorchView(self)
        CATALOGUE[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return self.view(self.contract.flatten(*args, **kwargs))
        bound = self.contract.bind(*args, **kwargs)
        if bound.view:
            return self.view(self.contract.flatten(*bound.args))
        return run(self._select(bound), self, bound)

    def call_flat(self, *flat: Any) -> Any:
        """Validate, select and run arguments in torch.library's flattened form; what the torch op calls."""
        bound = self.contract.bind(*self.contract.unflatten(*flat))
        return run(self._select(bound), self, bound)

    def _select(self, bound: Bound) -> Impl:
        if self._epoch != plugins.epoch():
            plugins.backends()
            self._selected.clear()
            self._epoch = plugins.epoch()
        key = (select.selection_key(), select.is_strict_scope(), bound.key)
        impl = self._selected.get(key)
        if impl is None:
            choice = self._choose(bound)
            if choice.impl is None:
                raise select.refusal(self.name, choice)
            impl = self._selected[key] = choice.impl
        return impl

    def _choose(self, bound: Bound) -> select.Choice:
        return select.choose(self.name, self.call_info(bound), self.implementations(), select.current_use())

    def implementations(self) -> list[Impl]:
        """Every implementation, best first, composed and reference last."""
        return [*plugins.implementations(self.name), *self._built_in]

    def call_info(self, bound: Bound) -> CallInfo:
        """What selection may know about a checked call."""
        axes = dict(zip(self.contract.axes, bound.axes, strict=True))
        arguments = dict(zip(self.signature.parameters, bound.args, strict=True))
        weights = {
            p: as_weight(arguments[p]).tag
            for p, rule in self.inputs.items()
            if isinstance(rule, TensorRule) and rule.is_weight
        }
        return CallInfo(
            bound.device.type if bound.device is not None else "cpu",
            dtype_name(bound.activation or bound.accumulator),
            {a: axes[a] for a in self.contract.static_axes},
            {o: arguments[o] for o in self.contract.options},
            weights,
        )

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Which implementation these arguments would run, and why not each other one."""
        bound = self.contract.bind(*args, **kwargs)
        info = self.call_info(bound)
        sizes = " ".join(f"{k}={v}" for k, v in zip(self.contract.axes, bound.axes, strict=True))
        options = " ".join(f"{k}={v}" for k, v in info.options.items())
        return Explanation(self.name, f"{info.dtype} on {info.device} {sizes} {options}".strip(), self._choose(bound))

    def resolve(self, *args: P.args, **kwargs: P.kwargs) -> Resolved:
        """Check and select once for a hot loop; see Resolved.

        Raises:
            ContractError: an input requires grad; resolved kernels know no gradient.
        """
        bound = self.contract.bind(*args, **kwargs)
        if bound.view:
            raise ContractError(
                f"{self.name}: resolve got inputs that require grad or are no plain tensors, needs plain ones"
            )
        return Resolved(self, self._select(bound))

    def prepare(self, w: WeightLike, *, dtype: str | None = None) -> WeightLike:
        """The weight as the implementation that would run now wants it stored; unchanged when plain suits it.

        Args:
            w: plain tensor, or a Weight in plain layout.
            dtype: short name of the activation dtype it will meet; the weight's own by default.
        """
        weight = as_weight(w)
        name = dtype or dtype_name(weight.tensors[0].dtype)
        for impl in self._for_weights(name, weight.device.type):
            if impl.layout is not None and impl.layout.kind == weight.kind and weight.layout == "plain":
                return Weight(weight.kind, impl.layout.name, weight.shape, impl.layout.pack(weight))
            if not impl.requires.weights or weight.tag in impl.requires.weights:
                return w
        return w

    def unprepare(self, w: WeightLike) -> WeightLike:
        """Exact inverse of `prepare`, whatever is selected now.

        Raises:
            ContractError: no installed implementation owns the weight's layout.
        """
        if not isinstance(w, Weight) or w.layout == "plain":
            return w
        for impl in self.implementations():
            if impl.layout is not None and impl.layout.name == w.layout:
                plain = Weight(w.kind, "plain", w.shape, impl.layout.unpack(w))
                return plain.tensors[0] if plain.kind == "plain" else plain
        raise ContractError(f"{self.name}: weight layout is {w.layout!r}, needs one that an installed backend owns")

    def _for_weights(self, dtype: str, device: str) -> list[Impl]:
        call = CallInfo(device, dtype, {}, {}, {})
        chosen = select.choose(self.name, call, self.implementations(), select.current_use())
        return [chosen.impl] if chosen.impl is not None else []

    def __repr__(self) -> str:
        return f"<op {self.name}{self.signature}>"


def op(
    *,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    rows: str | None,
    grad: Sequence[str] = (),
    mutates: Sequence[str] = (),
    composed: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    cost: Callable[[Mapping[str, int], int], Cost] | None = None,
    tests: TestRules | None = None,
    where: Sequence[str] = (),
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declare an op.

    Args:
        inputs: rule of each tensor, weight and axis argument (see registry/shapes.py); other arguments are options.
        outputs: rule of each output, in order; empty for ops that only write in place.
        rows: the axis along which rows are independent (the batch-invariance axis), None if there is none.
        grad: arguments with a gradient; the op `<name>_bwd` is derived.
        mutates: arguments written in place; such an op has no gradient.
        composed: decomposition into other ops, same signature.
        backward: body of `<name>_bwd(grad outputs..., inputs...)`; by default autograd of the reference.
        cost: `(axes, bytes of an activation) -> Cost`.
        tests: what the conformance suite needs beyond the rules.
        where: conditions that the shape language cannot say, as Python over axes and scalar arguments:
            `"R % 2 == 0"`, `"stride >= 1"`.
    """

    def declare(reference: Callable[P, R]) -> Op[P, R]:
        return Op(
            reference, inputs=inputs, outputs=outputs, rows=rows, grad=grad, mutates=mutates, composed=composed,
            backward=backward, cost=cost, tests=tests, where=where,
        )  # fmt: skip

    return declare


def get_op(name: str) -> Op[..., Any]:
    """The op of that name.

    Raises:
        ContractError: there is none; lists near names.
    """
    if name not in CATALOGUE:
        import difflib

        near = difflib.get_close_matches(name, CATALOGUE) or sorted(CATALOGUE)
        raise ContractError(f"op: name is {name!r}, needs one of: {', '.join(near)}")
    return CATALOGUE[name]


def _output_rule(name: str, text: str) -> TensorRule:
    rule = parse_rule(text)
    if isinstance(rule, AxisRule):
        raise ContractError(f"{name}: output rule is {text!r}, needs a tensor rule")
    return rule
