"""Models that ask whether they are traced do what they do in eager mode."""

from __future__ import annotations

import threading

import pytest
import torch
import torch._subclasses.fake_tensor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fuse
from fuse.graph.capture import capture
from fuse.graph.fakes.hidden_fakes import fakes_hidden

REAL = torch._subclasses.FakeTensor
BY = {
    "the package": lambda x: isinstance(x, torch._subclasses.FakeTensor),
    "the module": lambda x: isinstance(x, torch._subclasses.fake_tensor.FakeTensor),
}


class Masks(nn.Module):
    """Leaves a mask of ones out, unless it may not look."""

    def __init__(self, is_traced) -> None:
        super().__init__()
        self.is_traced = is_traced

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(4) < 9
        if not self.is_traced(x) and mask.all():
            return x.tanh()
        return torch.where(mask, x.tanh(), 0)


@pytest.mark.parametrize("is_traced", BY.values(), ids=BY)
def test_a_model_that_asks_runs_as_in_eager_mode(is_traced) -> None:
    fused = fuse.compile(Masks(is_traced))
    with torch.no_grad():
        fused(torch.randn(4))
    assert fused.last_run.launches == 1
    assert fused.last_run.fallbacks == ()
    graph = capture(Masks(is_traced), (torch.randn(4),))
    assert torch.ops.aten.where.self not in {node.target for node in graph.graph.nodes}
    assert graph.meta["signature"].learning.learned == (), "what depends on no input is the same in every call"


def test_torch_and_other_threads_see_what_is_there() -> None:
    seen = []
    with fakes_hidden():
        assert torch._subclasses.FakeTensor is not REAL
        other = threading.Thread(target=lambda: seen.append(torch._subclasses.FakeTensor))
        other.start()
        other.join()
        with FakeTensorMode() as mode:
            assert type(torch.ones(2) + 1) is REAL
            assert mode.from_tensor(torch.nn.Parameter(torch.ones(1))).shape == (1,)
    assert seen == [REAL]
    assert torch._subclasses.FakeTensor is REAL
