"""Loops and branches of ``torch._higher_order_ops``: captured, and eager unharmed by it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop

import fuse
from tests.samples import newer_torch

WIDTH = 8


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.cell = nn.Linear(WIDTH, WIDTH)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def looped(model: Calls, x: Tensor, n: Tensor) -> Any:
    def body(step: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return step + 1, torch.tanh(model.cell(h))

    return while_loop(lambda step, h: step < n, body, (torch.zeros((), dtype=torch.long), x))


def nested(model: Calls, x: Tensor, n: Tensor) -> Any:
    def body(step: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return step + 1, {"h": torch.tanh(model.cell(state["h"])), "c": state["c"] + 1}

    carried = (torch.zeros((), dtype=torch.long), {"h": x, "c": torch.zeros(2)})
    return while_loop(lambda step, state: step < n, body, carried)


def scanned(model: Calls, x: Tensor, n: Tensor) -> Any:
    def step(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(model.cell(h) + y)
        return h, h.clone()

    return scan(step, x, torch.linspace(0, 1, 12 * WIDTH).view(6, 2, WIDTH) * n)


def scanned_backwards(model: Calls, x: Tensor, n: Tensor) -> Any:
    def step(state: dict[str, Tensor], y: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        h = torch.tanh(model.cell(state["h"]) + y)
        return {"h": h, "sum": state["sum"] + h}, [h.clone(), h * 2]

    xs = torch.linspace(0, 1, 12 * WIDTH).view(2, 6, WIDTH) * n
    return scan(step, {"h": x, "sum": torch.zeros_like(x)}, xs, dim=1, reverse=True)


def added(model: Calls, x: Tensor, n: Tensor) -> Any:
    return associative_scan(lambda a, b: a + b, torch.tanh(model.cell(x)) * n, dim=1, combine_mode="generic")


def branched(model: Calls, x: Tensor, n: Tensor) -> Any:
    return torch.cond(n > 3, lambda x: torch.tanh(model.cell(x)), lambda x: x.cos(), (x,))


@newer_torch  # older ones compile these functions themselves, which is not followed
@pytest.mark.parametrize("function", [looped, nested, scanned, scanned_backwards, added, branched])
def test_control_flow_is_captured_and_right(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Calls(function).eval()
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (5, 0, 6, 5, 8, 4):
            args = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH), torch.tensor(n)
            found, expected = fused(*args), eager(*args)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            leaves = [torch.utils._pytree.tree_leaves(one) for one in (found, expected)]
            assert [t.stride() for t in leaves[0]] == [t.stride() for t in leaves[1]]
            assert fused.last_run.fallbacks == ()
            assert fused.last_run.launches <= (4 if function in (looped, nested, scanned, scanned_backwards) else 6)


@newer_torch
def test_a_scan_trains() -> None:
    torch.manual_seed(0)
    model = Calls(scanned)
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    args = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH), torch.tensor(2)
    for one in (eager, fused):
        last, kept = one(*args)
        (last.sum() + kept.square().sum()).backward()
    assert fused.last_run.fallbacks == ()
    for expected, found in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_what_is_not_known_runs_eager_and_eager_goes_on_to_work() -> None:
    from torch._higher_order_ops.map import map as mapped

    model = Calls(lambda model, x: mapped(lambda one: torch.tanh(model.cell(one)), x)).eval()
    fused, x = fuse.compile(model), torch.randn(3, WIDTH)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="test_control_flow"):
            found = fused(x)
        torch.testing.assert_close(found, model(x))
        torch.testing.assert_close(fused(x), model(x))
