from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.graph.capture import capture
from fuse.rewrite.pipeline import run_passes
from fuse.testing import assert_fuses

PASSES = ["dead_code", "view_chains", "constant_folding"]


class Positions(nn.Module):
    """The frequencies of a sinusoidal position encoding."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.exp(torch.arange(0, 8, 2) * (-math.log(10000.0) / 8))


class EqualElements(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.zeros(4) + 1) * 3


class Integers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + ((1 << 62) + torch.arange(4)) // 3


class ThroughViews(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(16.0).view(4, 4).t()[1:, 2]


class HalfPrecision(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.linspace(0, 1, 3, dtype=torch.bfloat16) * 3


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4) * 2


class ReturnedConstant(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, torch.arange(4) * 2


class ReturnedZeros(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, torch.zeros(4) * 2


class Expanded(nn.Module):
    """A grid from a constant map, as ``affine_grid`` makes it: some elements of the constant are one in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ (torch.tensor([[1.0, 0.5], [0.0, 2.0]]).expand(3, 2, 2).transpose(1, 2) * 2)


class TooLarge(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(1 << 18, dtype=torch.float64)[:4]


class HugeButUniform(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.zeros(1 << 20, 1 << 20).view(-1) + 1).mul(2)[:4]


class EachIsNeeded(nn.Module):
    """Equal elements that are not contiguous are no ``full``; the second is computed from the first."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.ones(2, 3).t().mul(3)
        return x + first - first.mul(3)


class SizeOnly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones_like(x)


class WrittenNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.copysign(x, torch.tensor([0.0, -0.0]) * 1)


def test_what_depends_on_no_input_becomes_a_constant(rewritten):
    result = rewritten(Positions(), torch.randn(4), passes=PASSES, exact=False)
    assert result.fired["constant_folding"] == 1
    assert result.launches == 1
    added = result.graph.meta["signature"].inputs[-1]
    exact = torch.exp(torch.arange(0, 8, 2).double() * torch.tensor(-math.log(10000.0) / 8).double())
    assert (added.kind, added.value.dtype) == ("constant", torch.float32)
    torch.testing.assert_close(added.value.double(), exact, rtol=2**-22, atol=0)


def test_placeholders_and_signature_stay_in_step(rewritten):
    graph = rewritten(Positions(), torch.randn(4), passes=PASSES, exact=False).graph
    assert len(graph.graph.find_nodes(op="placeholder")) == len(graph.meta["signature"].inputs)


def test_equal_elements_become_a_fill(rewritten):
    result = rewritten(EqualElements(), torch.randn(4), passes=PASSES)
    fill = next(node for node in result.graph.graph.nodes if "full" in str(node.target))
    assert (result.launches, fill.args) == (2, ([4], 3.0))


def test_each_of_a_chain_of_constants_may_be_needed(rewritten):
    result = rewritten(EachIsNeeded(), torch.randn(3, 2), passes=PASSES)
    assert (result.fired["constant_folding"], result.launches) == (2, 2)


def test_integers_stay_exact(rewritten):
    result = rewritten(Integers(), torch.zeros(4, dtype=torch.int64), passes=PASSES)
    assert result.launches == 1
    assert result.results[0].tolist() == [((1 << 62) + i) // 3 for i in range(4)]


@pytest.mark.parametrize(("model", "size"), [(ThroughViews, 3), (HalfPrecision, 3), (WrittenNumbers, 2)])
def test_folded_values_are_eagers(rewritten, model, size):
    result = rewritten(model(), torch.randn(size).to(torch.bfloat16), passes=PASSES)
    assert result.fired["constant_folding"] == 1
    assert result.launches == 1


def test_random_numbers_are_drawn_anew(rewritten):
    assert "constant_folding" not in rewritten(Noise(), torch.randn(4), passes=PASSES).fired


def test_a_constant_result_is_made_anew_in_each_call(rewritten):
    result = rewritten(ReturnedConstant(), torch.randn(4), passes=PASSES)
    assert "constant_folding" not in result.fired
    assert result.reasons["the constant would be a result, which is made anew in each call"] == 1


def test_a_uniform_result_is_filled_in_each_call(rewritten):
    result = rewritten(ReturnedZeros(), torch.randn(4), passes=PASSES)
    assert (result.launches, result.count("full")) == (2, 1)


def test_a_large_constant_is_computed_in_each_call(rewritten):
    result = rewritten(TooLarge(), torch.randn(4), passes=PASSES)
    assert result.reasons["the constant would be larger than 1 MiB and than its operands"] == 1


def test_a_huge_uniform_constant_is_folded_without_being_made():
    graph = capture(HugeButUniform(), (torch.randn(4),))
    assert [one.pass_name for one in run_passes(graph, passes=["constant_folding"]).rewrites] == ["constant_folding"]


def test_what_takes_an_inputs_size_is_left_to_others(rewritten):
    assert "constant_folding" not in rewritten(SizeOnly(), torch.randn(4), passes=PASSES).fired


def test_a_constant_whose_elements_are_one_in_memory_is_folded() -> None:
    assert_fuses(Expanded(), torch.randn(3, 4, 2))


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.full((3, 4), 1 + 2j).imag,
        lambda: torch.full((3, 4), 1 + 2j).conj().imag,
        lambda: torch.view_as_real(torch.full((3, 4), 1 + 2j)).sum(-1),
        lambda: torch.full((3, 4), 1.0).view(torch.int32).float(),
    ],
)
def test_views_that_read_other_elements_are_eagers(made):
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + made()

    fused = fuse.compile(Adds())
    with torch.no_grad():
        torch.testing.assert_close(fused(torch.ones(3, 4)), 1 + made())


def test_what_a_model_holds_without_having_registered_it_may_change() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.scales = torch.ones(4), [torch.ones(4) for _ in range(12)]
            self.cell = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = x
            for scale in self.scales:
                h = torch.tanh(self.cell(h) + x * scale)
            return x * (self.scale * 2 + 1), h

    model, x = Held(), torch.ones(3, 4)
    fused = fuse.compile(model)
    with torch.no_grad():
        for _ in range(2):
            for number, held in enumerate((model.scale, *model.scales)):
                held.add_(0.1 * number - 0.3)
            torch.testing.assert_close(fused(x), model(x))
