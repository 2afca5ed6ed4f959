from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fuse.graph.capture import capture
from fuse.rewrite.pipeline import run_passes
from fuse.testing import assert_fuses


class Chain(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x * 2) + y


class ThroughViews(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = torch.sigmoid(x.t()).chunk(2, 0)
        return first * second.relu() + y[:2]


class SeveralResults(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        shared = x.exp()
        return shared, shared + y, shared[1:], (shared * y).t()


class CheapBroadcast(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y[0] * 2


class InputAsResult(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x.mul_(2)
        return x, x.tanh() * y, y


class MixedDtypes(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.half() * 3.3 + y.half()).float().where(x > 0.3, y.double().exp())


X, Y = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16.0).view(4, 4) / 8
ONE_LAUNCH = [Chain, SeveralResults, CheapBroadcast, MixedDtypes]


@pytest.mark.parametrize("model", ONE_LAUNCH)
def test_neighbours_become_one_launch(model):
    assert_fuses(model(), X, Y, launches=1)


@pytest.mark.parametrize("model", [ThroughViews, InputAsResult])
def test_views_and_written_inputs_stay_right(model):
    assert_fuses(model(), X, Y)


class CostlyBroadcast(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y[0].tanh()


class ProductBetween(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.tanh() @ y).tanh()


class RandomBetween(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.bernoulli(x.sigmoid()) * y


class NoElements(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x[:0].tanh() * 2 + y[:0]


@pytest.mark.parametrize("model", [ProductBetween, RandomBetween, NoElements])
def test_near_misses_stay(model):
    assert_fuses(model(), X, Y, fired={"fuse_pointwise": 0})


def test_a_costly_value_is_not_computed_again_where_it_is_broadcast():
    report = assert_fuses(CostlyBroadcast(), X, Y, launches=2, rejected={"fuse_pointwise": 1})
    assert report.rejected[0].reason == "a costly value would be computed again for every element it is broadcast to"


class LongChain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for step in range(1500):
            x = x * (1 - step / 4000) if step % 3 else x + step / 1000  # no two steps alike: nothing rolls
        return x


def test_fifteen_hundred_operators_are_one_launch():
    assert_fuses(LongChain(), torch.ones(3), launches=1, fired={"fuse_pointwise": 1})


class Wide(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [((x + k) * 2).tanh() for k in range(1000)]


def test_thousands_of_operators_take_seconds():
    graph = capture(Wide(), (torch.ones(3),))
    ledger = run_passes(graph, passes=["fuse_pointwise"])
    assert len(ledger.rewrites) == 1000
    assert sum(ledger.seconds.values()) < 10


SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3)
UNARY = (
    torch.tanh,
    torch.relu,
    torch.neg,
    lambda t: t * 2,
    lambda t: t.to(torch.float64),
    lambda t: t.mT if t.dim() > 1 else t,
)


class Drawn(nn.Module):
    def __init__(self, steps: list[int]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for step in self.steps:
            x = UNARY[step](x)
        return x + y.to(x.dtype).sum() if x.shape != y.shape else x * y


@given(
    shape=SHAPES,
    steps=st.lists(st.integers(0, len(UNARY) - 1), min_size=2, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    gaps=st.booleans(),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_any_shape_layout_and_dtype_is_right(shape, steps, dtype, gaps):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn([*shape, 2], generator=generator).to(dtype) for _ in range(2))
    assert_fuses(Drawn(steps), x[..., 0] if gaps else x[..., 0].contiguous(), y[..., 1])


def test_an_operator_takes_in_the_number_that_it_reads() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.where(mask, torch.zeros(()), x)

    assert_fuses(Masked(), torch.randn(3, 28), torch.rand(3, 28) > 0.5, launches=1)


def test_any_byte_but_zero_is_true() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            kept = mask.logical_and(x > 0).logical_or(x > 1)
            return torch.where(mask, x * 2, x), kept

    mask = torch.randint(0, 256, (3, 77), dtype=torch.uint8).view(torch.bool)
    assert_fuses(Masked(), torch.randn(3, 77), mask, launches=1)
