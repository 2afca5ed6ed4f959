"""What a compiled call returns: eager's objects, views and aliases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse


class ViewsOfTheInput(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x) * 2
        return x[1], x.t(), x, y, y, y[1:], y[0]


@pytest.mark.parametrize("start", [0, 2])
def test_views_of_an_input_lie_where_eagers_do_wherever_the_input_lies(start: int) -> None:
    model = ViewsOfTheInput()
    fused = fuse.compile(model)
    x = torch.randn(6, 4)[start : start + 3]
    with torch.no_grad():
        fused(torch.randn(6, 4)[start : start + 3])
        expected, actual = model(x), fused(x)
    assert fused.last_run.fallbacks == ()
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.allclose(mine, theirs)
        assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride())
    for mine, theirs in zip(actual[:3], expected[:3], strict=True):
        assert mine.data_ptr() == theirs.data_ptr()
    assert actual[2] is x
    assert actual[3] is actual[4]
    assert actual[5].untyped_storage()._cdata == actual[3].untyped_storage()._cdata
    actual[3].zero_()
    assert not actual[5].any()


def test_a_graph_made_for_an_input_at_its_storages_start_serves_one_that_lies_later() -> None:
    model = ViewsOfTheInput()
    fused: Any = fuse.compile(model)
    with torch.no_grad():
        fused(torch.randn(3, 4))
        x = torch.randn(6, 4)[2:5]
        assert fused(x)[0].data_ptr() == x[1].data_ptr()
