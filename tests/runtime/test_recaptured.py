"""Why a call was captured although others were: told by its run, and by the logger."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.runtime.variants import recaptured


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.shift = 1.0

    def forward(self, x: Tensor, state: tuple[Tensor, ...] = (), scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale + self.shift + sum(state)


def ready(*args: Any, **kwargs: Any) -> tuple[Scaled, fuse.FusedModule]:
    """A model that was called once."""
    model = Scaled().eval()
    fused = fuse.compile(model)
    with torch.no_grad():
        fused(*args, **kwargs)
        assert fused.last_run.recaptured == ""
    return model, fused


def strided() -> Tensor:
    return torch.ones(4, 3).t()


X = torch.ones(3, 4)
OTHERS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a shape": ((X, (torch.ones(1, 4),)), {}, "state[0] has shape [1, 4] instead of [3, 4]"),
    "two shapes": (
        (torch.ones(5, 4), (torch.ones(1, 4),)),
        {},
        "x has shape [5, 4] instead of [3, 4]; state[0] has shape [1, 4] instead of [3, 4]",
    ),
    "a dtype": ((X, (X.double(),)), {}, "state[0]: another dtype (expected Float, actual Double)"),
    "strides": ((strided(), (X,)), {}, "x: another stride (expected 4, actual 1)"),
    "gradients": ((X.clone().requires_grad_(), (X,)), {}, "x: another requires_grad (expected requires_grad=0)"),
    "a number": ((X, (X,)), {"scale": 2.0}, "its arguments have another structure"),
    "more tensors": ((X, (X, X)), {}, "its arguments have another structure"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_tells_how_it_differs_from_the_one_most_like_it(name: str) -> None:
    args, kwargs, expected = OTHERS[name]
    _, fused = ready(X.clone(), (X.clone(),))
    with torch.no_grad():
        fused(*args, **kwargs)
        assert fused.last_run.recaptured == expected
        fused(*args, **kwargs)
        assert fused.last_run.recaptured == ""


def test_plain_values_are_named() -> None:
    _, fused = ready(X, (X.clone(),), scale=2.0)
    with torch.no_grad():
        fused(X, (X.clone(),), scale=3.0)
    assert fused.last_run.recaptured == "scale is 3.0 instead of 2.0"


class Told:
    """An object of the user, which knows how often it was asked for its text."""

    __slots__ = ()
    asked = 0

    def __repr__(self) -> str:
        Told.asked += 1
        return "told"


def test_objects_are_not_asked_for_their_text() -> None:
    class Unasked(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.table: dict[Any, int] = {"a": 1}

        def forward(self, x: Tensor, scale: object) -> Tensor:  # type: ignore[override]  # another signature
            return self.layer(x) + len(self.table)

    model = Unasked().eval()
    fused = fuse.compile(model)
    with torch.no_grad():
        for scale in (Told(), Told()):
            fused(X, scale)
        assert fused.last_run.recaptured == "scale is another Told instead of another Told"
        model.table[Told()] = 2
        fused(X, scale)
        assert fused.last_run.recaptured == "table of the model changed"
    assert Told.asked == 0


def test_modes_are_named() -> None:
    _, fused = ready(X)
    fused(X)
    assert fused.last_run.recaptured == "torch.is_grad_enabled() is True instead of False"


def replaced(model: Scaled) -> None:
    model.layer.weight = nn.Parameter(torch.ones(4, 4))


def assigned(model: Scaled) -> None:
    model.shift = 2.0


def frozen(model: Scaled) -> None:
    model.layer.bias.requires_grad_(False)


CHANGES: dict[str, tuple[Callable[[Scaled], object], str]] = {
    "training": (lambda model: model.train(), "training of the model changed"),
    "an attribute": (assigned, "shift of the model changed"),
    "a parameter": (replaced, "weight of layer changed"),
    "a hook": (
        lambda model: model.layer.register_forward_hook(lambda *_: None),
        "hooks of the model changed",
    ),
    "a frozen parameter": (frozen, "layer.bias: another requires_grad (expected requires_grad=1)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_model_are_named(name: str) -> None:
    change, expected = CHANGES[name]
    model, fused = ready(X)
    change(model)
    with torch.no_grad():
        fused(X)
    assert fused.last_run.recaptured == expected


class Counts(Scaled):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # another signature
        steps = 0
        for _ in x:
            steps += 1
        return self.layer(x) / steps


def test_the_line_is_named_for_which_each_size_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    fused = fuse.compile(Counts().eval())
    with torch.no_grad(), caplog.at_level(logging.INFO, "fuse"):
        for length in (5, 7, 9, 11):
            fused(torch.ones(length, 4))
    line = Counts.forward.__code__.co_firstlineno
    expected = (
        "x has shape [11, 4] instead of [9, 4]; graphs of other sizes do not serve it: "
        f"forward at test_recaptured.py:{line} counts steps"
    )
    assert fused.last_run.recaptured == expected
    assert caplog.messages[-1] == f"Counts is captured again: {expected}"
    assert len(caplog.messages) == 3


class Reads(Scaled):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # another signature
        return self.layer(x) if x.sum() > 0 else -x


def test_a_value_that_is_read_is_named() -> None:
    fused = fuse.compile(Reads().eval())
    with torch.no_grad():
        fused(X)
        fused(-X)
        assert fused.last_run.recaptured.startswith("a value that forward reads at test_recaptured.py:")
        fused(X)
        assert fused.last_run.recaptured == ""


def test_calls_that_get_the_graph_of_others_are_not_captured() -> None:
    fused = fuse.compile(Scaled().eval())
    with torch.no_grad():
        for length in (5, 17, 11, 9, 12):
            fused(torch.ones(length, 4))
    assert fused.compiled.resized
    assert fused.last_run.recaptured == ""


def test_a_fault_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recaptured, "_of_call", None)
    _, fused = ready(X)
    with torch.no_grad():
        torch.testing.assert_close(fused(X[:2]), Scaled.forward(fused, X[:2]))
    assert fused.last_run.recaptured == ""
