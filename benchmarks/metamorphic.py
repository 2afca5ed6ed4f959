"""Is a pattern found in other spellings of its code, and never in code that means something else?

    pattern     softmax(x * 2.5, -1) + y           a random expression, each operator in its first spelling
    preserved   y.add(F.softmax(x / 0.4, 1))       some operators in another spelling: must match
    changed     softmax(x * 2.6, -1) + y           one operator computes something else: must not match wrongly

Every step has a name, and every case a seed. The seed says which steps the case is for: one that changes the meaning
comes alone, of those that keep it two come together. Over as many seeds as ``IN_TURN`` is long, each step comes twice
at least. A preserved case that does not match names its steps, which is the rule that is missing. Every match is run:
what the pattern computes of the values that it is given there must be the value that the graph has, so that a changed
case may match a part of it that means the same. Run it as::

    python -m benchmarks.metamorphic [--cases 2000] [--seed 0] [-o FILE.json]

and ``python -m benchmarks.steps FILE.json ...`` sums up how often each step was taken, of several runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from benchmarks.reflexive import pattern_of
from fuse.check.judging import quiet
from fuse.errors import FuseError
from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.rewrite.patterns.exact_match import FoundMatch
from fuse.rewrite.patterns.matching import match
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.registry import earlier_than

ROWS, COLUMNS = 4, 6
WANTED = 0.99
WRONG = "matched, and means something else"
STEPS = 3
"""Operators at most that are spelled otherwise in one case."""

Spelling = Callable[..., Tensor]


@dataclass(frozen=True)
class Operator:
    """One operator: its ``spellings``, by the step that leads there from the first, and ``changes`` of its meaning."""

    arity: int
    spellings: dict[str, Spelling]
    changes: dict[str, Spelling]


def _written(x: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    copy = x.clone()
    write(copy)
    return copy


OPERATORS = {
    "add": Operator(
        2,
        {
            "": lambda x, y: x + y,
            "operands swapped": lambda x, y: y + x,
            "function": lambda x, y: torch.add(x, y),
            "keyword": lambda x, y: torch.add(input=x, other=y),
            "in-place": lambda x, y: _written(x, lambda copy: copy.add_(y)),
            "alpha": lambda x, y: torch.add(x, y, alpha=1),
        },
        {"other operator": lambda x, y: x - y, "scaled": lambda x, y: torch.add(x, y, alpha=2)},
    ),
    "sub": Operator(
        2,
        {
            "": lambda x, y: x - y,
            "method": lambda x, y: x.sub(y),
            "alpha": lambda x, y: torch.add(x, y, alpha=-1),
            "rsub": lambda x, y: torch.rsub(y, x),
            "sum with the negative": lambda x, y: x + -y,
            "in-place": lambda x, y: _written(x, lambda copy: copy.sub_(y)),
        },
        {"operands swapped where that matters": lambda x, y: y - x},
    ),
    "mul": Operator(
        2,
        {
            "": lambda x, y: x * y,
            "operands swapped": lambda x, y: y * x,
            "method": lambda x, y: x.mul(y),
            "in-place": lambda x, y: _written(y, lambda copy: copy.mul_(x)),
        },
        {"other operator": lambda x, y: x + y},
    ),
    "div": Operator(
        2,
        {
            "": lambda x, y: x / y.exp(),
            "reciprocal": lambda x, y: x * (1 / y.exp()),
            "function": lambda x, y: torch.div(x, torch.exp(y)),
            "reciprocal method": lambda x, y: torch.exp(y).reciprocal() * x,
        },
        {"operands swapped where that matters": lambda x, y: y.exp() / x},
    ),
    "scale": Operator(
        1,
        {
            "": lambda x: x * 2.5,
            "number first": lambda x: 2.5 * x,
            "quotient": lambda x: x / 0.4,
            "0-d tensor": lambda x: x * torch.tensor(2.5),
            "filled tensor": lambda x: torch.full((), 2.5) * x,
            "in-place": lambda x: _written(x, lambda copy: copy.mul_(2.5)),
        },
        {"literal": lambda x: x * 2.6, "0-d tensor of another value": lambda x: x * torch.tensor(2.75)},
    ),
    "complement": Operator(
        1,
        {
            "": lambda x: 1 - x,
            "number first": lambda x: torch.sub(1, x),
            "rsub": lambda x: torch.rsub(x, 1),
            "sum with the negative": lambda x: -x + 1,
            "0-d tensor": lambda x: torch.tensor(1.0) - x,
        },
        {"operands swapped where that matters": lambda x: x - 1, "literal": lambda x: 2 - x},
    ),
    "square": Operator(
        1,
        {
            "": lambda x: x * x,
            "power": lambda x: x**2,
            "square": lambda x: torch.square(x),
            "power of a float": lambda x: x.pow(2.0),
        },
        {"exponent": lambda x: x**3},
    ),
    "rsqrt": Operator(
        1,
        {
            "": lambda x: torch.rsqrt(x.exp()),
            "quotient": lambda x: 1 / torch.sqrt(x.exp()),
            "power": lambda x: x.exp() ** -0.5,
            "reciprocal": lambda x: x.exp().sqrt().reciprocal(),
        },
        {"exponent": lambda x: x.exp() ** 0.5},
    ),
    "relu": Operator(
        1,
        {
            "": lambda x: torch.relu(x),
            "clamp": lambda x: x.clamp(min=0),
            "clip": lambda x: torch.clip(x, 0),
            "clamp_min": lambda x: torch.clamp_min(x, 0.0),
            "0-d tensor": lambda x: x.clamp(min=torch.tensor(0.0)),
            "in-place": lambda x: _written(x, lambda copy: copy.relu_()),
        },
        {"bound": lambda x: x.clamp(min=0.25), "other bound": lambda x: x.clamp(max=0)},
    ),
    "silu": Operator(
        1,
        {
            "": lambda x: F.silu(x),
            "decomposed": lambda x: x * torch.sigmoid(x),
            "decomposed, swapped": lambda x: x.sigmoid().mul(x),
        },
        {"other operator": lambda x: x * torch.tanh(x)},
    ),
    "tanh": Operator(
        1,
        {
            "": lambda x: torch.tanh(x),
            "method": lambda x: x.tanh(),
            "in-place": lambda x: _written(x, lambda copy: copy.tanh_()),
        },
        {"other operator": lambda x: torch.sigmoid(x)},
    ),
    "softmax": Operator(
        1,
        {
            "": lambda x: torch.softmax(x, -1),
            "positive dim": lambda x: x.softmax(1),
            "keyword": lambda x: F.softmax(input=x, dim=-1),
        },
        {"dim": lambda x: torch.softmax(x, 0)},
    ),
    "centre": Operator(
        1,
        {
            "": lambda x: x - x.mean(-1, keepdim=True),
            "positive dim": lambda x: x - torch.mean(x, 1, True),
            "sum": lambda x: x - x.sum(-1, keepdim=True) / COLUMNS,
            "unsqueeze": lambda x: x - x.mean(-1).unsqueeze(-1),
            "index with None": lambda x: x - x.mean(1)[:, None],
        },
        {"dim": lambda x: x - x.mean(0, keepdim=True), "count": lambda x: x - x.sum(-1, keepdim=True) / 5},
    ),
    "linear": Operator(
        3,
        {
            "": lambda x, w, b: F.linear(x, w, b),
            "matmul": lambda x, w, b: x @ w.t() + b,
            "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
            "mm, swapped": lambda x, w, b: b + x.mm(w.T),
            "einsum": lambda x, w, b: torch.einsum("ij,kj->ik", x, w) + b,
            "bmm": lambda x, w, b: torch.bmm(x[None], w.mT[None])[0] + b,
            "linear without bias": lambda x, w, b: F.linear(x, w) + b,
        },
        {"sign of the bias": lambda x, w, b: x @ w.t() - b, "transposed": lambda x, w, b: F.linear(x, w.t(), b)},
    ),
    "halves": Operator(
        1,
        {
            "": lambda x: torch.cat([x[:, 3:].exp(), x[:, :3]], 1),
            "chunk": lambda x: torch.cat([x.chunk(2, -1)[1].exp(), x.chunk(2, 1)[0]], -1),
            "split": lambda x: torch.cat([x.split(3, 1)[1].exp(), x.split([3, 3], -1)[0]], dim=1),
            "narrow": lambda x: torch.cat([x.narrow(1, 3, 3).exp(), x.narrow(-1, 0, 3)], 1),
            "unbind": lambda x: torch.cat([x.view(ROWS, 2, 3).unbind(1)[1].exp(), x.view(ROWS, 2, 3)[:, 0]], 1),
        },
        {"bounds": lambda x: torch.cat([x[:, 2:5].exp(), x[:, :3]], 1)},
    ),
    "same": Operator(
        1,
        {
            "": lambda x: x,
            "reshape round trip": lambda x: x.reshape(-1).view(ROWS, COLUMNS),
            "transpose round trip": lambda x: x.t().transpose(0, 1),
            "permute round trip": lambda x: x.permute(1, 0).permute(1, 0),
            "flatten round trip": lambda x: x.flatten().unflatten(0, (ROWS, COLUMNS)),
            "unsqueeze round trip": lambda x: x.unsqueeze(1).squeeze(1),
            "cast to its own dtype": lambda x: x.to(torch.float32),
            "contiguous": lambda x: x.contiguous(),
            "clone": lambda x: x.clone(),
            "whole slice": lambda x: x[:, :],
        },
        {
            "elements in another order": lambda x: x.reshape(COLUMNS, ROWS).t(),
            "cast that rounds": lambda x: x.bfloat16().float(),
            "flipped": lambda x: x.flip(-1),
        },
    ),
}


Step = tuple[str, str]
"""An operator, and what a spelling or a change of it is called."""

KEEPING = [(name, way) for name, one in OPERATORS.items() for way in one.spellings if way]
CHANGING = [(name, way) for name, one in OPERATORS.items() for way in one.changes]
random.Random(0).shuffle(KEEPING)
IN_TURN: list[tuple[bool, tuple[Step, ...]]] = [
    *((True, (step, KEEPING[place - 1])) for place, step in enumerate(KEEPING)),
    *((False, (step,)) for step in CHANGING for _ in range(2)),
]
"""Whether the meaning is kept, and the steps that are taken: one for each seed, over and over."""
random.Random(0).shuffle(IN_TURN)


@dataclass(frozen=True)
class Expression:
    """An operator and what it is applied to: other expressions, or inputs by number."""

    operator: str
    operands: tuple[Expression | int, ...]
    name: int


@dataclass(frozen=True)
class Case:
    """One case: its seed, the steps that were taken, whether those keep the meaning, the pattern if named."""

    seed: int
    steps: tuple[str, ...]
    preserves: bool
    verdict: str
    pattern: str = ""

    @property
    def failed(self) -> bool:
        return self.verdict != "as it should"


def expression(draw: random.Random, depth: int, count: list[int]) -> Expression | int:
    """A random expression over the inputs 0 and 1."""
    if depth == 0:
        return draw.randrange(2)
    return applied(draw.choice(list(OPERATORS)), draw, depth, count)


def applied(name: str, draw: random.Random, depth: int, count: list[int]) -> Expression:
    """The operator ``name`` of random expressions."""
    operands = [expression(draw, draw.randrange(depth), count) for _ in range(min(OPERATORS[name].arity, 2))]
    if name == "linear":
        operands = [operands[0], 2, 3]
    count[0] += 1
    return Expression(name, tuple(operands), count[0])


def with_operators(names: Sequence[str], draw: random.Random) -> Expression:
    """A random expression that has the operators ``names``, and another one at least where those compute nothing."""
    while True:
        whole = applied(draw.choice(list(OPERATORS)), draw, draw.randint(1, 4), [0])
        found = Counter(one.operator for one in parts(whole))
        if Counter(names) <= found and found.keys() != {"same"}:
            return whole


def computed(whole: Expression, spelled: dict[int, Spelling]) -> Callable[..., Tensor]:
    """The function that ``whole`` is, each operator in its first spelling but for those ``spelled``."""

    def value(one: Expression | int, given: Sequence[Tensor]) -> Tensor:
        if isinstance(one, int):
            return given[one]
        plain = OPERATORS[one.operator].spellings[""]
        return spelled.get(one.name, plain)(*(value(operand, given) for operand in one.operands))

    return lambda *given: value(whole, given)


def parts(one: Expression | int) -> list[Expression]:
    """``one`` and all expressions in it."""
    return [] if isinstance(one, int) else [one, *(part for operand in one.operands for part in parts(operand))]


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, COLUMNS), (ROWS, COLUMNS), (COLUMNS, COLUMNS), (COLUMNS,))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def case(seed: int) -> Case:
    """The case of one seed: the steps whose turn it is, and perhaps a further one where they keep the meaning."""
    draw = random.Random(seed)
    preserves, wanted = IN_TURN[seed % len(IN_TURN)]
    whole = with_operators([name for name, _ in wanted], draw)
    left = parts(whole)
    draw.shuffle(left)
    taken: list[tuple[Expression, str]] = []
    for operator, way in wanted:
        one = next(one for one in left if one.operator == operator)
        left.remove(one)
        taken.append((one, way))
    if preserves:
        further = left[: draw.randint(0, STEPS - len(wanted))]
        taken += [(one, draw.choice([way for way in OPERATORS[one.operator].spellings if way])) for one in further]
    steps, spelled = [], {}
    for one, way in taken:
        steps.append(f"{one.operator}: {way}")
        ways = OPERATORS[one.operator].spellings if preserves else OPERATORS[one.operator].changes
        spelled[one.name] = ways[way]
    given = inputs()
    plain, other = computed(whole, {}), computed(whole, spelled)
    with quiet():
        return Case(seed, tuple(steps), preserves, _verdict(plain, other, given, preserves))


def _verdict(
    plain: Callable[..., Tensor], other: Callable[..., Tensor], given: Sequence[Tensor], preserves: bool
) -> str:
    read = _read(plain, given)

    def within(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def of_read(*tensors: Tensor) -> Tensor:
            filled = list(given)
            for place, tensor in zip(read, tensors, strict=True):
                filled[place] = tensor
            return function(*filled)

        return of_read

    tensors = [given[place] for place in read]
    try:
        with torch.no_grad():
            graph = capture(Function(within(other)), tuple(tensors))
        run_passes(graph, earlier_than("match_patterns"))
        outcomes = match(graph, [pattern_of(within(plain), tensors)], lambda found, around: found)
    except FuseError as error:
        return "as it should" if not preserves else f"refused: {error}"
    matches = [one.found for one in outcomes if one.found is not None and one.kind == "matched"]
    if not all(_holds(one, graph, within(plain), tensors) for one in matches):
        return WRONG
    if matches or not preserves:
        return "as it should"
    best = max(outcomes, key=lambda one: one.progress, default=None)
    return best.reason if best else "no candidate"


def _holds(found: FoundMatch, graph: GraphModule, plain: Callable[..., Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether the graph has there what the pattern computes of what it is given there."""
    values = values_of(graph, tensors_of(graph, tensors))
    given = []
    for key in found.form.keys:
        one = found.inputs[key]
        value = values[one.node]
        given.append(value if one.dims is None else value.permute(one.dims))
    (output,) = found.outputs
    have = values[output.node]
    return torch.allclose(plain(*given).reshape(have.shape), have, rtol=1e-3, atol=1e-4, equal_nan=True)


def values_of(graph: GraphModule, tensors: Sequence[Tensor]) -> dict[Node, Any]:
    """The value of every node of ``graph``."""
    values = _Values(graph)
    with torch.no_grad():
        values.run(*tensors)
    return values.found


class _Values(Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.found: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.found[n] = super().run_node(n)
        return self.found[n]


def tensors_of(graph: GraphModule, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What the placeholders of ``graph`` are: arguments, and tensors that it holds."""
    inputs = graph.meta["signature"].inputs
    return [tensors[spec.index] if spec.kind == "argument" else spec.value for spec in inputs]


def _read(function: Callable[..., Tensor], given: Sequence[Tensor]) -> list[int]:
    """The inputs that a function reads."""
    leaves = [one.clone().requires_grad_() for one in given]
    with torch.enable_grad():
        result = function(*leaves)
    gradients = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
    return [place for place, gradient in enumerate(gradients) if gradient is not None]


def run(cases: int, seed: int) -> list[Case]:
    """The cases of as many seeds, from ``seed`` on."""
    # what is known of these patterns is nobody else's
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, FUSE_CACHE_DIR=f"{folder}/cache"):
        return [case(number) for number in range(seed, seed + cases)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    return told(run(options.cases, options.seed), options.output)


def told(found: Sequence[Case], output: Path | None) -> int:
    """Print what came of the cases, and keep it; the exit status."""
    failed = [one for one in found if one.failed]
    wrong = [one for one in failed if one.verdict == WRONG]
    if output is not None:
        output.write_text(json.dumps([asdict(one) for one in found]) + "\n")
    print(summary(found))
    for one in [*wrong, *failed][:60]:
        print(f"seed {one.seed}: {one.pattern} {', '.join(one.steps)}: {one.verdict}")
    missed, preserved = len(failed) - len(wrong), sum(one.preserves for one in found)
    return 0 if not wrong and missed <= (1 - WANTED) * preserved else 1


def summary(found: Sequence[Case]) -> str:
    """How many cases there were, what became of them, and how often the rarest step was taken."""
    preserved, wrong = sum(one.preserves for one in found), sum(one.verdict == WRONG for one in found)
    missed, changed = sum(one.failed for one in found) - wrong, len(found) - preserved
    taken = Counter(step for one in found for step in one.steps)
    return (
        f"{preserved} preserved, {missed} of them missed; {changed} changed; {wrong} wrong\n"
        f"{len(taken)} steps, each taken {min(taken.values(), default=0)} times or more"
    )


if __name__ == "__main__":
    sys.exit(main())
