"""Elementwise nests: where padding is read at the ends of the innermost loops, what is between them asks nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fuse
from fuse.graph.function import Function
from fuse.testing import assert_fuses

Lowered = Callable[..., Any]


def innermost(source: str, loop: str) -> str:
    """The body of the loop that begins so."""
    return source.split(loop, 1)[1].split("}", 1)[0]


def test_between_the_borders_nothing_is_asked(lowered: Lowered) -> None:
    source = lowered(lambda x: F.max_pool2d(x, 3, 1, 1) + 1, torch.randn(2, 20, 40)).kernel.source
    assert "?" not in innermost(source.split("i1 = 1; i1 < 19;", 1)[1], "i2 = 1; i2 < 39;")
    assert "i2 = 0; i2 < 1;" in source
    assert "i2 = 39; i2 < 40;" in source
    assert "i1 = 0; i1 < 1;" in source
    assert "i1 = 19; i1 < 20;" in source


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.pad(x, (20, 20)) * 2,  # borders that are as long as what is between them
        lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)) * 2,  # at the ends of the outermost of three loops
        lambda x: torch.roll(x, 1, -1) * 2,
    ],
)
def test_near_misses_have_one_loop(lowered: Lowered, function: Callable[[Tensor], Tensor]) -> None:
    source = lowered(function, torch.randn(2, 6, 20)).kernel.source
    assert source.count("for (int64_t i2 =") <= 2  # the pieces of a roll are two


def test_long_bodies_are_written_down_once(lowered: Lowered) -> None:
    def function(x: Tensor) -> Any:
        return sum(F.pad(x[:, :, 1:] * number, (1, 0)) for number in range(2, 90))

    assert lowered(function, torch.randn(2, 6, 20)).kernel.source.count(" add_88 = ") == 1


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_padding(data: st.DataObject) -> None:
    draw = data.draw
    taps, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, taps // 2))
    before, after = draw(st.integers(-2, 5)), draw(st.integers(-2, 5))
    rows = draw(st.integers(0, 2))
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.max_pool1d(x, taps, stride, padding, dilation),
        lambda x: F.avg_pool1d(x, taps, stride, padding),
        lambda x: F.pad(x, (before, after), value=3.0),
        lambda x: F.conv1d(x, x.new_ones(x.shape[1], 1, taps), padding=padding, dilation=dilation, groups=x.shape[1]),
        lambda x: F.pad(x, (0, 1, rows, 1)),
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: x.flip(-1),
    ]
    chosen = draw(st.lists(st.sampled_from(ways), min_size=1, max_size=3))

    def model(x: Tensor) -> Tensor:
        for way in chosen:
            x = way(x) * 0.5
        return x + 1

    x = torch.randn(2, 3, draw(st.sampled_from((40, 65, 130))))
    try:
        model(x)
    except RuntimeError:  # pools leave nothing of a short row
        assume(False)
    with torch.no_grad():
        assert_fuses(Function(model), x)


class Masked(torch.nn.Module):
    def forward(self, x: Tensor, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(rows[:, None], x, 0) + 1, torch.where(places, x, -x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_choice_for_a_whole_row_is_made_without_a_branch(dtype: torch.dtype) -> None:
    """Compilers make vectors of it then; a choice of every element for itself they take as it is."""
    x = (torch.randn(40, 64) * 9).to(dtype)
    if dtype.is_floating_point:
        x[::3, ::5], x[1::3, ::7] = torch.nan, -torch.inf
    args = x, torch.rand(40) > 0.5, torch.rand(40, 64) > 0.5
    fused = fuse.compile(Masked())
    for found, expected in zip(fused(*args), Masked()(*args), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert not fused.last_run.fallbacks
    assert fused.compiled is not None
    source = "".join(kernel.source for kernel in fused.compiled.program.kernels.values())
    assert source.count("fuse_chosen<") == dtype.is_floating_point


# ---- images that lie otherwise than what is made of them -------------------------------------------------------------


def clamped_twice(x: Tensor) -> Tensor:
    """With branches that depend on the data, where compilers make no vectors."""
    y = x.clone(memory_format=torch.contiguous_format)
    return torch.clamp(torch.clamp(y + 1, 0, 1) * 2, 0, 1) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("places", [(6, 16), (5, 40), (3, 128), (4, 64), (2, 16)])
def test_what_lies_apart_is_brought_side_by_side_in_blocks(dtype: torch.dtype, places: tuple[int, int]) -> None:
    x = torch.randn(2, 24, *places).to(dtype, memory_format=torch.channels_last)
    x[0, :3, 0, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    with torch.no_grad():
        assert_fuses(Function(clamped_twice), x, launches=1)


def test_a_block_of_the_innermost_loop_has_lines_of_its_own(lowered: Lowered) -> None:
    image = torch.randn(2, 24, 8, 32).to(memory_format=torch.channels_last)
    source = lowered(clamped_twice, image).kernel.source
    assert source.index("for (int64_t i2 =") < source.index("for (int64_t i1 =")  # the loop over channels is inside
    assert "_lines[32];" in source
    long = lowered(clamped_twice, torch.randn(2, 24, 2, 128).to(memory_format=torch.channels_last)).kernel.source
    assert "_lines[16];" in long


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.clone(memory_format=torch.contiguous_format), (2, 24, 8, 32)),  # nothing is computed
        (clamped_twice, (2, 24, 2, 70)),  # neither short nor whole blocks
        (lambda x: torch.clamp(torch.clamp(x + 1, 0, 1) * 2, 0, 1), (2, 24, 8, 32)),  # the result lies as the image
    ],
)
def test_near_misses_read_their_images_in_place(
    lowered: Lowered, function: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape).to(memory_format=torch.channels_last)
    assert "_lines[" not in lowered(function, x).kernel.source


def test_a_tensor_of_twenty_dimensions_has_a_kernel() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.tanh(x) + torch.softmax(x.permute(*reversed(range(x.dim()))), -1)

    x = torch.randn([1, 2] * 10)
    fused = fuse.compile(Function(function))
    torch.testing.assert_close(fused(x), function(x))
    assert not fused.last_run.aten
    assert not fused.last_run.fallbacks
