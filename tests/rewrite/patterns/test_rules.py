"""Two spellings of one thing are one term, two things are two terms, and a term means what its operator computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from fuse.rewrite.patterns import rules
from fuse.rewrite.patterns.canonical import may_make
from fuse.rewrite.patterns.index import GraphIndex
from fuse.rewrite.patterns.language import Environment
from fuse.rewrite.patterns.terms import FILL, LEAF, NUMBER, PART, Term, Terms, type_of
from fuse.rewrite.patterns.tracing import terms_of, trace

torch.manual_seed(0)
X = torch.rand(4, 6) + 0.5
Y = torch.rand(4, 6) + 0.5
ROW = torch.rand(6)
WIDE = torch.rand(4, 6, 8)
W = torch.rand(8, 5)
WT = torch.rand(5, 8)
BIAS = torch.rand(5)
BATCH = torch.rand(2, 3, 4, 8)
MASK = torch.rand(4, 6) > 0.5
INTEGERS = torch.arange(6)
DIVISORS = torch.arange(1, 7)
SCALAR = torch.rand(())
BYTES = torch.arange(24, dtype=torch.uint8).view(4, 6)
HALF = torch.rand(4, 6).half() + 0.5
SQUARE = torch.rand(6, 6).half()


def terms(function: Callable[..., Any], *arguments: Tensor, table: Terms | None = None) -> tuple[Term, ...]:
    """The terms of a function's results."""
    table = table or Terms()
    traced = trace(function, arguments, Environment({}, {}), FakeTensorMode(allow_non_fake_inputs=True))
    leaves = [table.leaf(f"x{place}", type_of(argument)) for place, argument in enumerate(arguments)]
    known = terms_of(traced, table, leaves)
    return tuple(known[node] for node in traced.outputs)


def _put(x: Tensor, row: Tensor, mask: Tensor) -> Tensor:
    return x.index_put((mask[:, 0],), row)


SAME: list[tuple[str, Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]] = [
    ("commutative", lambda x, y: x + y, lambda x, y: torch.add(y, x), (X, Y)),
    ("commutative", lambda x, y: torch.maximum(x, y), lambda x, y: torch.maximum(y, x), (X, Y)),
    ("scaled_sums", lambda x, y: x - y, lambda x, y: x + -1 * y, (X, Y)),
    ("scaled_sums", lambda x, y: x - y, lambda x, y: torch.add(x, y, alpha=-1), (X, Y)),
    ("scaled_sums", lambda x, y: x + 0.5 * y, lambda x, y: torch.add(x, y, alpha=0.5), (X, Y)),
    ("scaled_sums", lambda x: 1 - x, lambda x: -x + 1, (X,)),
    ("quotients", lambda x: x / 3, lambda x: x * (1 / 3), (X,)),
    ("quotients", lambda x: x / 8, lambda x: 0.125 * x, (X,)),
    ("quotients", lambda x, y: x / y, lambda x, y: x * (1 / y), (X, Y)),
    ("quotients", lambda x: x * 2, lambda x: 2.0 * x, (X,)),
    ("quotients", lambda x: x * 49, lambda x: x / (1 / 49), (X,)),
    ("quotients", lambda x, i: x / i, lambda x, i: x * i.reciprocal(), (X, DIVISORS)),
    ("powers", lambda x: x.pow(1).exp(), lambda x: x.exp(), (X,)),
    ("powers", lambda i: i.pow(2), lambda i: i * i, (INTEGERS,)),
    ("powers", lambda x: x * x, lambda x: x**2, (X,)),
    ("powers", lambda x: torch.square(x), lambda x: x.pow(2), (X,)),
    ("powers", lambda x: torch.rsqrt(x), lambda x: 1 / torch.sqrt(x), (X,)),
    ("powers", lambda x, y: x * torch.rsqrt(y), lambda x, y: x / y.sqrt(), (X, Y)),
    ("powers", lambda x: x**-0.5, lambda x: x.rsqrt(), (X,)),
    ("products", lambda x, w, b: F.linear(x, w, b), lambda x, w, b: x @ w.t() + b, (WIDE, WT, BIAS)),
    ("products", lambda x, w, b: F.linear(x, w, b), lambda x, w, b: b + x.matmul(w.T), (WIDE[0], WT, BIAS)),
    ("products", lambda x, w, b: torch.addmm(b, x, w), lambda x, w, b: x @ w + b, (WIDE[0], W, BIAS)),
    ("products", lambda x, w, b: torch.addmm(b, x, w, alpha=2), lambda x, w, b: 2 * (x @ w) + b, (WIDE[0], W, BIAS)),
    ("products", lambda x, w, b: torch.addmm(b, x, w, beta=-1), lambda x, w, b: x @ w - b, (WIDE[0], W, BIAS)),
    ("products", lambda x, w: x @ w, lambda x, w: torch.matmul(x.reshape(-1, 8), w).view(4, 6, 5), (WIDE, W)),
    ("products", lambda x, y: torch.bmm(x, y)[0].exp(), lambda x, y: (x[0] @ y[0]).exp(), (WIDE[:1], W[None])),
    ("products", lambda x, y: x @ y.mT, lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), (BATCH, BATCH)),
    ("composed", lambda x: F.silu(x), lambda x: torch.sigmoid(x) * x, (X,)),
    ("composed", lambda x: F.glu(x, -1), lambda x: x[:, :3] * torch.sigmoid(x[:, 3:]), (X,)),
    ("composed", lambda x, y: torch.addcmul(x, x, y, value=0.5), lambda x, y: x + 0.5 * (y * x), (X, Y)),
    ("composed", lambda x, y: torch.addcdiv(x, x, y), lambda x, y: x / y + x, (X, Y)),
    ("composed", lambda x, i: torch.addcdiv(x, x, i), lambda x, i: x / i + x, (X, DIVISORS)),
    ("composed", lambda x: x.addcmul(torch.full((), 2.0), x), lambda x: x + 2 * x, (X,)),
    ("scaled_sums", lambda x, h: x - h, lambda x, h: x + -h, (X, HALF)),
    ("averages", lambda h: h.mean(1), lambda h: h.float().mean(1).half(), (HALF,)),
    ("bounds", lambda x: F.relu(x), lambda x: x.clamp(min=0), (X,)),
    ("bounds", lambda x: F.relu6(x), lambda x: x.clamp(0, 6), (X,)),
    ("choices", lambda x, m: x.masked_fill(m, 2.0), lambda x, m: torch.where(m, 2.0, x), (X, MASK)),
    ("choices", lambda x, m: x.masked_fill(m, 2), lambda x, m: torch.where(m, torch.scalar_tensor(2), x), (X, MASK)),
    ("choices", lambda x, y, m: x.index_put((m,), y[0, 0]), lambda x, y, m: torch.where(m, y[0, 0], x), (X, Y, MASK)),
    ("choices", _put, lambda x, r, m: torch.where(m[:, 0, None], r, x), (X, ROW, MASK)),
    ("fills", lambda x: torch.sub(1, x), lambda x: 1 - x, (X,)),
    ("fills", lambda x: x / torch.scalar_tensor(8), lambda x: x * 0.125, (X,)),
    ("fills", lambda x: x.clamp_min(torch.full((), 0.1)), lambda x: x.clamp(min=0.1), (X,)),
    ("fills", lambda x: x + torch.full((6,), 2.0), lambda x: 2 + x, (X,)),
    ("fills", lambda x: torch.cat([x, torch.zeros_like(x)]), lambda x: torch.cat([x, torch.full((4, 6), 0.0)]), (X,)),
    ("choices", lambda x, y: x > y, lambda x, y: y < x, (X, Y)),
    ("choices", lambda x: x >= 1, lambda x: 1 <= x, (X,)),  # noqa: SIM300
    ("averages", lambda x: x.mean(-1), lambda x: x.sum(1) / 6, (X,)),
    ("averages", lambda x: x.mean(), lambda x: x.sum() / 24, (X,)),
    ("averages", lambda x: x.amax(), lambda x: x.amax((1, 0)), (X,)),
    ("averages", lambda x: x.mean(1, keepdim=True), lambda x: (x.sum(-1) / 6).unsqueeze(-1), (X,)),
    ("averages", lambda x: x.amax(1, keepdim=True), lambda x: x.amax(-1)[:, None], (X,)),
    ("pieces", lambda x, y: torch.stack([x, y], 1), lambda x, y: torch.cat([x.unsqueeze(1), y[:, None]], 1), (X, Y)),
    ("pieces", lambda x: x.chunk(2, -1)[1].exp(), lambda x: x.split(3, 1)[1].exp(), (X,)),
    ("pieces", lambda x: x.narrow(1, 0, 3).exp(), lambda x: x[..., :3].exp(), (X,)),
    ("pieces", lambda x: x.select(0, -1).exp(), lambda x: x[3].exp(), (X,)),
    ("pieces", lambda x: x.view(4, 3, 2)[..., 1].exp(), lambda x: x[:, 1::2].exp(), (X,)),
    ("pieces", lambda x: x.view(4, 2, 3)[:, 1].exp(), lambda x: x[:, 3:].exp(), (X,)),
    ("pieces", lambda x: x.view(2, 2, 2, 3)[:, :, 1].exp(), lambda x: x[:, 3:].view(2, 2, 3).exp(), (X,)),
    ("views", lambda x: x.t().exp(), lambda x: torch.transpose(x, -2, -1).exp(), (X,)),
    ("views", lambda x: x.transpose(-1, -2), lambda x: x.permute(0, 1, 3, 2), (BATCH,)),
    ("views", lambda x: x.flatten(1).exp(), lambda x: x.reshape(4, 48).exp(), (WIDE,)),
    ("views", lambda x: x.exp().view(24, 8), lambda x: x.view(24, 8).exp(), (WIDE,)),
    ("views", lambda x, r: x + r.expand(4, 6), lambda x, r: x + r, (X, ROW)),
    ("views", lambda x, s: (x + s).view(24), lambda x, s: x.view(24) + s, (X, SCALAR)),
    ("views", lambda s: (s * 2).view(1, 1), lambda s: s.view(1, 1) * 2, (SCALAR,)),
    ("copies", lambda x: x.t().contiguous().exp(), lambda x: x.t().exp(), (X,)),
    ("copies", lambda x: x.clone().float().exp(), lambda x: x.exp(), (X,)),
    ("copies", lambda x: x.repeat(1, 1, 1).exp(), lambda x: x[None].exp(), (X,)),
    ("copies", lambda x, y: torch.zeros(4, 6).copy_(x + y), lambda x, y: x + y, (X, Y)),
    ("copies", lambda x, r: x.half().copy_(r).exp(), lambda x, r: r.half().expand(4, 6).exp(), (X, ROW)),
    ("copies", lambda x, y: x.slice_scatter(y, 0, -9, 9).exp(), lambda x, y: y.exp(), (X, Y)),
    ("copies", lambda x: x[:1].flip(0).flip([]).exp(), lambda x: x[:1].exp(), (X,)),
    ("keywords", lambda x: torch.softmax(x, 1), lambda x: F.softmax(input=x, dim=-1), (X,)),
    ("keywords", lambda x: torch.softmax(x, 0), lambda x: F.softmax(x, -2), (X,)),
    ("keywords", lambda x: torch.softmax(x, 0), lambda x: F.softmax(x, 0), (SCALAR,)),
    ("keywords", lambda x: torch.softmax(x, -1), lambda x: F.softmax(x, -1), (SCALAR,)),
    ("keywords", lambda x: x.flip(-1, 0), lambda x: x.flip(1, -2), (X,)),
    ("keywords", lambda x: x == 1, lambda x: x == 1.0, (X,)),
    ("keywords", lambda x: F.leaky_relu(x, 1), lambda x: F.leaky_relu(x, 1.0), (X,)),
    ("keywords", lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="none"), (X,)),
]  # fmt: skip

DIFFERENT: list[tuple[str, Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]] = [
    ("order of a difference", lambda x, y: x - y, lambda x, y: y - x, (X, Y)),
    ("order of a quotient", lambda x, y: x / y, lambda x, y: y / x, (X, Y)),
    ("order of a product", lambda x, y: x @ y, lambda x, y: y @ x, (WIDE[0, :4, :4], WIDE[1, :4, :4])),
    ("alpha", lambda x, y: torch.add(x, y, alpha=2), lambda x, y: x + y, (X, Y)),
    ("beta", lambda x, w, b: torch.addmm(b, x, w, beta=2), lambda x, w, b: x @ w + b, (WIDE[0], W, BIAS)),
    ("a literal", lambda x: x * 2, lambda x: x * 3, (X,)),
    ("a dimension", lambda x: x.softmax(0), lambda x: x.softmax(1), (X,)),
    ("an approximation", lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh"), (X,)),
    ("a permutation", lambda x: x.permute(0, 2, 3, 1), lambda x: x.transpose(-2, -1), (BATCH,)),
    ("a dtype", lambda x: x.double().exp(), lambda x: x.exp(), (X,)),
    ("an accumulator's dtype", lambda x: x.sum(1, dtype=torch.float64), lambda x: x.sum(1), (X,)),
    ("the other half", lambda x: x.view(4, 2, 3)[:, 1].exp(), lambda x: x[:, 1::2].exp(), (X,)),
    ("two of three", lambda x: x.view(4, 2, 3)[..., 1:].exp(), lambda x: x[:, 1::2].view(4, 1, 3).exp(), (X,)),
    ("a slice", lambda x: x[:, :3].exp(), lambda x: x[:, 3:].exp(), (X,)),
    ("repetitions", lambda x: x.repeat(2, 1).exp(), lambda x: torch.cat([x, x]).exp(), (X,)),
    ("a step", lambda x: x[:, ::2].exp(), lambda x: x[:, :3].exp(), (X,)),
    ("a broadcast result", lambda x, r: (x + r).sum(0), lambda x, r: x.sum(0) + r, (X, ROW)),
    ("a reshape across rows", lambda x, y: x.view(6, 4) + y.view(6, 4), lambda x, y: (x + y).t(), (X, Y)),
    ("a column", lambda x, b: (x + b[:, None]).view(2, 12), lambda x, b: x.view(2, 12) + b[:2, None], (X, BIAS[:4])),
    ("kept dimensions", lambda x: x.sum(1, keepdim=True), lambda x: x.sum(1), (X,)),
    ("a bound", lambda x: x.clamp(min=0), lambda x: x.clamp(max=0), (X,)),
    ("another bound", lambda x: x.clamp(min=0), lambda x: x.clamp(min=1), (X,)),
    ("a second bound", lambda x: x.clamp(min=0), lambda x: F.relu6(x), (X,)),
    ("another second bound", lambda x: x.clamp(0, 6), lambda x: x.clamp(0, 5), (X,)),
    ("the same number for another bound", lambda x: x.clamp(min=1), lambda x: x.clamp(max=1), (X,)),
    ("a bound for each element", lambda x, y: x.clamp(min=y), lambda x, y: x.clamp(max=y), (X, Y)),
    ("bounds for each element", lambda x, y: x.clamp(y, x), lambda x, y: x.clamp(x, y), (X, Y)),
    ("a base", lambda x: 2**x, lambda x: x**2, (X,)),
    ("a power's dtype", lambda i: i.pow(1.0), lambda i: i * 1, (INTEGERS,)),
    ("beta 0", lambda x, w, b: torch.addmm(b, x, w, beta=0), lambda x, w, b: x @ w + b * 0, (WIDE[0], W, BIAS)),
    ("a sum where chosen", lambda x, m: x.index_put((m,), x[0, 0], True), lambda x, m: x + x[0, 0] * m, (X, MASK)),
    ("a part of a copy", lambda x, y: x.slice_scatter(y[1:], 0, 1), lambda x, y: y * 1, (X, Y)),
    ("a flipped copy", lambda x: x.flip(0).exp(), lambda x: x.exp(), (X,)),
    ("the bytes", lambda x: x.view(torch.int64).exp(), lambda x: x.exp(), (X.double(),)),
    ("a diagonal", lambda x: x.triu(-1), lambda x: x.triu(1), (X,)),
    ("places to read", lambda x, i: x[:, i], lambda x, i: x[:, i * 2 // 2], (X, INTEGERS)),
    ("a number and a tensor of another shape", lambda x, r: r + torch.zeros(4, 6), lambda x, r: r + 0, (X, ROW)),
    ("a number in float32", lambda x: x * torch.full((), 0.1, dtype=torch.float32), lambda x: x * 0.1, (X.double(),)),
    ("rounding", lambda x, y: torch.div(x, y, rounding_mode="floor"), lambda x, y: x / y, (X, Y)),
    ("an integer quotient", lambda i: i / 2, lambda i: i // 2, (INTEGERS,)),
    ("bytes taken away, and their negative", lambda x, b: x - b, lambda x, b: x + (-b), (X, BYTES)),
    ("bytes taken from a number, and their negative", lambda x, b: (x - 1) - b, lambda x, b: (x - 1) + -b, (X, BYTES)),
    ("bytes times alpha", lambda x, b: torch.add(x, b, alpha=100), lambda x, b: x + b * 100, (X, BYTES)),
    ("half floats times alpha", lambda x, h: torch.add(x, h, alpha=0.1), lambda x, h: x + h * 0.1, (X, HALF)),
    ("a quotient by half floats", lambda x, h: x / h, lambda x, h: x * h.reciprocal(), (X, HALF)),
    ("addcmul of half floats", lambda x, h: x.addcmul(h, h), lambda x, h: x + h * h, (X, HALF)),
    ("addcdiv of half floats", lambda x, h: x.addcdiv(x, h), lambda x, h: x + x * h.reciprocal(), (X, HALF)),
    ("addcmul in half floats", lambda h: h.addcmul(h, h, value=0.1), lambda h: h + h * h * 0.1, (HALF,)),
    ("a mean of half floats", lambda h: h.mean(-1), lambda h: h.sum(-1) / 6, (HALF,)),
    ("a scaled half product", lambda h, s: torch.addmm(h, h, s, alpha=2), lambda h, s: h @ s * 2 + h, (HALF, SQUARE)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "one", "other", "arguments"), SAME, ids=[f"{i}-{c[0]}" for i, c in enumerate(SAME)])
def test_two_spellings_are_one_term(rule, one, other, arguments):
    table = Terms()
    assert terms(one, *arguments, table=table) == terms(other, *arguments, table=table)


@pytest.mark.parametrize(("what", "one", "other", "arguments"), DIFFERENT, ids=[case[0] for case in DIFFERENT])
def test_two_things_are_two_terms(what, one, other, arguments):
    table = Terms()
    assert terms(one, *arguments, table=table) != terms(other, *arguments, table=table)


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (lambda x: x.clamp(min=0), (X,), "relu(x0)"),
        (lambda x: x == 1, (X,), "eq(x0, 1)"),
        (lambda x: F.leaky_relu(x, 0.5), (X,), "leaky_relu(x0, negative_slope=0.5)"),
        (lambda x, i: x[:, i], (X, INTEGERS), "index.Tensor(x0, x1, indices=(None, 'tensor'))"),
        (lambda x: x.mean(0), (X[:0],), "mean.dim(x0, dim=(0,), keepdim=False)"),
        (lambda x: x.softmax(0), (SCALAR,), "_softmax(x0, dim=0, half_to_float=False)"),
        (lambda x: x.softmax(0).view(24), (X,), "reshape(_softmax(x0, dim=0, half_to_float=False))"),
    ],
)
def test_how_a_term_is_spelled(function, arguments, expected):
    assert [str(term) for term in terms(function, *arguments)] == [expected]


def test_every_rule_has_a_pair_of_spellings():
    assert set(rules.NAMES) <= {case[0] for case in SAME}


@pytest.mark.parametrize(("what", "one", "other", "arguments"), SAME + DIFFERENT)
def test_a_term_means_what_the_operators_compute(what, one, other, arguments):
    exact = [a.double() if a.is_floating_point() else a for a in arguments]
    for function in (one, other):
        (term,) = terms(function, *exact)
        expected = function(*exact)
        value = evaluate(term, {f"x{place}": argument for place, argument in enumerate(exact)})
        assert value.shape == expected.shape
        assert value.dtype == expected.dtype
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(("what", "one", "other", "arguments"), SAME + DIFFERENT)
def test_an_operator_makes_only_the_terms_it_is_indexed_under(what, one, other, arguments):
    for function in (one, other):
        traced = trace(function, arguments, Environment({}, {}), FakeTensorMode(allow_non_fake_inputs=True))
        index = GraphIndex(GraphModule({}, traced.graph))
        for node in index.position:
            if isinstance(node.target, OpOverload):
                assert {step.term.name for step in index.steps_of(node)} <= may_make(node.target), node.format_node()


def evaluate(term: Term, leaves: dict[str, Tensor]) -> Any:
    """The value of a term, by the meaning that its name has, written down once more for the tests."""
    if term.name == LEAF:
        return leaves[term.value]
    if term.name == NUMBER:
        return term.value
    if term.name == FILL:
        return torch.full(term.shape, term.value, dtype=term.dtype)
    operands = [evaluate(operand, leaves) for operand in term.operands]
    for operand, value in zip(term.operands, operands, strict=True):
        assert operand.name == NUMBER or value.shape == operand.shape
    constants = dict(term.constants)
    if term.name in MEANINGS:
        return MEANINGS[term.name](operands, constants, term)
    op: Any = getattr(torch.ops.aten, term.name.partition(".")[0])
    return op(*operands, **{name: value for name, value in constants.items() if value is not None})


def _slice(operands: list[Any], constants: dict[str, Any], _term: Term) -> Tensor:
    start, count, step = constants["start"], constants["count"], constants["step"]
    places = [slice(None)] * operands[0].dim()
    places[constants["dim"]] = slice(start, start + count * step, step)
    return operands[0][tuple(places)]


def _clamp(operands: list[Any], constants: dict[str, Any], _term: Term) -> Tensor:
    tensors = zip([name for name in ("min", "max") if name not in constants], operands[1:], strict=True)
    return torch.clamp(operands[0], **constants, **dict(tensors))


MEANINGS: dict[str, Callable[[list[Any], dict[str, Any], Term], Any]] = {
    "add": lambda o, c, t: o[0] + o[1],
    "mul": lambda o, c, t: o[0] * o[1],
    "pow": lambda o, c, t: o[0] ** o[1],
    "matmul": lambda o, c, t: o[0] @ o[1],
    "relu": lambda o, c, t: o[0].clamp(min=0),
    "clamp": _clamp,
    "index.Tensor": lambda o, c, t: o[0][:, o[1]],
    "index_put": lambda o, c, t: o[0].index_put((o[1],), o[2], c["accumulate"]),
    "lt": lambda o, c, t: o[0] < o[1],
    "le": lambda o, c, t: o[0] <= o[1],
    "where": lambda o, c, t: torch.where(*o),
    "sum": lambda o, c, t: o[0].sum(c["dim"]) if c["dim"] else o[0],
    "amax": lambda o, c, t: o[0].amax(c["dim"]),
    "cat": lambda o, c, t: torch.cat(o, c["dim"]),
    "slice": _slice,
    "reshape": lambda o, c, t: o[0].reshape(t.shape),
    "permute": lambda o, c, t: o[0].permute(c["dims"]),
    "expand": lambda o, c, t: o[0].expand(t.shape),
    "cast": lambda o, c, t: o[0].to(t.dtype),
    PART: lambda o, c, t: o[0][c["index"]],
}
