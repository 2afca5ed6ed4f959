from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.testing import assert_fuses

X, Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.ones(3)


class Independent(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.tanh() * 2, y.exp() + 1


class DifferentShapes(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.softmax(-1), torch.cat([y, y * 2]), y.flip(0)


class BesideAProduct(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x @ x.t(), x.tanh(), y.tanh()


@pytest.mark.parametrize(("model", "launches"), [(Independent, 1), (DifferentShapes, 1), (BesideAProduct, 2)])
def test_kernels_that_wait_for_nothing_share_a_launch(model, launches):
    assert_fuses(model(), X, Y, launches=launches, fired={"fuse_horizontal": 1})


class FillForALibraryCall(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x.t() @ x.new_ones(4, 2)


class ReturnedFill(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros_like(x)
        return (zeros + x).tanh(), zeros


@pytest.mark.parametrize(("model", "launches"), [(FillForALibraryCall, 2), (ReturnedFill, 1)])
def test_a_fill_joins_the_first_kernels(model, launches):
    assert_fuses(model(), X, Y, launches=launches)


class OneAfterTheOther(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows = x.tanh() @ x.t()
        return rows.softmax(0).softmax(1), rows


class OnlyOne(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.tanh() * 2


@pytest.mark.parametrize("model", [OneAfterTheOther, OnlyOne])
def test_kernels_that_wait_for_one_another_stay(model):
    assert_fuses(model(), X, Y, fired={"fuse_horizontal": 0})


def test_large_kernels_stay_apart():
    large = torch.ones(1200, 1000)
    assert_fuses(Independent(), large, Y, launches=2, fired={"fuse_horizontal": 0})


def test_large_kernels_share_a_launch_where_sizes_vary() -> None:
    model, fused = Independent(), fuse.compile(Independent())
    for rows, launches in ((1200, 2), (1300, 1), (3, 1)):
        large = torch.randn(rows, 1000)
        torch.testing.assert_close(fused(large, Y), model(large, Y))
        assert fused.last_run.launches == launches


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x + i).tanh().exp() for i in range(self.count)]


class ManyNorms(Many):
    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x + i).softmax(-1) for i in range(self.count)]


@pytest.mark.parametrize(("model", "count", "launches"), [(Many, 32, 1), (Many, 33, 2), (ManyNorms, 96, 11)])
def test_many_kernels_share_several_launches(model, count, launches):
    assert_fuses(model(count), X, Y, launches=launches)
