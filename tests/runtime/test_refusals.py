"""Calls that PyTorch's own tools watch run eager, so that the tools see the model's operators."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import fuse


class Root(nn.Module):
    """A loop whose gradient is NaN where ``x`` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x.sqrt() * 0
        for _ in range(6):
            y = torch.tanh(self.linear(y))
        return y


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("called_before", [False, True])
def test_a_trace_holds_the_operators_of_the_model(called_before: bool) -> None:
    model, x = Root().eval(), torch.rand(2, 3)
    fused = fuse.compile(model)
    with torch.no_grad():
        if called_before:
            fused(x)
        traced = torch.jit.trace(nn.Sequential(fused, nn.ReLU()), (x,))
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert kinds.count("aten::tanh") == 6
    for size in (2, 5):
        y = torch.rand(size, 3)
        torch.testing.assert_close(traced(y), model(y).relu())


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("called_before", [False, True])
def test_detected_anomalies_name_eagers_operator(called_before: bool) -> None:
    fused, x = fuse.compile(Root()), torch.zeros(2, 3, requires_grad=True)
    if called_before:
        fused(x).sum().backward()
    with torch.autograd.detect_anomaly():
        with pytest.warns(UserWarning, match="detect_anomaly is on"):
            result = fused(x)
        with pytest.raises(RuntimeError, match="SqrtBackward0"):
            result.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused(x).sum().backward()
    assert fused.last_run is not None
    assert (fused.last_run.launches, fused.last_run.fallbacks) == (1, ())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_inference_is_fused_while_anomalies_are_detected() -> None:
    fused, x = fuse.compile(Root()), torch.rand(2, 3)
    with torch.autograd.detect_anomaly(), torch.no_grad():
        fused(x)
    assert fused.last_run is not None
    assert fused.last_run.launches == 1
