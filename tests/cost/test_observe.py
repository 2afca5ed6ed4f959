"""Observed launches equal predicted ones, for models that really run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fuse.cost import profiles
from fuse.cost.count import count_dispatches
from fuse.cost.observe import CountingMode
from fuse.graph.signature import Dispatch


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dispatches: list[Dispatch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.dispatches.append(Dispatch(func, args, kwargs or {}, result, ""))
        return result


class LstmLoop(nn.Module):
    """A plain Python loop over time, as users write it."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.from_input, self.from_state = nn.Linear(size, 4 * size), nn.Linear(size, 4 * size)

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(x.shape[0], x.shape[2]), torch.zeros(x.shape[0], x.shape[2])
        outputs = []
        for t in range(x.shape[1]):
            i, f, g, o = (self.from_input(x[:, t]) + self.from_state(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, dim=1)


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "lstm_loop": (LstmLoop, torch.randn(2, 5, 8)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)),
    "convolutional": (convolutional, torch.randn(2, 3, 8, 8)),
    "gru_layer": (lambda: nn.GRU(8, 8, batch_first=True), torch.randn(2, 5, 8)),
    "lstm_layer": (lambda: nn.LSTM(8, 8, batch_first=True), torch.randn(2, 5, 8)),
}


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_observed_is_predicted(name: str, train: bool) -> None:
    make, x = MODELS[name]
    model = make().train(train)
    with torch.set_grad_enabled(train):
        with Recorder() as recorder:
            model(x)
        with CountingMode() as counting:
            model(x)
    predicted = count_dispatches(recorder.dispatches, profiles.get("cpu"))
    assert counting.launches == predicted.launches > 0
    assert dict(counting.by_kind) == dict(predicted.by_kind)
    assert not counting.unknown


def test_an_lstm_loop_is_three_launches_and_twelve_a_step() -> None:
    model, x = LstmLoop(), torch.randn(2, 64, 8)
    with torch.no_grad(), CountingMode() as counting:
        model(x)
    assert counting.launches == 3 + 12 * 64
    assert dict(counting.by_kind) == {"movement": 3, "gemm": 2 * 64, "pointwise": 10 * 64}


@pytest.mark.parametrize("name", ["lstm_loop", "transformer", "convolutional"])
def test_inference_mode_counts_as_no_grad_does(name: str) -> None:
    make, x = MODELS[name]
    model = make().eval()
    with torch.no_grad(), CountingMode() as expected:
        model(x)
    with torch.inference_mode(), CountingMode() as counting:
        model(x)
    assert counting.by_kind == expected.by_kind


def test_a_training_step_is_counted_backward_too() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4)
    with CountingMode() as counting:
        model(x).sum().backward()
    assert not counting.unknown
    assert counting.by_kind["gemm"] == 2 + 3  # no gradient of x is needed
