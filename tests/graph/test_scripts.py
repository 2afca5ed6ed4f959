"""Submodules that are TorchScript are captured, unless their code changes what they hold."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.inner(x)))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return x * len(self.seen)


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_is_scripted_is_fused() -> None:
    report = check(Around(torch.jit.script(normed())).eval(), (torch.randn(6, 4),))
    assert report.problems == ()
    assert report.fallbacks == ()
    assert report.observed[1] < report.observed[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_of_scripted_weights_are_left_to_autograd(frozen: bool) -> None:
    model = Around(torch.jit.script(normed().requires_grad_(not frozen)))
    fused, x = fuse.compile(model), torch.randn(6, 4)
    found = []
    for one in (model, fused):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one(x).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(found[1], found[0])
    assert len(found[0]) == (2 if frozen else 6)
    assert fused.last_run is not None
    assert bool(fused.last_run.fallbacks) is not frozen


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_weights_of_a_traced_module_are_read_at_each_call() -> None:
    x = torch.randn(6, 4)
    model = Around(torch.jit.trace(normed().eval(), x)).eval()
    fused = fuse.compile(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fused(x), model(x))
            next(model.inner.parameters()).data.mul_(2)
    assert fused.last_run is not None
    assert fused.last_run.fallbacks == ()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("changing", [Counting, Growing])
def test_scripts_that_change_what_they_hold_run_eager(changing: type[nn.Module]) -> None:
    model = Around(torch.jit.script(changing()))
    eager = Around(torch.jit.script(changing()))
    eager.linear = model.linear
    fused = fuse.compile(model)
    x = torch.ones(2, 4)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=f"the TorchScript of {changing.__name__} changes attributes"):
            assert fused(x).equal(eager(x))
        assert fused(x).equal(eager(x))
