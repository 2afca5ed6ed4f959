"""Are the patterns of fuse found in other spellings of the structures that they are for, and never in something else?

    structure   y * sigmoid(x)  +  b                 of ``tests/passes/patterns/published.py``, as a graph
    preserved   b + x.sigmoid().mul(y)               some operators in another spelling: must match
    changed     y * tanh(x)  +  b                    one operator computes something else: must not match wrongly

A step rewrites one operator of the graph, whichever it is: the graph is run once more, that operator by other calls. A
seed says which step its case is for, so that all come in turn; the pattern is any that allows it. A match is run: the
pattern must compute there what the graph has. Run it as::

    python -m benchmarks.respelled [--cases 2000] [--seed 0] [--only NAME ...] [-o FILE.json]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from benchmarks.metamorphic import STEPS, WRONG, Case, tensors_of, told, values_of
from fuse.check.judging import quiet
from fuse.errors import FuseError
from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.rewrite.patterns import registry
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.exact_match import FoundMatch
from fuse.rewrite.patterns.language import Environment, ManySpec, running
from fuse.rewrite.patterns.matching import match
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.registry import earlier_than
from tests.passes.patterns.published import PUBLISHED

aten = torch.ops.aten

Respelling = Callable[..., Any]
"""``respelling(operator, *its arguments)``: what to compute instead."""

PATTERNS = {one.name: one for one in registry.registered() if one.name in PUBLISHED}


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Each step: a name, and for which operators and arguments it can be taken. Numbers are as the operator was called.

PRESERVED: dict[str, tuple[tuple[Any, ...], Callable[..., bool], Respelling]] = {
    "operands of a sum swapped": (
        (aten.add.Tensor,),
        lambda x, y, **k: is_tensor(y) and not k,
        lambda op, x, y: torch.add(y, x),
    ),
    "operands of a product swapped": (
        (aten.mul.Tensor,),
        lambda x, y: is_tensor(y),
        lambda op, x, y: torch.mul(y, x),
    ),
    "sum with a number first": ((aten.add.Tensor,), lambda x, y, **k: is_number(y) and not k, lambda op, x, y: y + x),
    "product with a number first": ((aten.mul.Tensor,), lambda x, y: is_number(y), lambda op, x, y: y * x),
    "quotient for a product with a number": (
        (aten.mul.Tensor,),
        lambda x, y: is_floating(x) and is_number(y) and y != 0,
        lambda op, x, y: x / (1 / y),
    ),
    "product for a quotient by a number": (
        (aten.div.Tensor,),
        lambda x, y: is_floating(x) and is_number(y) and y != 0,
        lambda op, x, y: x * (1 / y),
    ),
    "product with the reciprocal": (
        (aten.div.Tensor,),
        lambda x, y: is_floating(x) and is_floating(y),
        lambda op, x, y: x * y.reciprocal(),
    ),
    "quotient of one": (
        (aten.div.Tensor,),
        lambda x, y: is_floating(x) and is_floating(y),
        lambda op, x, y: x * (1 / y),
    ),
    "sum with the negative": (
        (aten.sub.Tensor,),
        lambda x, y, **k: is_floating(x) and is_floating(y) and not k,
        lambda op, x, y: x + -y,
    ),
    "sum with a negative number": (
        (aten.sub.Tensor,),
        lambda x, y, **k: is_floating(x) and is_number(y) and not k,
        lambda op, x, y: x + -y,
    ),
    "rsub": ((aten.sub.Tensor,), lambda x, y, **k: is_tensor(y) and not k, lambda op, x, y: torch.rsub(y, x)),
    "number less a tensor": (
        (aten.rsub.Scalar,),
        lambda x, y, *a: is_floating(x) and not a,
        lambda op, x, y: torch.sub(torch.tensor(float(y)), x),
    ),
    "negative and a number": (
        (aten.rsub.Scalar,),
        lambda x, y, *a: is_floating(x) and not a,
        lambda op, x, y: -x + y,
    ),
    "0-d tensor for a number": (
        (aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor, aten.sub.Tensor),
        lambda x, y, **k: is_floating(x) and is_number(y) and not k,
        lambda op, x, y: op(x, torch.tensor(float(y))),
    ),
    "filled tensor for a number": (
        (aten.mul.Tensor, aten.add.Tensor),
        lambda x, y, **k: is_floating(x) and is_number(y) and not k,
        lambda op, x, y: op(torch.full((), float(y)), x),
    ),
    "product with itself for a square": (
        (aten.pow.Tensor_Scalar,),
        lambda x, y: y == 2,
        lambda op, x, y: x * x,
    ),
    "square": ((aten.pow.Tensor_Scalar,), lambda x, y: y == 2, lambda op, x, y: torch.square(x)),
    "power of a float": (
        (aten.pow.Tensor_Scalar,),
        lambda x, y: is_floating(x) and isinstance(y, int),
        lambda op, x, y: x ** float(y),
    ),
    "power for a root": ((aten.sqrt.default,), lambda x: True, lambda op, x: x**0.5),
    "reciprocal of the root": ((aten.rsqrt.default,), lambda x: True, lambda op, x: 1 / torch.sqrt(x)),
    "power for rsqrt": ((aten.rsqrt.default,), lambda x: True, lambda op, x: x.pow(-0.5)),
    "clamp for relu": ((aten.relu.default,), lambda x: True, lambda op, x: x.clamp(min=0)),
    "clamp_min for relu": ((aten.relu.default,), lambda x: True, lambda op, x: torch.clamp_min(x, 0)),
    "silu in parts": ((aten.silu.default,), lambda x: True, lambda op, x: torch.sigmoid(x) * x),
    "hardtanh for clamp": (
        (aten.clamp.default,),
        lambda x, *b: is_floating(x) and len(b) == 2 and None not in b,
        lambda op, x, low, high: torch.nn.functional.hardtanh(x, low, high),
    ),
    "dim from the other end": (
        (aten._softmax.default, aten._log_softmax.default),
        lambda x, d, h: x.dim() > 0,
        lambda op, x, d, h: op(x, d - x.dim() if d >= 0 else d + x.dim(), h),
    ),
    "dim of a sum from the other end": (
        (aten.sum.dim_IntList, aten.mean.dim),
        lambda x, d, *k, **o: bool(d) and x.dim() > 0,
        lambda op, x, d, *k, **o: op(x, [one - x.dim() if one >= 0 else one + x.dim() for one in d], *k, **o),
    ),
    "sum for a mean": (
        (aten.mean.dim,),
        lambda x, d, *k, **o: bool(d) and not o,
        lambda op, x, d, *k: x.sum(d, *k) / torch.Size([x.shape[one] for one in d]).numel(),
    ),
    "unsqueeze for keepdim": (
        (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default),
        lambda x, d, *k, **o: k == (True,) and len(d) == 1 and not o,
        lambda op, x, d, *k: op(x, d).unsqueeze(d[0]),
    ),
    "addmm in parts": (
        (aten.addmm.default,),
        lambda b, x, w, **k: not k,
        lambda op, b, x, w: torch.mm(x, w) + b,
    ),
    "einsum for mm": ((aten.mm.default,), lambda x, w: True, lambda op, x, w: torch.einsum("ij,jk->ik", x, w)),
    "matmul for bmm": ((aten.bmm.default,), lambda x, w: True, lambda op, x, w: torch.matmul(x, w)),
    "einsum for bmm": ((aten.bmm.default,), lambda x, w: True, lambda op, x, w: torch.einsum("bij,bjk->bik", x, w)),
    "transpose for permute": (
        (aten.permute.default,),
        lambda x, d: sorted(range(len(d)), key=lambda i: d[i]) == list(d) and sum(i != j for i, j in enumerate(d)) == 2,
        lambda op, x, d: x.transpose(*[i for i, j in enumerate(d) if i != j]),
    ),
    "permute for transpose": (
        (aten.transpose.int,),
        lambda x, a, b: x.dim() > 1,
        lambda op, x, a, b: x.transpose(b, a),
    ),
    "narrow for a slice": (
        (aten.slice.Tensor,),
        lambda x, d=0, s=None, e=None, *step: not step and s is not None and e is not None and 0 <= s < e,
        lambda op, x, d=0, s=None, e=None: x.narrow(d, s, min(e, x.shape[d]) - s),
    ),
    "in-place": (
        (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor),
        lambda x, y, **k: (
            is_floating(x) and (is_number(y) or torch.broadcast_shapes(x.shape, y.shape) == x.shape) and not k
        ),
        lambda op, x, y: _in_place(op, x, y),
    ),
    "in-place of one operand": (
        (aten.tanh.default, aten.sigmoid.default, aten.exp.default, aten.relu.default),
        lambda x: True,
        lambda op, x: getattr(x.clone(), f"{op._schema.name.removeprefix('aten::')}_")(),
    ),
}

ANYWHERE: dict[str, Respelling] = {
    "reshape round trip": lambda y: y.reshape(-1).view(y.shape),
    "transpose round trip": lambda y: y.transpose(0, -1).transpose(0, -1),
    "unsqueeze round trip": lambda y: y.unsqueeze(0).squeeze(0) if y.shape[:1] != (1,) else y[None][0],
    "cast to its own dtype": lambda y: y.to(y.dtype),
    "contiguous": lambda y: y.contiguous(),
    "clone": lambda y: y.clone(),
    "whole slice": lambda y: y[:],
    "product with one": lambda y: y * 1.0,
    "expand to its own shape": lambda y: y.expand(y.shape),
}
"""Steps behind any operator of floating numbers."""

CHANGED: dict[str, tuple[tuple[Any, ...], Callable[..., bool], Respelling]] = {
    "other elementwise operator": (
        (
            aten.tanh.default,
            aten.sigmoid.default,
            aten.exp.default,
            aten.relu.default,
            aten.silu.default,
            aten.erf.default,
        ),
        lambda x: True,
        lambda op, x: torch.sin(x),
    ),
    "product for a sum": ((aten.add.Tensor,), lambda x, y, **k: is_tensor(y) and not k, lambda op, x, y: x * y),
    "sum for a product": ((aten.mul.Tensor,), lambda x, y: is_tensor(y) and is_floating(x), lambda op, x, y: x + y),
    "difference for a sum": ((aten.add.Tensor,), lambda x, y, **k: is_floating(x) and not k, lambda op, x, y: x - y),
    "operands of a difference swapped": (
        (aten.sub.Tensor,),
        lambda x, y, **k: is_tensor(y) and not k,
        lambda op, x, y: y - x,
    ),
    "operands of a quotient swapped": (
        (aten.div.Tensor,),
        lambda x, y: is_floating(x) and is_tensor(y),
        lambda op, x, y: y / x,
    ),
    "another number": (
        (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.rsub.Scalar),
        lambda x, y, *a, **k: is_floating(x) and is_number(y) and not (a or k),
        lambda op, x, y: op(x, y + 0.125),
    ),
    "another exponent": ((aten.pow.Tensor_Scalar,), lambda x, y: is_floating(x), lambda op, x, y: x ** (y + 1)),
    "another dim": (
        (aten._softmax.default, aten._log_softmax.default),
        lambda x, d, h: x.dim() > 1,
        lambda op, x, d, h: op(x, (d + 1) % x.dim(), h),
    ),
    "sum where a mean was": (
        (aten.mean.dim,),
        lambda x, d, *k, **o: bool(d) and not o,
        lambda op, x, d, *k: x.sum(d, *k),
    ),
    "another bound": (
        (aten.clamp.default, aten.hardtanh.default, aten.clamp_min.default),
        lambda x, *b: bool(b) and is_number(b[0]),
        lambda op, x, low, *high: op(x, low - 0.25, *high),
    ),
}

CHANGED_ANYWHERE: dict[str, Respelling] = {
    "cast that rounds": lambda y: y.bfloat16().to(y.dtype),
    "flipped": lambda y: y.flip(-1),
    "sign": lambda y: -y,
    "scaled": lambda y: y * 1.5,
    "moved": lambda y: y.roll(1, 0),
}


def _in_place(op: Any, x: Tensor, y: Any) -> Tensor:
    written = x.clone()
    getattr(written, f"{op._schema.name.removeprefix('aten::')}_")(y)
    return written


class _Respelled(Interpreter):
    """Runs a graph, some operators by other calls."""

    def __init__(self, graph: GraphModule, spelled: Mapping[Node, Callable[..., Any]]) -> None:
        super().__init__(graph)
        self.spelled = spelled

    def run_node(self, n: Node) -> Any:
        if n not in self.spelled:
            return super().run_node(n)
        with self._set_current_node(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return self.spelled[n](*args, **kwargs)


@cache
def structure(name: str) -> tuple[GraphModule, tuple[Tensor, ...], int]:
    """The structure of a pattern as a graph, what it is given, and how many results it has."""
    published = PUBLISHED[name]
    model = Function(published.function)
    with torch.no_grad():
        graph = capture(model, published.arguments)
    given = tuple(tensors_of(graph, published.arguments))
    return graph, given, len(graph.meta["signature"].outputs)


@cache
def choices(name: str, preserves: bool) -> list[tuple[str, Node, Callable[..., Any]]]:
    """The steps that can be taken in a structure: the name, the operator, and what to call instead of it."""
    graph, given, _ = structure(name)
    values = values_of(graph, given)

    def value(argument: Any) -> Any:
        return values[argument] if isinstance(argument, Node) else argument

    found = []
    table, anywhere = (PRESERVED, ANYWHERE) if preserves else (CHANGED, CHANGED_ANYWHERE)
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        args = pytree.tree_map(value, node.args)
        for step, (operators, fits, respelling) in table.items():
            if node.target in operators and _fits(fits, args, node.kwargs):
                found.append((step, node, _bound(respelling, node.target)))
        if is_floating(values[node]) and values[node].dim() and values[node].shape[-1] > 1:
            found += [(step, node, _behind(respelling, node.target)) for step, respelling in anywhere.items()]
    return found


def _fits(fits: Callable[..., bool], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        return bool(fits(*args, **kwargs))
    except TypeError:  # called with other arguments than the step is for
        return False


def _bound(respelling: Respelling, operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: respelling(operator, *args, **kwargs)


def _behind(respelling: Respelling, operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: respelling(operator(*args, **kwargs))


@cache
def in_turn(names: tuple[str, ...]) -> tuple[tuple[bool, str, tuple[str, ...]], ...]:
    """The steps that the patterns allow, those that change the meaning twice, and the patterns that allow each."""
    found: dict[tuple[bool, str], dict[str, None]] = {}
    for name in names:
        for preserves in (True, False):
            for step, _, _ in choices(name, preserves):
                found.setdefault((preserves, step), {})[name] = None
    several = ((one, patterns) for one, patterns in found.items() for _ in range(1 if one[0] else 2))
    return tuple((*one, tuple(patterns)) for one, patterns in several)


def case(seed: int, names: tuple[str, ...]) -> Case:
    """The case of one seed: the step whose turn it is, and further ones where it keeps the meaning."""
    draw = random.Random(seed)
    steps_in_turn = in_turn(names)
    preserves, wanted, patterns = steps_in_turn[seed % len(steps_in_turn)]
    name = draw.choice(patterns)
    possible = draw.sample(every := choices(name, preserves), len(every))
    possible.sort(key=lambda one: one[0] != wanted)
    count = draw.randint(1, STEPS) if preserves else 1
    spelled: dict[Node, Callable[..., Any]] = {}
    steps = []
    for step, node, called in possible:
        if node not in spelled and len(spelled) < count:
            spelled[node] = called
            steps.append(step)
    with quiet():
        return Case(seed, tuple(steps), preserves, _verdict(name, spelled, preserves), name)


def _verdict(name: str, spelled: Mapping[Node, Callable[..., Any]], preserves: bool) -> str:
    plain, given, _ = structure(name)

    def respelled(*tensors: Tensor) -> Any:
        return tuple(_Respelled(plain, spelled).run(*tensors))

    try:
        with torch.no_grad():
            graph = capture(Function(respelled), given)
            run_passes(graph, earlier_than("match_patterns"))
    except FuseError as error:
        return f"not captured: {error}"
    outcomes = match(graph, [PATTERNS[name]], lambda found, around: found)
    matches = [one.found for one in outcomes if one.found is not None and one.kind == "matched"]
    values = values_of(graph, tensors_of(graph, given))
    if not all(holds(one, values) for one in matches):
        return WRONG
    if matches or not preserves:
        return "as it should"
    best = max(outcomes, key=lambda one: one.progress, default=None)
    return f"{best.kind}: {best.reason}" if best else "no candidate"


def holds(found: FoundMatch, values: Mapping[Node, Any]) -> bool:
    """Whether the graph has, at a match, what the pattern computes of what it is given there."""
    pattern: Pattern = found.form.pattern
    given: dict[str, list[Any]] = {one.name: [] for one in pattern.parameters}
    for key in found.form.keys:
        if key not in found.inputs:
            given[key[0]].append(torch.zeros(1))
            continue
        one = found.inputs[key]
        value = values[one.node]
        given[key[0]].append(value if one.dims is None else value.permute(one.dims))
    arguments = [
        given[one.name] if isinstance(one.spec, ManySpec) else given[one.name][0] for one in pattern.parameters
    ]
    with running(Environment(found.constants, found.form.choices)), torch.no_grad():
        results = pattern.function(*arguments)
    for result, output in zip(results if isinstance(results, tuple) else (results,), found.outputs, strict=True):
        have = values[output.node]
        if not torch.allclose(result.reshape(have.shape).double(), have.double(), 1e-3, 1e-4, equal_nan=True):
            return False
    return True


def run(cases: int, seed: int, only: Sequence[str] = ()) -> list[Case]:
    """``cases`` cases from ``seed`` on, of all patterns or of some."""
    names = tuple(name for name in PUBLISHED if not only or name in only)
    return [case(seed + number, names) for number in range(cases)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    return told(run(options.cases, options.seed, options.only), options.output)


if __name__ == "__main__":
    sys.exit(main())
