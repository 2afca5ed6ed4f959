"""Models that take gradients in ``forward``: energies and forces, in training and in inference."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.graph.freed_graphs import MESSAGE


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
