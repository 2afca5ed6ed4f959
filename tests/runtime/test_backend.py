"""``torch.compile(model, backend="fuse")``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fuse.runtime import backend


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    backend._warn_of_training.cache_clear()


def test_it_is_registered() -> None:
    assert "fuse" in torch._dynamo.list_backends()


def test_inference_is_fused_for_several_shapes() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    compiled = torch.compile(model, backend="fuse")
    with torch.no_grad():
        for rows in (4, 5, 6):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), model(x))


def test_graph_breaks_writes_and_views_are_right() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        torch._dynamo.graph_break()
        return x.view(-1)[:3], x * 2

    compiled = torch.compile(function, backend="fuse")
    x, y = torch.zeros(2, 2), torch.zeros(2, 2)
    part, double = compiled(x)
    torch.testing.assert_close((part, double), function(y))
    assert torch.equal(x, y)
    assert part.data_ptr() == x.data_ptr()


def test_training_runs_as_eager_with_one_warning() -> None:
    model = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="need gradients"):
        torch.compile(model, backend="fuse")(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 3))  # type: ignore[arg-type]
