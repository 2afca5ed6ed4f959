"""oneDNN's products and convolutions with what follows them: which regions they compute, and that it is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fuse
from fuse.runtime import tuning
from fuse.runtime.cpu.onednn import LibraryCall, call_of
from fuse.testing import assert_fuses

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")

Function = Callable[..., Any]
aten = torch.ops.aten


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


ROWS, WEIGHT, BIAS, OTHER = numbers(9, 20), numbers(7, 20).t(), numbers(7), numbers(9, 7)
IMAGE, FILTER, OTHER_IMAGE = numbers(2, 4, 6, 5), numbers(8, 4, 3, 3), numbers(2, 8, 6, 5)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return aten.addmm.default(b, x, w)


def convolution(x: Tensor, w: Tensor, b: Tensor | None = None, groups: int = 1) -> Tensor:
    return aten.convolution.default(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)


def region_of(function: Function, *args: Any) -> GraphModule:
    """The function as a region."""

    def results_of(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = function(*inputs)
        return results if isinstance(results, tuple) else (results,)

    graph: GraphModule = make_fx(results_of, tracing_mode="fake")(*args)
    return graph


OFFERED: dict[str, tuple[str, Function, tuple[Tensor, ...]]] = {
    "a linear layer": ("onednn", linear, (ROWS, WEIGHT, BIAS)),
    "a product": ("onednn", lambda x, w: x @ w, (ROWS, WEIGHT)),
    "a product with a matrix as it lies": ("onednn", lambda x, w: x @ w, (ROWS, numbers(20, 7))),
    "gelu": ("onednn gelu", lambda *a: F.gelu(linear(*a)), (ROWS, WEIGHT, BIAS)),
    "gelu by tanh": ("onednn gelu", lambda *a: F.gelu(linear(*a), approximate="tanh"), (ROWS, WEIGHT, BIAS)),
    "tanh": ("onednn tanh", lambda *a: linear(*a).tanh(), (ROWS, WEIGHT, BIAS)),
    "sigmoid": ("onednn sigmoid", lambda *a: linear(*a).sigmoid(), (ROWS, WEIGHT, BIAS)),
    "silu": ("onednn swish", lambda *a: F.silu(linear(*a)), (ROWS, WEIGHT, BIAS)),
    "hardswish": ("onednn hardswish", lambda *a: F.hardswish(linear(*a)), (ROWS, WEIGHT, BIAS)),
    "leaky_relu": ("onednn leaky_relu", lambda *a: F.leaky_relu(linear(*a), 0.2), (ROWS, WEIGHT, BIAS)),
    "its usual slope": ("onednn leaky_relu", lambda *a: F.leaky_relu(linear(*a)), (ROWS, WEIGHT, BIAS)),
    "a sum": ("onednn add", lambda x, w, b, r: linear(x, w, b) + r, (ROWS, WEIGHT, BIAS, OTHER)),
    "a sum the other way": ("onednn add", lambda x, w, r: r + x @ w, (ROWS, WEIGHT, OTHER)),
    "another shape": ("onednn gelu", lambda *a: F.gelu(linear(*a).view(3, 3, 7)), (ROWS, WEIGHT, BIAS)),
    "a sum of another shape": (
        "onednn add",
        lambda x, w, r: (x @ w).view(3, 3, 7) + r,
        (ROWS, WEIGHT, numbers(3, 3, 7)),
    ),
    "convolution, silu": ("onednn swish", lambda *a: F.silu(convolution(*a)), (IMAGE, FILTER, numbers(8))),
    "convolution in groups": (
        "onednn tanh",
        lambda x, w: convolution(x, w, None, 2).tanh(),
        (IMAGE, numbers(8, 2, 3, 3)),
    ),
    "convolution, sum": ("onednn add", lambda x, w, r: convolution(x, w) + r, (IMAGE, FILTER, OTHER_IMAGE)),
}


@pytest.mark.parametrize("case", OFFERED)
def test_what_onednn_offers_is_what_the_region_computes(case: str) -> None:
    name, function, args = OFFERED[case]
    region = region_of(function, *args)
    call = call_of(region)
    assert call is not None
    assert call.name == name
    (result,) = call(*args)
    (promised,) = region.graph.output_node().args[0]
    expected = promised.meta["val"]
    assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
    exact = function(*(a.double() for a in args))
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", OFFERED)
def test_what_is_no_number_stays_none(case: str) -> None:
    _, function, args = OFFERED[case]
    region = region_of(function, *args)
    call, spoilt = call_of(region), [args[0].clone(), *args[1:]]
    spoilt[0][0] = torch.nan
    assert call is not None
    (result,) = call(*spoilt)
    assert torch.equal(result.isnan(), function(*spoilt).isnan())


NEAR_MISSES: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "relu makes 0 of what is no number": (lambda *a: linear(*a).relu(), (ROWS, WEIGHT, BIAS)),
    "hardtanh, too": (lambda *a: F.hardtanh(linear(*a)), (ROWS, WEIGHT, BIAS)),
    "leaky_relu of slope 0 is relu": (lambda *a: F.leaky_relu(linear(*a), 0.0), (ROWS, WEIGHT, BIAS)),
    "the product has another user": (lambda *a: (linear(*a), F.gelu(linear(*a))), (ROWS, WEIGHT, BIAS)),
    "the product is a result": (lambda x, w: (lambda y: (y, y.tanh()))(x @ w), (ROWS, numbers(20, 7))),
    "two operators follow": (lambda *a: linear(*a).tanh().sigmoid(), (ROWS, WEIGHT, BIAS)),
    "a sum, then an activation": (lambda x, w, r: (x @ w + r).tanh(), (ROWS, WEIGHT, OTHER)),
    "what is added is broadcast": (lambda x, w, r: x @ w + r, (ROWS, WEIGHT, numbers(9, 1))),
    "what is added has a factor": (lambda x, w, r: torch.add(x @ w, r, alpha=2), (ROWS, WEIGHT, OTHER)),
    "what is added lies in another order": (lambda x, w, r: x @ w + r, (ROWS, WEIGHT, numbers(7, 9).t())),
    "a number is added": (lambda x, w: x @ w + 1, (ROWS, WEIGHT)),
    "it is added to itself": (lambda x, w: (lambda y: y + y)(x @ w), (ROWS, WEIGHT)),
    "the bias is a matrix": (linear, (ROWS, WEIGHT, OTHER)),
    "the bias has gaps": (linear, (ROWS, WEIGHT, numbers(14)[::2])),
    "the product has a factor": (lambda x, w, b: aten.addmm.default(b, x, w, alpha=2), (ROWS, WEIGHT, BIAS)),
    "the bias has a factor": (lambda x, w, b: aten.addmm.default(b, x, w, beta=0), (ROWS, WEIGHT, BIAS)),
    "rows have gaps": (linear, (numbers(9, 40)[:, ::2], WEIGHT, BIAS)),
    "rows lie in columns": (lambda x, w: x @ w, (numbers(20, 9).t(), numbers(20, 7))),
    "the matrix has gaps": (lambda x, w: x @ w, (ROWS, numbers(20, 14)[:, ::2])),
    "double": (linear, (ROWS.double(), WEIGHT.double(), BIAS.double())),
    "bfloat16": (linear, (ROWS.bfloat16(), WEIGHT.bfloat16(), BIAS.bfloat16())),
    "no rows": (linear, (ROWS[:0], WEIGHT, BIAS)),
    "a batch of products": (lambda x, w: torch.bmm(x, w), (numbers(2, 9, 20), numbers(2, 20, 7))),
    "a convolution on its own": (convolution, (IMAGE, FILTER)),
    "a convolution of channels that lie together": (
        lambda *a: F.silu(convolution(*a)),
        (IMAGE.to(memory_format=torch.channels_last), FILTER),
    ),
    "a convolution of one dimension": (
        lambda x, w: aten.convolution.default(x, w, None, [1], [1], [1], False, [0], 1).tanh(),
        (numbers(2, 4, 9), numbers(8, 4, 3)),
    ),
    "a transposed convolution": (
        lambda x, w: aten.convolution.default(x, w, None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1).tanh(),
        (IMAGE, numbers(4, 8, 3, 3)),
    ),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_are_not_offered(case: str) -> None:
    function, args = NEAR_MISSES[case]
    assert call_of(region_of(function, *args)) is None


def test_nothing_is_offered_where_less_precision_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert call_of(region_of(linear, ROWS, WEIGHT, BIAS)) is None


# ---- in programs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def wins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """oneDNN is chosen wherever it is offered; the names of the calls."""
    taken: list[str] = []

    def fastest(subject: str, ways: Mapping[str, Callable[[], object]]) -> str:
        name = next((name for name in ways if name.startswith("onednn")), next(iter(ways)))
        ways[name]()
        taken.extend([name] if name.startswith("onednn") else [])
        return name

    monkeypatch.setenv("FUSE_TUNE", "1")
    monkeypatch.setattr(tuning, "fastest", fastest)
    return taken


class Layers(nn.Module):
    """A layer of each kind, and a function of them and the input."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(20, 20), nn.Linear(20, 20)
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.function = (function,)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function[0](self, *inputs)


def changed_between(m: Any, x: Tensor) -> Tensor:
    y = F.gelu(m.linear(x))
    x.add_(1)
    return y + F.gelu(m.linear(x))


PROGRAMS: dict[str, tuple[Function, tuple[int, ...], int, list[str]]] = {
    "on its own": (lambda m, x: m.linear(x), (9, 20), 1, ["onednn"]),
    "an operator behind it": (lambda m, x: F.gelu(m.linear(x)), (3, 3, 20), 1, ["onednn gelu"]),
    "one after another": (
        lambda m, x: m.more(torch.sigmoid(m.linear(x))),
        (9, 20),
        2,
        ["onednn sigmoid", "onednn"],
    ),
    "its input is added": (lambda m, x: m.linear(x) + x, (9, 20), 1, ["onednn add"]),
    "an image": (lambda m, x: F.silu(m.conv(x)), (2, 4, 6, 5), 1, ["onednn swish"]),
    "beside another": (
        lambda m, x: (F.gelu(m.linear(x)), m.more(x).tanh()),
        (9, 20),
        2,
        ["onednn gelu", "onednn tanh"],
    ),
    "a view of it is returned": (lambda m, x: F.gelu(m.linear(x)).t(), (9, 20), 1, ["onednn gelu"]),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_the_launches_are_those_of_kernels(case: str, wins: list[str]) -> None:
    function, shape, launches, names = PROGRAMS[case]
    with torch.no_grad():
        assert_fuses(Layers(function).eval(), numbers(*shape), launches=launches)
    assert wins[: len(names)] == names


def test_the_input_may_change_between(wins: list[str]) -> None:
    model = Layers(changed_between).eval()
    fused = fuse.compile(model)
    with torch.no_grad():
        mine, theirs = numbers(9, 20), numbers(9, 20)
        torch.testing.assert_close(fused(mine), model(theirs))
    torch.testing.assert_close(mine, theirs)
    assert wins


def test_weights_are_read_in_each_call(wins: list[str]) -> None:
    model = Layers(lambda m, x: F.gelu(m.linear(x))).eval()
    fused, x = fuse.compile(model), numbers(9, 20)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fused(x), model(x))
            model.linear.weight.mul_(-2)
    assert wins
    assert fused.last_run.kernels == 0


def test_gradients_are_those_of_eager(wins: list[str]) -> None:
    model = Layers(lambda m, x: torch.tanh(m.linear(x)).sum())
    fused, x = fuse.compile(model), numbers(9, 20)
    fused(x).backward()
    mine = [p.grad for p in model.linear.parameters()]
    model.zero_grad()
    model(x).backward()
    for gradient, parameter in zip(mine, model.linear.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    assert wins


def test_a_detached_result_needs_no_gradient(wins: list[str]) -> None:
    model = Layers(lambda m, x: F.gelu(m.linear(x)).detach())
    result = fuse.compile(model)(numbers(9, 20))
    assert not result.requires_grad
    assert wins


def test_a_call_has_a_name_for_errors() -> None:
    assert str(LibraryCall("onednn gelu", lambda x: (x,))) == "onednn gelu"
