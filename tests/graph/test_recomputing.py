"""What the backward pass computes again instead of keeping it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuse.check.oracle import check
from fuse.graph.backward.joint import capture_joint
from fuse.graph.backward.joint_graphs import Joint
from fuse.graph.function import Function
from fuse.graph.outputs import outputs_of
from fuse.report.show import show


def joint_graphs(run: Callable[..., Tensor], *args: Tensor) -> Joint:
    joint = capture_joint(Function(run), args)
    assert joint.backward is not None
    return joint


def saved(joint: Joint) -> list[str]:
    """The operators whose results the backward half is given."""
    outputs = outputs_of(joint.forward.graph)
    return [outputs[one.index].target.__name__ for one in joint.given if one.kind == "saved"]


def inputs(count: int) -> list[Tensor]:
    return [torch.randn(5, 7, requires_grad=True) for _ in range(count)]


def gated(x: Tensor, h: Tensor) -> Tensor:
    z = torch.sigmoid(x)
    return (1 - z) * h.tanh() + z * x


def test_cheap_arithmetic_of_what_is_there_is_done_again():
    assert sorted(saved(joint_graphs(gated, *inputs(2)))) == ["sigmoid.default", "tanh.default"]
    report = show(Function(gated), tuple(inputs(2)), train=True)
    assert (report.after.launches, report.backward.after.launches) == (1, 1)
    checked = check(Function(gated), inputs(2), train=True)
    assert checked.passed, str(checked)


def test_a_chain_of_it_with_views_between():
    def run(x: Tensor, y: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        return ((1 - s).t() * 2 + 1).neg() * y.t().exp()

    assert sorted(saved(joint_graphs(run, *inputs(2)))) == ["exp.default", "sigmoid.default"]
    assert check(Function(run), inputs(2), train=True).passed


@pytest.mark.parametrize(
    ("run", "kept"),
    [
        (lambda x, y: torch.sigmoid(x).exp() * y, ["exp.default", "sigmoid.default"]),  # costly
        (lambda x, y: (1 - torch.sigmoid(x)) @ y.t(), ["rsub.Scalar", "sigmoid.default"]),  # a product reads it
        (lambda x, y: (x.exp().sum(0) + 1) * y, ["add.Tensor", "exp.default"]),  # of what is not there
        (lambda x, y: torch.dropout(x, 0.5, True) * y, ["div.Scalar", "mul.Tensor"]),  # drawn
    ],
    ids=["costly", "product", "not there", "random"],
)
def test_near_misses_are_kept(run: Callable[..., Tensor], kept: list[str]):
    torch.manual_seed(0)
    assert sorted(saved(joint_graphs(run, *inputs(2)))) == kept
    assert check(Function(run), inputs(2), train=True).passed
