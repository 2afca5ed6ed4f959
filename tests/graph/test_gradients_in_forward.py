"""Models that take gradients in ``forward``: forces, Hessians, inner optimisation; in training and in inference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils import _pytree as pytree

import fuse
from fuse.graph.state.freed_graphs import MESSAGE


class Energy(nn.Module):
    """An energy of positions (N, 3), and the force on each of them; ``sets``: forward sets requires_grad of them."""

    def __init__(self, sets: str = "nothing") -> None:
        super().__init__()
        self.sets = sets
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            if self.sets == "first":
                positions.requires_grad_()
            elif self.sets == "copy":
                positions = positions.detach().requires_grad_()
            start = positions * 2
            if self.sets == "later":
                positions.requires_grad = True
                start = start + positions
            energy = self.net(start).sum()
            (slope,) = torch.autograd.grad(energy, positions, create_graph=self.training)
        return energy, -slope


def positions(needs: bool) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_(needs)


@pytest.mark.filterwarnings("ignore:.*needs gradients")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("sets", ["nothing", "first", "copy"])
def test_forces_are_fused(sets: str, train: bool, grad: bool) -> None:
    model = Energy(sets).train(train)
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    for call in range(2):
        mine, its = positions(sets == "nothing"), positions(sets == "nothing")
        with torch.set_grad_enabled(grad):
            found, wanted = fused(mine), eager(its)
        assert mine.requires_grad == its.requires_grad
        for one, other in zip(found, wanted, strict=True):
            assert one.requires_grad == other.requires_grad, call
            torch.testing.assert_close(one, other)
        assert fused.last_run is not None
        if train and not grad:
            assert "needs gradients" in fused.last_run.fallbacks[0].reason
            continue
        assert not fused.last_run.fallbacks
        if train:
            for run, (energy, force) in ((model, found), (eager, wanted)):
                run.zero_grad()
                (energy + force.square().sum()).backward()
            for p, q in zip(model.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
        else:
            with pytest.raises(RuntimeError) as error:
                wanted[0].backward()
            assert str(error.value) == MESSAGE
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                found[0].backward()


@pytest.mark.filterwarnings("ignore:.*requires_grad")
def test_a_flag_that_is_set_after_the_first_use_stays_eagers() -> None:
    model = Energy("later").train()
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    for one, other in zip(fused(positions(False)), eager(positions(False)), strict=True):
        torch.testing.assert_close(one, other)
    assert fused.last_run is not None
    assert "sets requires_grad" in fused.last_run.fallbacks[0].reason


@pytest.mark.filterwarnings("ignore:.*frees the graph")
def test_a_result_of_which_a_part_is_freed_stays_eagers() -> None:
    class Half(Energy):
        def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            energy, force = super().forward(positions)
            return energy + positions.square().sum(), force

    fused, x = fuse.compile(Half().eval()), positions(True)
    energy, _ = fused(x)
    assert fused.last_run is not None
    assert "frees the graph" in fused.last_run.fallbacks[0].reason
    with pytest.raises(RuntimeError, match="a second time"):
        energy.backward()


class Inner(nn.Module):
    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.net, x)


def dual(net: nn.Module, x: Tensor) -> Tensor:
    with forward_mode.dual_level():
        found: Tensor = forward_mode.unpack_dual(net(forward_mode.make_dual(x, torch.ones_like(x)))).tangent
    return found


def adapted(net: nn.Module, x: Tensor) -> Tensor:
    """One step of Finn, Abbeel and Levine, "Model-Agnostic Meta-Learning", ICML 2017."""
    weights = dict(net.named_parameters())
    loss = functional_call(net, weights, (x,)).square().mean()
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
    found: Tensor = functional_call(net, moved, (x,))
    return found


def sampled(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    for _ in range(4):
        (slope,) = torch.autograd.grad(net(x).square().sum(), x)
        x = (x - 0.1 * slope).detach().requires_grad_()
    return x.detach()


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: jvp(net, (x,), (torch.ones_like(x),))[1],
        lambda net, x: vmap(jacfwd(net))(x),
        lambda net, x: vmap(jacrev(net))(x),
        lambda net, x: vmap(hessian(lambda r: net(r).sum()))(x),
        dual,
        adapted,
        sampled,
    ],
    ids=["jvp", "jacfwd", "jacrev", "hessian", "dual", "adapted", "sampled"],
)
def test_gradients_inside_of_forward_are_captured(run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = Inner(run).double()
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, wanted = fused(x), eager(x)
    torch.testing.assert_close(found, wanted)
    assert fused.last_run is not None
    assert not fused.last_run.fallbacks
    assert found.requires_grad == wanted.requires_grad
    if wanted.requires_grad:
        found.square().sum().backward()
        wanted.square().sum().backward()
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore:.*zero tensor")
def test_an_input_without_memory_runs_eager() -> None:
    fused = fuse.compile(nn.Tanh())
    torch.testing.assert_close(fused(torch._efficientzerotensor((4, 3))), torch.zeros(4, 3))
    torch.testing.assert_close(fused(torch.ones(4, 3)), torch.ones(4, 3).tanh())
    torch.testing.assert_close(fused(torch._efficientzerotensor((4, 3))), torch.zeros(4, 3))


class NewLeaf(nn.Module):
    """``way``: what is done with a new tensor that collects gradients."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.way = way

    def forward(self, x: Tensor) -> Any:
        new = torch.ones(4, requires_grad=True)
        if self.way == "used":
            return (self.linear(x) * new).tanh()
        return (x * new).tanh() if self.way == "alone" else (self.linear(x) * new, new)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("way", ["used", "alone", "returned"])
@pytest.mark.filterwarnings("ignore:NewLeaf runs eager")
def test_new_tensors_that_collect_gradients_leave_results_as_eager_does(way: str, grad: bool) -> None:
    model, x = NewLeaf(way), torch.randn(2, 4)
    fused = fuse.compile(copy.deepcopy(model))
    with torch.set_grad_enabled(grad):
        results = [pytree.tree_leaves(run(x)) for run in (model, fused)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
        assert (one.requires_grad, one.is_leaf) == (other.requires_grad, other.is_leaf)
        if one.requires_grad:
            other.sum().backward()
    if way == "used":
        assert fused.last_run.fallbacks == ()
