"""Calls that PyTorch's own tools watch run eager, so that the tools see the model's operators."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

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


class Doubled(TorchFunctionMode):
    """A mode in which ``tanh`` is something else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


ACTIVE = pytest.mark.filterwarnings("ignore:Root runs eager. a mode that has to see each operator is active")


@ACTIVE
@pytest.mark.parametrize("called_before", [0, 3])
@pytest.mark.parametrize("train", [False, True])
def test_flops_are_counted(called_before: int, train: bool) -> None:
    model, x, found = Root(), torch.rand(2, 3), []
    fused = fuse.compile(model)
    with torch.set_grad_enabled(train):
        for _ in range(called_before):
            fused(x)
        for one in (model, fused):
            with FlopCounterMode(display=False) as counting:
                result = one(x)
                if train:
                    result.sum().backward()
            found.append(counting.get_total_flops())
        assert found[0] == found[1] > 0
        fused(x)
    assert fused.last_run is not None
    assert fused.last_run.launches == 1


@ACTIVE
@pytest.mark.parametrize("called_before", [0, 3])
def test_a_mode_changes_what_it_changes_in_eager(called_before: int) -> None:
    model, x = Root(), torch.rand(2, 3)
    fused = fuse.compile(model)
    for _ in range(called_before):
        fused(x)
    with Doubled():
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)
    torch.testing.assert_close(fused(x), model(x))
    with Doubled():
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)


@ACTIVE
def test_a_graph_of_make_fx_holds_the_operators_of_the_model() -> None:
    model, x, y = Root().eval(), torch.rand(2, 3), torch.rand(2, 3)
    fused = fuse.compile(model)
    with torch.no_grad():
        fused(x)
        traced = make_fx(fused)(x)
        torch.testing.assert_close(traced(y), model(y))


@pytest.mark.filterwarnings("error")
def test_a_default_device_is_no_such_mode() -> None:
    fused, x = fuse.compile(Root()), torch.rand(2, 3)
    with torch.device("cpu"), torch.no_grad():
        fused(x)
    assert fused.last_run is not None
    assert fused.last_run.launches == 1


class Encoder(nn.Module):
    """The encoder calls its layers with nested tensors, where gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]).expand(x.shape[:2]) >= x.shape[1] - 2
        return self.head(self.encoder(x, src_key_padding_mask=padding))

    def encoded(self, x: Tensor) -> Tensor:
        return self.encoder(x)


@pytest.mark.filterwarnings("ignore:.*runs eager", "ignore:.*nested tensors")
@pytest.mark.parametrize("train", [False, True])
def test_parts_that_are_called_with_nested_tensors_run_eager(train: bool) -> None:
    model = Encoder().train(train)
    fused = fuse.compile(model)
    for shape in [(2, 9), (2, 9), (2, 9), (3, 13), (3, 13)]:
        x = torch.randn(*shape, 8)
        with torch.set_grad_enabled(train):
            torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*an input is a nested tensor", "ignore:.*nested tensors")
@pytest.mark.parametrize("sizes", [1, 12])
def test_a_nested_tensor_among_calls_of_any_sizes(sizes: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    fused = fuse.compile(model)
    with torch.no_grad():
        for rows in range(3, 3 + sizes):
            for _ in range(3):
                fused(torch.randn(rows, 8))
            nested = torch.nested.nested_tensor([torch.randn(n, 8) for n in (rows, 2)])
            for found, expected in zip(fused(nested).unbind(), model(nested).unbind(), strict=True):
                torch.testing.assert_close(found, expected)
            assert "nested" in fused.last_run.fallbacks[0].reason


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_a_method_that_is_called_with_a_nested_tensor() -> None:
    model = Encoder().eval()
    nested = torch.nested.nested_tensor([torch.randn(n, 8) for n in (4, 2)])
    with torch.no_grad():
        found, expected = fuse.compile(model).encoded(nested), model.encoded(nested)
    for one, other in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(one, other)
