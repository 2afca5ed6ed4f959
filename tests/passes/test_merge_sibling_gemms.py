from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.graph.capture import capture
from fuse.graph.freezing import freeze
from fuse.rewrite.pipeline import run_passes

PASSES = ["common_subexpressions", "merge_sibling_gemms"]


class Gates(nn.Module):
    """Products of one input with several weights, as in a gated cell written out."""

    def __init__(self, count: int = 4, bias: bool = True, size: int = 8) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(size, size + i, bias) for i in range(count))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [torch.tanh(gate(x)) for gate in self.gates]


class Loop(nn.Module):
    """Three gates on the state of each step: the same weights in every step."""

    def __init__(self, steps: int, size: int) -> None:
        super().__init__()
        self.steps = steps
        self.gates = nn.ModuleList(nn.Linear(size, size) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(self.steps):
            reset, update, new = (gate(h) for gate in self.gates)
            h = torch.sigmoid(reset) * h + torch.sigmoid(update) * torch.tanh(new)
        return h


class Heads(nn.Module):
    """Queries, keys and values, each split into heads by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (torch.relu(linear(x).view(2, 3, 2, 4).transpose(1, 2)) for linear in self.projections)
        return query * key + value


class BatchedProducts(nn.Module):
    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.exp(torch.bmm(x, a)) + torch.bmm(x, b) + torch.bmm(x, c)


class Matrices(nn.Module):
    """Weights as arguments, stored as they are multiplied."""

    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.cat([(x @ a) * 2, (x @ b) * 2, (x @ c) * 2], 1)


class ReturnedProducts(nn.Module):
    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x @ a, x @ b, x @ c


class OneNeedsTheOther(nn.Module):
    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.tanh(x @ torch.tanh(x @ torch.tanh(x @ a))) + b + c


class DifferentLeftOperand(nn.Module):
    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.exp(x @ a) + torch.exp((x + 1) @ b) + torch.exp((x + 2) @ c)


class MutatedBetween(nn.Module):
    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        first = torch.exp(x @ a)
        second = torch.exp(x.mul_(2) @ b)
        return first + second + torch.exp(x.mul_(2) @ c)


class DifferentAlpha(nn.Module):
    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        bias = x.sum(0)
        return sum(torch.exp(torch.addmm(bias, x, w, alpha=i + 1.0)) for i, w in enumerate((a, b, c)))


class BiasDiffersByRow(nn.Module):
    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return sum(torch.exp(torch.addmm(x, x, w)) for w in (a, b, c))


class NoiseBetween(nn.Module):
    """Moving the third product's weight up would draw its random numbers earlier than eager does."""

    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.exp(x @ a) + torch.exp(x @ b) + torch.exp(x @ torch.rand_like(c))


def square(count: int = 4, size: int = 4) -> list[Tensor]:
    return [torch.randn(size, size) for _ in range(count)]


@pytest.mark.parametrize("bias", [True, False])
def test_gates_of_one_input_become_one_product(rewritten, bias):
    result = rewritten(Gates(bias=bias), torch.randn(4, 8), passes=PASSES, exact=False)
    assert result.fired == {"merge_sibling_gemms": 1}
    assert (result.count("addmm") + result.count("mm"), result.count("tanh")) == (1, 4)
    assert result.ledger.rewrites[0].launches_saved == (1 if bias else 2), "three products, less the joining"


def test_weights_are_joined_once_for_all_steps_of_a_loop(rewritten):
    result = rewritten(Loop(steps=6, size=8), torch.randn(4, 8), passes=PASSES, exact=False)
    assert result.fired["merge_sibling_gemms"] == 6
    assert (result.count("addmm"), result.count("cat")) == (6, 2)


def test_results_that_are_viewed_are_not_copied_where_the_view_still_works(rewritten):
    result = rewritten(Heads(), torch.randn(6, 8), passes=PASSES, exact=False)
    assert (result.count("mm"), result.count("clone")) == (1, 0)


def test_batched_products_are_merged_too(rewritten):
    args = [torch.randn(2, 3, 3) for _ in range(4)]
    result = rewritten(BatchedProducts(), *args, passes=PASSES, exact=False)
    assert (result.count("bmm"), result.launches) == (1, 5)


def test_weights_given_as_arguments_are_joined_by_columns(rewritten):
    result = rewritten(Matrices(), *square(), passes=PASSES, exact=False)
    assert result.count("mm") == 1


@pytest.mark.parametrize("model", [OneNeedsTheOther, DifferentLeftOperand, MutatedBetween, DifferentAlpha])
def test_near_misses_stay(rewritten, model):
    assert "merge_sibling_gemms" not in rewritten(model(), *square(), passes=PASSES, exact=False).fired


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (BiasDiffersByRow, "a bias differs from row to row"),
        (NoiseBetween, "aten.rand_like.default would have to run earlier"),
        (ReturnedProducts, "joining the weights in every call costs more than the launches saved"),
    ],
)
def test_obstacles_are_named(rewritten, model, reason):
    result = rewritten(model(), *square(), passes=PASSES, exact=False)
    assert "merge_sibling_gemms" not in result.fired
    assert result.reasons[reason] == 1


def test_large_weights_are_not_joined_in_every_call(rewritten):
    result = rewritten(Gates(count=3, size=256), torch.randn(4, 256), passes=PASSES, exact=False)
    assert result.reasons == {"joining the weights in every call costs more than the launches saved": 1}


def test_two_products_save_nothing_when_their_weights_must_be_joined(rewritten):
    assert rewritten(Gates(count=2), torch.randn(4, 8), passes=PASSES, exact=False).fired == {}


@pytest.mark.parametrize("bias", [True, False])
def test_frozen_weights_are_joined_before_any_call(bias: bool) -> None:
    """Two products of large weights: nothing is left to join in a call."""
    model, x = Gates(count=2, bias=bias, size=256), torch.randn(4, 256)
    graph = capture(model, (x,))
    freeze(graph, model, {})
    ledger = run_passes(graph, passes=[*PASSES, "dead_code"])
    assert [(one.pass_name, one.count) for one in ledger.fired] == [("merge_sibling_gemms", 1)]
    operators = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert not any("cat" in name for name in operators)
    joined = [spec for spec in graph.meta["signature"].inputs if spec.name.startswith("_constant")]
    assert [tuple(spec.value.shape) for spec in joined] == [(513, 256), (513,)][: 1 + bias]
    fused = fuse.compile(model, freeze=True)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))


def test_frozen_products_whose_parts_are_results_stay() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.other(x)

    graph = capture(model := Two(), (torch.randn(4, 8),))
    freeze(graph, model, {})
    ledger = run_passes(graph, passes=PASSES)
    assert [one.reason for one in ledger.rejected] == ["the parts would have to be copied out of the joined product"]


def test_frozen_weights_of_equal_elements_are_joined() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
            for parameter in self.parameters():
                nn.init.zeros_(parameter)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.one(x + torch.zeros(8, 8)) + self.other(x + torch.zeros(8, 8)))

    model, x = Two(), torch.randn(8, 8)
    graph = capture(model, (x,))
    freeze(graph, model, {})
    ledger = run_passes(graph, passes=[*PASSES, "no_ops", "constant_folding"])
    assert not ledger.failed
    with torch.no_grad():
        torch.testing.assert_close(fuse.compile(model, freeze=True)(x), model(x))
