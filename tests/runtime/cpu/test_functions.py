"""Which kernels of a program are compiled: one of those that compute the same, whatever the names in them; and how
they are shared out to compilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.kernel.kernel import Kernel
from fuse.runtime.cpu.functions import units_of

pytestmark = pytest.mark.usefixtures("empty_cache")


class Block(nn.Module):
    """A product of the library and a kernel behind it, whose parameters have other names in each block."""

    def __init__(self, eps: float = 1e-5, slope: float = 0.1, turned: bool = False) -> None:
        super().__init__()
        self.slope, self.linear, self.norm = slope, nn.Linear(24, 24), nn.LayerNorm(24, eps=eps)
        self.gain = nn.Parameter(torch.randn(24, 5).t() if turned else torch.randn(5, 24))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * self.gain
        return self.norm(torch.where(h > 0, h, self.slope * h) + x)


def compiled_for(sources: list[str], *blocks: nn.Module) -> int:
    """How many kernels the first call of these blocks compiles, whose result is eager's."""
    model, x = nn.Sequential(*blocks), torch.randn(5, 24)
    with torch.no_grad():
        fuse.compile(nn.Tanh())(torch.ones(3))  # what is compiled once on a machine
        sources.clear()
        fused = fuse.compile(model)
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert fused.last_run.kernels >= len(blocks)
    return sum(source.count('extern "C" int ') for source in sources)


def test_equal_blocks_are_compiled_once(compiled_sources: list[str]) -> None:
    torch.manual_seed(0)
    assert compiled_for(compiled_sources, *(Block() for _ in range(12))) == 1


@pytest.mark.parametrize(
    "other", [{"eps": 1e-3}, {"slope": 0.2}, {"slope": -0.1}, {"turned": True}], ids=["eps", "slope", "sign", "strides"]
)
def test_blocks_that_compute_otherwise_are_not(other: dict[str, Any], compiled_sources: list[str]) -> None:
    torch.manual_seed(0)
    assert compiled_for(compiled_sources, Block(), Block(**other), Block(), Block()) == 2


def kernels_of_lines(*lines: int, headers: tuple[str, ...] = ()) -> list[Kernel]:
    name = "_".join(("k", *headers))
    return [Kernel(f"{name}_{i}", "x\n" * n, frozenset(), False, headers=headers) for i, n in enumerate(lines)]


def test_the_unit_that_takes_longest_comes_first() -> None:
    short, product = kernels_of_lines(30, 40), kernels_of_lines(60, headers=("products.h", "tiles.h"))
    assert units_of([*short, *product]) == [product, short]  # the headers take longer than some lines
    long = kernels_of_lines(*[100] * 10)
    assert units_of([*product, *long]) == [long, product]


def test_many_kernels_are_shared_out_to_several_compilers() -> None:
    many = kernels_of_lines(*[100] * 30)
    assert units_of(many) == [many[:10], many[10:20], many[20:]]
    uneven = kernels_of_lines(30, 2500, 30, 40)
    assert units_of(uneven) == [uneven[1:2], uneven[2:], uneven[:1]]
    products = kernels_of_lines(*[100] * 30, headers=("products.h", "tiles.h"))
    assert units_of(products) == [products]  # each would compile the templates of its headers again
