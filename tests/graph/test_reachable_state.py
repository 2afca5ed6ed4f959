"""Code that changes something outside of the model is left to eager, and what capture changed there is put back."""

from __future__ import annotations

import array
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.errors import CaptureError
from fuse.graph.capture import capture
from fuse.graph.state.reachable_state import reached_by

SEEN: list[Tensor] = []
TABLE = {"scale": 2.0}
CALLS = 0
KEPT: ContextVar[list[Tensor]] = ContextVar("KEPT")
CALL: ContextVar[int] = ContextVar("CALL", default=0)
SCALE: ContextVar[float] = ContextVar("SCALE", default=2.0)


class Extractor:
    """Keeps what passes through a layer, as feature extractors do."""

    def __init__(self) -> None:
        self.features: dict[str, Tensor] = {}

    def keep(self, name: str, module: nn.Module, args: Any, result: Tensor) -> None:
        self.features[name] = result.detach()


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return x + 1


class Collecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        note(x * 2)
        return x + 1


class Keeping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        KEPT.get().append(x * 2)
        return x + 1


class Setting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        CALL.set(CALL.get() + 1)
        return x + 1


class InContext(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        token = CALL.set(CALL.get() + 1)
        CALL.reset(token)
        return x * SCALE.get()


def note(value: Tensor) -> None:
    SEEN.append(value)


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * TABLE["scale"]


def hooked() -> tuple[nn.Module, Callable[[], int], str]:
    features: dict[str, Tensor] = {}
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, result: features.update(layer=result))
    return model, lambda: len(features), "features.layer"


def bound() -> tuple[nn.Module, Callable[[], int], str]:
    extractor, model = Extractor(), nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model[1].register_forward_hook(functools.partial(extractor.keep, "tanh"))
    return model, lambda: len(extractor.features), "Extractor.features.tanh"


def counted() -> tuple[nn.Module, Callable[[], int], str]:
    count, model = 0, nn.Tanh()

    def hook(module: nn.Module, args: Any) -> None:
        nonlocal count
        count += 1

    model.register_forward_pre_hook(hook)
    return model, lambda: count, "count"


def kept() -> tuple[nn.Module, Callable[[], int], str]:
    KEPT.set([])
    return Keeping(), lambda: len(KEPT.get()), "KEPT"


CASES: dict[str, Callable[[], tuple[nn.Module, Callable[[], int], str]]] = {
    "a dictionary in a closure": hooked,
    "the object of a bound method": bound,
    "a number in a closure": counted,
    "a list in the globals of a function that is called": lambda: (Collecting(), lambda: len(SEEN), "SEEN"),
    "a number in the globals": lambda: (Counting(), lambda: CALLS, "CALLS"),
    "a list that a context variable holds": kept,
    "a context variable": lambda: (Setting(), CALL.get, "CALL"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_changed_is_named_put_back_and_left_to_eager(name: str) -> None:
    model, size, changed = CASES[name]()
    before = size()
    with pytest.raises(CaptureError, match=f"forward changes {changed};"):
        capture(model, (torch.ones(3),))
    assert size() == before
    fused = fuse.compile(model)
    with torch.no_grad():
        fused(torch.ones(3))
        assert size() == before + 1
        assert fused.last_run is not None
        assert changed in fused.last_run.fallbacks[0].reason
        with pytest.warns(UserWarning, match=changed):  # it is changed again: no cache that was filled once
            fused(torch.ones(3))
    assert size() in (before + 1, before + 2)


ARRAYS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.ones(3),
    "array": lambda: array.array("f", [1, 1, 1]),
    "bytearray": lambda: bytearray([1, 1, 1]),
}


class Counts(nn.Module):
    """Counts calls in an array; ``writes`` or only reads what others write."""

    def __init__(self, numbers: Any, writes: bool) -> None:
        super().__init__()
        self.numbers = numbers
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.numbers[1] += 1
        return x * int(self.numbers[1])


@pytest.mark.parametrize("name", ARRAYS)
def test_numbers_that_an_array_holds_are_state(name: str) -> None:
    writing, reading = (Counts(ARRAYS[name](), writes) for writes in (True, False))
    held = writing.numbers
    with pytest.raises(CaptureError, match="forward changes"):
        capture(writing, (torch.ones(1),))
    assert (writing.numbers is held, list(held)) == (True, [1, 1, 1])
    fused = fuse.compile(writing)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [float(fused(torch.ones(1))) for _ in range(4)] == [2, 3, 4, 5]
    fused = fuse.compile(reading)
    with torch.no_grad():
        for number in (1, 1, 7):
            reading.numbers[1] = number
            assert fused(torch.ones(1)).item() == number
            assert fused.last_run is not None
            assert fused.last_run.fallbacks == ()


class Scales(nn.Module):
    def forward(self, x: Tensor, numbers: Any) -> Tensor:
        return x * float(numbers[1])


def test_an_array_that_is_an_argument_is_read_in_each_call() -> None:
    fused, numbers = fuse.compile(Scales()), np.zeros(20_000)
    with torch.no_grad():
        for number in (1.0, 1.0, 7.0):
            numbers[1] = number
            assert fused(torch.ones(1), numbers).item() == number
            assert fused.last_run is not None
            assert fused.last_run.fallbacks == ()
        for unwatched in (np.zeros(3_000_000), np.zeros(3, dtype=object)):
            fused = fuse.compile(Scales())
            with pytest.warns(UserWarning, match="an argument is a ndarray of objects, or too large"):
                assert [float(fused(torch.ones(1), unwatched)), unwatched.put(1, 3)] == [0, None]
            assert fused(torch.ones(1), unwatched).item() == 3


class Taking(nn.Module):
    def __init__(self, numbers: Iterator[float]) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.numbers)


@pytest.mark.parametrize("make", [itertools.count, lambda: iter(range(9)), lambda: (one for one in range(9))])
def test_an_iterator_is_advanced_by_each_call_and_by_nothing_else(make: Any) -> None:
    fused = fuse.compile(Taking(make()))
    with torch.no_grad():
        with pytest.warns(UserWarning, match="an iterator"):
            assert fused(torch.ones(1)).item() == 0
        assert [float(fused(torch.ones(1))) for _ in range(3)] == [1, 2, 3]


NUMBERS = itertools.count()


class Numbering(nn.Module):
    """Names an iterator that it does not hold, for which a library's code often has uses of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.number = next(NUMBERS)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.number if self.number >= 0 else next(NUMBERS))


def test_an_iterator_that_code_only_names_is_no_obstacle() -> None:
    assert len(capture(Numbering(), (torch.ones(1),)).graph.nodes) == 3


class Draws(nn.Module):
    """Keeps a layer or leaves it out, by numbers that are not torch's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.draw() < 0.5 else x


GENERATORS: dict[str, Callable[[], tuple[Callable[[], float], Callable[[], Any]]]] = {
    "random": lambda: (random.random, random.getstate),
    "numpy.random": lambda: (np.random.rand, lambda: str(np.random.get_state(legacy=False))),
    "a random.Random": lambda: (random.Random(3).random, lambda: None),
    "a numpy.Generator": lambda: (np.random.default_rng(3).random, lambda: None),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_random_numbers_that_are_not_torchs_are_drawn_in_each_call(name: str) -> None:
    draw, state = GENERATORS[name]()
    model, fused = Draws(draw), fuse.compile(Draws(GENERATORS[name]()[0]))
    before = state()
    with pytest.raises(CaptureError, match=f"forward changes the random numbers of {name};"):
        capture(fused._own().model, (torch.zeros(1),))
    assert state() == before
    found = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in (model, fused):
            random.seed(0)
            np.random.seed(0)
            found.append([float(one(torch.zeros(1))) for _ in range(12)])
    assert found[0] == found[1]
    assert set(found[0]) == {0.0, 1.0}


def test_what_is_only_read_is_no_obstacle() -> None:
    graph = capture(Reading(), (torch.ones(3),))
    assert TABLE == {"scale": 2.0}
    assert len(graph.graph.nodes) == 3


def test_the_value_of_a_context_variable_decides_what_is_run() -> None:
    def call(scale: float) -> Tensor:
        SCALE.set(scale)
        with torch.no_grad():
            return torch.add(fused(torch.ones(3)), 0)

    fused = fuse.compile(InContext())
    for scale in (1.0, 2.0, 1.0, 2.0):
        assert copy_context().run(call, scale).tolist() == [scale] * 3
        assert fused.last_run is not None
        assert fused.last_run.fallbacks == ()
    for scale in range(3, 9):
        copy_context().run(call, float(scale))
    with pytest.warns(UserWarning, match="reads context variables"):  # others each time
        assert copy_context().run(call, 9.0).tolist() == [9] * 3


def test_a_hook_that_changes_nothing_is_captured() -> None:
    scale = [3.0]
    model = nn.Tanh()
    model.register_forward_hook(lambda module, args, result: result * scale[0])
    with torch.no_grad():
        fused = fuse.compile(model)
        torch.testing.assert_close(fused(torch.ones(3)), model(torch.ones(3)))
    assert fused.last_run is not None
    assert fused.last_run.fallbacks == ()


def test_values_that_are_made_when_asked_for_are_no_change() -> None:
    class Lazy(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return super().__getitem__(key)()

    table = Lazy(tanh=nn.Tanh)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return table["tanh"](x)

    capture(Model(), (torch.ones(3),))


class Asserts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.ndim == 2
        return torch.tanh(x)


def test_the_tool_that_rewrites_assertions_is_not_followed() -> None:
    """pytest's session holds every test that it has collected: 25 seconds a capture in a large suite."""
    assert "@pytest_ar" in Asserts.forward.__code__.co_names
    found = reached_by(Asserts(), {"x": torch.ones(2, 2)})
    assert not any(name.startswith("@") for name, _, _ in found.names)
    assert not any(type(one.live).__module__.startswith("_pytest") for one in found.held)
