"""Equal steps of long loops are left out of the graph that is differentiated, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fuse
from fuse.errors import CaptureError
from fuse.gradients.differentiating import by_loops
from fuse.graph.backward.joint import capture_joint
from fuse.graph.backward.joint_graphs import Joint, Recorded
from fuse.graph.functional.short_graphs import is_short
from fuse.testing import assert_fuses

STEPS, BATCH, WIDTH = 40, 3, 6
Change = Callable[[Tensor], Tensor]


def unchanged(h: Tensor) -> Tensor:
    return h


def without_gradients(h: Tensor) -> Tensor:
    with torch.no_grad():
        return h * 1


def detached(h: Tensor) -> Tensor:
    return h.detach()


def detached_in_place(h: Tensor) -> Tensor:
    return h.detach_()


def detached_copy(h: Tensor) -> Tensor:
    return h.clone().detach_()


def written(h: Tensor) -> Tensor:
    return (h * 1).mul_(0.5)


class Halved(torch.autograd.Function):
    """The identity, with half of its gradient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


def half_of_the_gradient(h: Tensor) -> Tensor:
    return Halved.apply(h)


class Loop(nn.Module):
    """A cell over the time of ``x``, whose state is changed in step ``at``."""

    def __init__(self, cell: type[nn.Module], change: Change = unchanged, at: int = 34, *, fills: bool = False) -> None:
        super().__init__()
        self.cell, self.change, self.at, self.fills = cell(WIDTH, WIDTH), change, at, fills

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state: Any = None
        out, states = x.new_zeros(x.shape[1], x.shape[0], WIDTH), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            if t == self.at:
                state = pytree.tree_map(self.change, state)
            h = state if isinstance(state, Tensor) else state[0]
            if self.fills:
                out[t] = h
            states.append(h)
        return out if self.fills else torch.stack(states), h


CELLS = [nn.RNNCell, nn.GRUCell, nn.LSTMCell]


def made(*args: Any, **kwargs: Any) -> tuple[Loop, Tensor]:
    torch.manual_seed(0)
    return Loop(*args, **kwargs).double(), torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64, requires_grad=True)


def tangent(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), dtype=like.dtype).cos().view(like.shape)


def computed(joint: Joint, model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The gradients of all inputs by name, as the two graphs compute them."""
    signature = joint.forward.meta["signature"]
    state = dict(model.named_parameters())
    given = [x if s.kind == "argument" else state[s.name] if s.value is None else s.value for s in signature.inputs]
    with torch.no_grad():
        values = joint.forward(*given)
        assert joint.backward is not None
        specs = signature.outputs
        sources = {"saved": lambda i: values[i], "input": lambda i: given[i], "tangent": lambda i: tangents[i]}
        tangents = {i: tangent(values[specs[i].index]) for i in joint.requires_grad}
        found = joint.backward(*(sources[one.kind](one.index) for one in joint.given))
    return [None if at is None else found[at] for at in joint.gradients]


def of_eager(joint: Joint, model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The same, as eager computes them."""
    state = dict(model.named_parameters())
    inputs = [x if s.kind == "argument" else state.get(s.name) for s in joint.forward.meta["signature"].inputs]
    results = [one for one in model(x) if one.requires_grad]
    wanted = [one for one in inputs if one is not None and one.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, [tangent(one) for one in results], allow_unused=True))
    return [next(found) if one is not None and one.requires_grad else None for one in inputs]


def agree(model: Loop, x: Tensor) -> Joint:
    """The joint graph, short as long as loops may be rolled; its gradients are eager's."""
    joint = capture_joint(model, (x,), differentiate=by_loops(), shorten=True)
    for mine, theirs in zip(computed(joint, model, x), of_eager(joint, model, x), strict=True):
        if mine is None or theirs is None:
            assert mine is theirs or not (mine if theirs is None else theirs).any()  # type: ignore[union-attr]
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    return joint


@pytest.mark.sampled
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("fills", [False, True])
def test_equal_steps_are_differentiated_as_one(cell: type[nn.Module], fills: bool) -> None:
    model, x = made(cell, fills=fills)
    assert agree(model, x).rolled


@pytest.mark.sampled
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("fills", [False, True])
def test_what_is_differentiated_does_not_grow(cell: type[nn.Module], fills: bool) -> None:
    model, _ = made(cell, at=-1, fills=fills)
    seen = []

    def differentiate(recorded: Recorded) -> Joint | None:
        seen.append((is_short(recorded.forward), len(recorded.forward.graph.nodes)))
        return by_loops()(recorded)

    sizes = []
    for steps in (100, 300):
        x = torch.randn(2, steps, WIDTH, dtype=torch.float64)
        joint = capture_joint(model, (x,), differentiate=differentiate, shorten=True)
        assert joint.backward is not None
        sizes.append((len(joint.forward.graph.nodes), len(joint.backward.graph.nodes)))
    assert [short for short, _ in seen] == [True, True]
    assert seen[0] == seen[1]
    assert sizes[0] == sizes[1]


@pytest.mark.sampled
@pytest.mark.parametrize("at", [34, STEPS - 1])
@pytest.mark.parametrize("change", [without_gradients, detached, detached_copy, written, half_of_the_gradient])
def test_a_late_step_with_other_gradients_is_seen(change: Change, at: int) -> None:
    agree(*made(nn.RNNCell, change, at))


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell])
def test_a_state_detached_in_place_is_seen(cell: type[nn.Module]) -> None:
    agree(*made(cell, detached_in_place))


def test_the_whole_record_is_differentiated_where_steps_do_not_roll() -> None:
    model, x = made(nn.RNNCell)
    short = capture_joint(model, (x,), differentiate=lambda recorded: None, shorten=True)
    plainly = capture_joint(model, (x,))
    for one, other in ((short.forward, plainly.forward), (short.backward, plainly.backward)):
        assert one is not None
        assert other is not None
        assert [(n.target, n.meta["source"]) for n in one.graph.nodes if n.op == "call_function"] == [
            (n.target, n.meta["source"]) for n in other.graph.nodes if n.op == "call_function"
        ]


def hooked(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 2)
    return h


def retained(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.retain_grad()
    return h


@pytest.mark.parametrize("change", [hooked, retained])
def test_a_hook_on_a_late_state_is_refused(change: Change) -> None:
    model, x = made(nn.RNNCell, change)
    with pytest.raises(CaptureError, match="hook"):
        capture_joint(model, (x,), differentiate=by_loops(), shorten=True)


def test_a_trained_cell_launches_as_predicted() -> None:
    model = Loop(nn.GRUCell, at=-1)
    assert_fuses(model, torch.randn(BATCH, STEPS, WIDTH))
    plain = copy.deepcopy(model)
    fused = fuse.compile(model)
    counts = []
    for steps in (40, 90):
        x = torch.randn(BATCH, steps, WIDTH)
        for run in (fused, plain):
            out, h = run(x)
            (out.square().sum() + h.sum()).backward()
        counts.append((fused.last_run.launches, fused.last_run.backward.launches))
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    assert counts[0] == counts[1]
