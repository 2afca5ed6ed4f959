"""The state of the random generator through a capture."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuse
from fuse.errors import CaptureError
from fuse.graph.backward.joint import capture_joint
from fuse.graph.capture import capture
from fuse.graph.function import Function


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def twice_the_same(a: Tensor) -> Tensor:
    state = torch.get_rng_state()
    one = torch.randn(4) + a
    torch.set_rng_state(state)
    return one * torch.randn(4) + torch.rand(4)


def test_numbers_drawn_again_from_a_state_put_back_are_the_same_numbers() -> None:
    fused = fuse.compile(Function(twice_the_same))
    for seed in (0, 1):
        torch.manual_seed(seed)
        mine, after = fused(torch.ones(4)), torch.rand(2)
        torch.manual_seed(seed)
        assert torch.equal(mine, twice_the_same(torch.ones(4)))
        assert torch.equal(after, torch.rand(2))
    assert fused.last_run.fallbacks == ()


def _forked(a: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return torch.randn(4) + a


def _other_numbers(a: Tensor) -> Tensor:
    state = torch.get_rng_state()
    one = torch.rand(4) + a
    torch.set_rng_state(state)
    return one + torch.randn(4)


def _other_chances(a: Tensor) -> Tensor:
    state = torch.get_rng_state()
    one = torch.bernoulli(a.sigmoid())
    torch.set_rng_state(state)
    return one + torch.bernoulli(a.cos().abs())


def _copied_state(a: Tensor) -> Tensor:
    state = torch.get_rng_state().clone()
    one = torch.rand(4) + a
    torch.set_rng_state(state)
    return one + torch.rand(4)


def _returned_state(a: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.get_rng_state()
    return torch.rand(4) + a, state


_FUNCTIONS = [_forked, _other_numbers, _other_chances, _copied_state, _returned_state]


@pytest.mark.parametrize("function", _FUNCTIONS)
def test_what_would_leave_the_generator_elsewhere_or_draw_otherwise_is_refused(
    function: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(CaptureError, match="random"):
        capture(Function(function), (torch.ones(4),))


class KeepsState(nn.Module):
    """As reversible layers do, to draw the same numbers again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = torch.get_rng_state()

    def forward(self, a: Tensor) -> Tensor:
        self.state = torch.get_rng_state()
        return torch.dropout(self.linear(a), 0.5, True)


@pytest.mark.filterwarnings("ignore:KeepsState runs eager. forward uses the state")
@pytest.mark.parametrize("train", [False, True])
def test_a_state_that_is_kept_is_that_of_the_call(train: bool) -> None:
    fused = fuse.compile(model := KeepsState())
    with torch.set_grad_enabled(train):
        for _ in range(3):
            before = torch.get_rng_state()
            fused(torch.ones(2, 4))
            assert torch.equal(model.state, before)


class Checkpointed(nn.Module):
    """Two blocks with dropout; the second is computed again in the backward pass."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.4), nn.Tanh())
        self.block = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 8), nn.Dropout(0.3))

    def forward(self, a: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, self.first(a), use_reentrant=self.reentrant)
        return result


def test_a_checkpointed_block_drops_the_same_places_when_it_is_computed_again() -> None:
    model = Checkpointed()
    eager = copy.deepcopy(model)
    fused = fuse.compile(model)
    for seed in (0, 1):
        for run in (fused, eager):
            torch.manual_seed(seed)
            run(torch.ones(4, 8)).square().sum().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert fused.last_run.fallbacks == ()
    assert fused.last_run.backward.fallbacks == ()
    backward = capture_joint(model, (torch.ones(4, 8),)).backward
    assert len(backward.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)) == 1  # again


def test_reentrant_checkpoints_run_eager() -> None:
    model = Checkpointed(reentrant=True)
    with pytest.warns(UserWarning, match="use_reentrant"):
        fuse.compile(model)(torch.ones(4, 8)).sum().backward()
    assert model.first[0].weight.grad is not None
