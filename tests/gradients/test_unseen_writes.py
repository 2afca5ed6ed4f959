"""Writes that autograd does not see leave the gradient as it was, and loops with them are differentiated rolled."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.graph.backward.joint import capture_joint
from fuse.graph.backward.unseen_writes import WITH_GRADIENT_OF

STEPS, BATCH, WIDTH = 9, 3, 5


def addressed_by_content(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(x + F.cosine_similarity(h.unsqueeze(1), w.unsqueeze(0), dim=-1))


def clamped(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    h = x + h @ w
    with torch.no_grad():
        h.clamp_(-0.1, 0.1)
    return h * 0.9


def clamped_beside_the_same_with_gradients(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    h = x + h @ w
    other = h.clone().clamp(-0.1, 0.1)
    with torch.no_grad():
        h.clamp_(-0.1, 0.1)
    return h * 0.5 + other * 0.4


def overwritten(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    made = x + h @ w
    with torch.no_grad():
        made.copy_(h)
    return made * 0.9


def columns_written(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    h = x + h @ w
    column = h[:, 1:3]
    with torch.no_grad():
        column.mul_(2.0)
    return torch.sin(h)


class Model(nn.Module):
    def __init__(self, step: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, xs: Tensor) -> Tensor:
        h = xs[0] * 0.5
        kept = []
        for x in xs:
            h = self.step(self.weight, x, h)
            kept.append(h)
        return torch.stack(kept)


def gradients(model: nn.Module, call: Callable[..., Tensor], xs: Tensor) -> list[Tensor | None]:
    xs = xs.clone().requires_grad_()
    model.zero_grad()
    result = call(xs)
    (result * torch.arange(result.numel()).cos().view(result.shape)).sum().backward()
    return [xs.grad, *(p.grad for p in model.parameters())]


STEP_FUNCTIONS = [
    addressed_by_content,
    clamped,
    clamped_beside_the_same_with_gradients,
    overwritten,
    columns_written,
]


@pytest.mark.sampled
@pytest.mark.parametrize("step", STEP_FUNCTIONS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("steps", [STEPS, 2, 50])
def test_a_write_that_autograd_does_not_see_keeps_the_gradient(step: Callable[..., Tensor], steps: int) -> None:
    torch.manual_seed(0)
    model = Model(step)
    fused, xs = fuse.compile(copy.deepcopy(model)), torch.randn(steps, BATCH, WIDTH)
    for _ in range(2):
        found, expected = gradients(fused, fused, xs), gradients(model, model, xs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    run = fused.last_run
    assert not run.fallbacks
    assert not run.backward.fallbacks
    if steps > 4:
        assert run.backward.launches < steps


def test_a_record_of_single_operators_has_no_operator_for_it() -> None:
    joint = capture_joint(Model(clamped), (torch.randn(2, BATCH, WIDTH),))
    for graph in (joint.forward, joint.backward):
        assert not graph.graph.find_nodes(op="call_function", target=WITH_GRADIENT_OF)


def of_a_saved_value(w: Tensor, x: Tensor, h: Tensor) -> Tensor:
    made = torch.exp(x + h @ w)
    with torch.no_grad():
        made.clamp_(max=0.1)
    return made


def test_a_saved_value_that_is_overwritten_raises_as_in_eager() -> None:
    model = Model(of_a_saved_value)
    fused, xs = fuse.compile(copy.deepcopy(model)), torch.randn(STEPS, BATCH, WIDTH)
    for one in (model, fused):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            one(xs).sum().backward()
