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


class ReadsValues(nn.Module):
    """Results that are made once or several times, beside values that are read: one of them is returned, too."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, x: Tensor, told: Tensor) -> Any:
        y = torch.tanh(x) * float(told.numpy().sum())
        most = told.max()
        if most > 2:
            y = y + 1
        results = {"y": y, "again": y, "part": y[1:], "x": x, "told": told, "most": most, "number": most.item(), "n": 3}
        return (
            tuple(results[name] for name in self.returned.split()) if " " in self.returned else results[self.returned]
        )


@pytest.mark.parametrize(
    "returned", ["y", "told", "most", "number", "y again part x", "told y most", "most number y again", "n number"]
)
def test_results_beside_values_that_are_read(returned: str) -> None:
    model = ReadsValues(returned)
    fused = fuse.compile(model)
    for number in (1.0, 1.0, 1.5, 1.0, 1.5, 1.5):
        x, told = torch.randn(3, 4), torch.arange(4.0) * number
        with torch.no_grad():
            expected, actual = model(x, told), fused(x, told)
        assert not fused.last_run.fallbacks
        pairs = list(zip(expected, actual, strict=True)) if isinstance(expected, tuple) else [(expected, actual)]
        for theirs, mine in pairs:
            assert type(mine) is type(theirs)
            torch.testing.assert_close(mine, theirs)
            assert all((theirs is given) == (mine is given) for given in (x, told))
        if isinstance(expected, tuple):
            same = [[one is other for other in expected] for one in expected]
            assert [[one is other for other in actual] for one in actual] == same
