"""What is recommended meets the target, and none of it can be left out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import fuse
from fuse.check.inputs import CheckCall
from fuse.check.precision.errors import PrecisionTarget, errors
from fuse.check.precision.keep import recommend
from fuse.graph.precision import Precision, in_precision


class Sums(nn.Module):
    """Two hundred small steps, of which each is rounded; what else it does is harmless."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        step = torch.tanh(self.inner(x)) / 200
        for _ in range(200):
            x = x + step
        return torch.relu(x)


class Turns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * 1e4)


def test_the_sum_is_kept_and_nothing_that_is_not_needed() -> None:
    torch.manual_seed(0)
    model, x = Sums(), torch.randn(4, 8)
    target = PrecisionTarget("sqnr", 45.0)
    found = recommend(model, (x,), {}, "bf16", target)
    assert not target.met(found.before)
    assert found.precision is not None
    assert [site.rpartition(":")[2] for site in found.precision.keep] == ["add"]
    assert found.confirmed is not None
    assert target.met(found.confirmed)
    assert found.kept is not None
    assert math.isfinite(found.kept.milliseconds)
    exact = Sums().double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    for dropped in found.precision.keep:
        fewer = tuple(site for site in found.precision.keep if site != dropped)
        result = in_precision(model, Precision("bf16", fewer))(x)
        assert not target.met(errors(result, exact(x.double())))
    with torch.no_grad():
        assert target.met(errors(fuse.compile(model, precision=found.precision)(x), exact(x.double())))
    assert eval(found.code.removeprefix("fused = "), {"fuse": fuse, "model": model}) is not None


def test_what_float32_cannot_reach_either_is_said() -> None:
    found = recommend(Turns(), (torch.linspace(0.1, 1.0, 64),), {}, "bf16", PrecisionTarget("sqnr", 120.0))
    assert found.precision is None
    assert "with all" in found.reason


def test_the_model_is_left_alone() -> None:
    model = nn.BatchNorm1d(4)
    call = CheckCall(model, (torch.randn(8, 4),), {})
    recommend(model, call.args, {}, "bf16", PrecisionTarget("sqnr", 20.0))
    assert model.running_mean is not None
    assert not model.running_mean.any()
