"""Loops that leave something behind in Python, such as a count: right at every length, and shared where nothing is."""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.graph.capture import capture
from fuse.runtime.size_uses import loop_steps, unrecorded_uses, watched_loops
from fuse.runtime.size_uses.loop_variables import loops_of
from fuse.runtime.size_uses.python_values import is_recorded, look
from fuse.runtime.size_uses.watched_loops import loops_watched
from tests.runtime.recapturing import recaptured
from tests.runtime.test_reaching import captures

LENGTHS = 11, 27, 19, 31, 23, 14, 29, 40, 22, 24, 26, 25
ODD = 25
"""The length at which the functions do something else. It is called last."""

__all__ = ["captures"]  # a fixture


class Model(nn.Module):
    def __init__(self, function: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function
        self.chosen = nn.ModuleList(nn.Tanh() if n == ODD - 1 else nn.Sigmoid() for n in range(60))

    def step(self, row: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.layer(row) + h)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@dataclass
class Count:
    n: int = 0

    def add(self) -> None:
        self.n = more(self.n)


def more(n: int) -> int:
    return n + 1


def signs() -> list[float]:
    return [1.0] * (ODD - 1) + [-1.0] + [1.0] * 60


def by_a_function(m: Model, x: Tensor) -> Tensor:
    h, n = x[0] * 0, 0
    for row in x:
        h, n = m.step(row, h), more(n)
    return -h if n == ODD else h


def in_a_tuple(m: Model, x: Tensor) -> Tensor:
    h, pair = x[0] * 0, (0, 0)
    for row in x:
        h, pair = m.step(row, h), (pair[0] + 1, 0)
    return -h if pair[0] == ODD else h


def in_a_dictionary(m: Model, x: Tensor) -> Tensor:
    h, counted = x[0] * 0, {"n": 0}
    for row in x:
        h = m.step(row, h)
        counted["n"] = counted.get("n", 0) + 1
    return -h if counted["n"] == ODD else h


def in_an_object(m: Model, x: Tensor) -> Tensor:
    h, count = x[0] * 0, Count()
    for row in x:
        h = m.step(row, h)
        count.add()
    return -h if count.n == ODD else h


def in_a_text(m: Model, x: Tensor) -> Tensor:
    h, text = x[0] * 0, ""
    for row in x:
        h, text = m.step(row, h), f"{text}."
    return -h if text == "." * ODD else h


def in_a_list(m: Model, x: Tensor) -> Tensor:
    h, nothing = x[0] * 0, []
    for row in x:
        h = m.step(row, h)
        nothing.append(None)
    return -h if nothing == [None] * ODD else h


def in_a_list_of_steps(m: Model, x: Tensor) -> Tensor:
    h, steps = x[0] * 0, []
    for t in range(len(x)):
        h = m.step(x[t], h)
        steps.append(t)
    return -h if steps[-2] == ODD - 2 else h


def in_a_closure(m: Model, x: Tensor) -> Tensor:
    before = latest = False

    def step(t: int, h: Tensor) -> Tensor:
        nonlocal before, latest
        before, latest = latest, t == ODD - 2
        return m.step(x[t], h)

    h = x[0] * 0
    for t in range(len(x)):
        h = step(t, h)
    return -h if before else h


def from_an_iterator(m: Model, x: Tensor) -> Tensor:
    h, factors, factor = x[0] * 0, iter(signs()), 1.0
    for row in x:
        h, factor = m.step(row, h), next(factors)
    return h * factor


def from_a_list_that_shrinks(m: Model, x: Tensor) -> Tensor:
    h, factors, factor = x[0] * 0, signs(), 1.0
    for row in x:
        h, factor = m.step(row, h), factors.pop(0)
    return h * factor


def from_a_generator(m: Model, x: Tensor) -> Tensor:
    def steps(n: int) -> Iterator[tuple[int, int]]:
        before = -1
        for t in range(n):
            yield t, before
            before = t

    h, before = x[0] * 0, 0
    for t, before in steps(len(x)):  # noqa: B007 - the last one is used
        h = m.step(x[t], h)
    return -h if before == ODD - 2 else h


def of_the_step_before(m: Model, x: Tensor) -> Tensor:
    h, before, latest = x[0] * 0, False, False
    for t in range(x.shape[0]):
        before, latest = latest, t == ODD - 2
        h = m.step(x[t], h)
    return -h if before else h


def of_the_step_before_in_a_while(m: Model, x: Tensor) -> Tensor:
    h, t, before, latest = x[0] * 0, 0, False, False
    while t < x.shape[0]:
        before, latest = latest, t == ODD - 2
        h = m.step(x[t], h)
        t += 1
    return -h if before else h


def of_pairs(m: Model, x: Tensor) -> Tensor:
    h, t = x[0] * 0, 0
    for t, after in itertools.pairwise(range(x.shape[0])):  # noqa: B007 - the last one is used
        h = m.step(x[after], h)
    return -h if t == ODD - 2 else h


def of_the_tensor_before(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    h = out = before = x[0] * 0
    for t in range(x.shape[0]):
        out, before = before, -h if t == ODD - 2 else h
        h = m.step(x[t], h)
    return h, out


def of_the_last_but_one(m: Model, x: Tensor) -> Tensor:
    h, states = x[0] * 0, []
    for t in range(x.shape[0]):
        h = m.step(x[t], h)
        states.append(-h if t == ODD - 2 else h)
    return states[-2]


def of_flags(m: Model, x: Tensor) -> Tensor:
    return -x if [t == ODD - 2 for t in range(x.shape[0])][-2] else m.layer(x)


def of_modules(m: Model, x: Tensor) -> Any:
    h, last = x[0] * 0, m.chosen[0]
    for row, last in zip(x, m.chosen, strict=False):  # noqa: B007 - the last one is used
        h = m.step(row, h)
    return last(h)


def until_a_break(m: Model, x: Tensor) -> Tensor:
    h, t = x[0] * 0, 0
    for t in range(60):
        if t == x.shape[0]:
            break
        h = m.step(x[t], h)
    return -h if t == ODD else h


def until_an_error(m: Model, x: Tensor) -> Tensor:
    h, t = x[0] * 0, 0
    for t in range(60):
        try:
            row = x[t]
        except IndexError:
            break
        h = m.step(row, h)
    return -h if t == ODD else h


def until_there_is_none(m: Model, x: Tensor) -> Tensor:
    h, rows, nothing = x[0] * 0, iter(x), []
    while (row := next(rows, None)) is not None:
        h = m.step(row, h)
        nothing.append(0)
    return -h if nothing == [0] * ODD else h


def while_counting(m: Model, x: Tensor) -> Tensor:
    h, t = x[0] * 0, -1
    while (t := t + 1) < len(x):
        h = m.step(x[t], h)
    return -h if t == ODD else h


def by_recursion(m: Model, x: Tensor) -> Tensor:
    def go(t: int, h: Tensor) -> tuple[Tensor, int]:
        return (h, t) if t == len(x) else go(t + 1, m.step(x[t], h))

    h, t = go(0, x[0] * 0)
    return -h if t == ODD else h


def by_reducing(m: Model, x: Tensor) -> Tensor:
    h, n = functools.reduce(lambda state, row: (m.step(row, state[0]), state[1] + 1), x, (x[0] * 0, 0))
    return -h if n == ODD else h


def by_a_slice(m: Model, x: Tensor) -> Tensor:
    h, states = x[0] * 0, []
    for row in x:
        h = m.step(row, h)
        states.append(h)
    return -h if states[24:25] and not states[25:] else h


def by_a_missing_element(m: Model, x: Tensor) -> Tensor:
    rows = [row * 2 for row in x]
    try:
        rows[24]
    except IndexError:
        return m.layer(x)
    return -x if len(rows[25:]) == 0 else m.layer(x)


def by_the_sum_of_a_range(m: Model, x: Tensor) -> Tensor:
    return -x if sum(range(x.shape[0])) == sum(range(ODD)) else m.layer(x)


def by_a_sum_of_steps(m: Model, x: Tensor) -> Tensor:
    (*_, total) = (n for n in itertools.accumulate(range(x.shape[0])))
    return -x if total == sum(range(ODD)) else m.layer(x)


def by_a_list_of_zeros(m: Model, x: Tensor) -> Tensor:
    return -x if [0] * x.shape[0] == [0] * ODD else m.layer(x)


def by_bytes(m: Model, x: Tensor) -> Tensor:
    return -x if bytes(x.shape[0]) == bytes(ODD) else m.layer(x)


def by_bisection(m: Model, x: Tensor) -> Tensor:
    return -x if bisect.bisect_left([ODD - 0.5, ODD + 0.5], x.shape[0]) == 1 else m.layer(x)


def by_a_module(m: Model, x: Tensor) -> Any:
    return m.chosen[x.shape[0] - 1](x)


def by_the_second_of_a_range(m: Model, x: Tensor) -> Tensor:
    steps = iter(range(x.shape[0] - 1, -1, -1))
    next(steps)
    return -x if next(steps) == ODD - 2 else m.layer(x)


def by_the_second_backwards(m: Model, x: Tensor) -> Tensor:
    return -x if list(reversed(range(x.shape[0])))[1] == ODD - 2 else m.layer(x)


def by_a_range_that_starts_late(m: Model, x: Tensor) -> Tensor:
    steps = range(x.shape[0] - 3, x.shape[0])
    return -x if any(t == ODD - 3 for t in steps if t < steps[-2]) else m.layer(x)


OWN = {
    one.__name__: one
    for one in (
        *(by_a_function, in_a_tuple, in_a_dictionary, in_an_object, in_a_text, in_a_list, in_a_list_of_steps),
        *(in_a_closure, from_an_iterator, from_a_list_that_shrinks, from_a_generator, of_the_step_before, of_pairs),
        of_the_step_before_in_a_while,
        *(of_the_tensor_before, of_the_last_but_one, of_flags, of_modules, until_a_break, until_an_error),
        *(until_there_is_none, while_counting, by_recursion, by_reducing, by_a_slice, by_a_missing_element),
        *(by_the_sum_of_a_range, by_a_sum_of_steps, by_a_list_of_zeros, by_bytes, by_bisection, by_a_module),
        *(by_the_second_of_a_range, by_the_second_backwards, by_a_range_that_starts_late),
    )
}


def with_lists(m: Model, x: Tensor) -> Tensor:
    states = [(x[0] * 0, x[0])]
    for t in range(x.shape[0]):
        h, c = states[-1]
        states.append((m.step(x[t], h), c + h))
    return torch.stack([h for h, _ in states[1:]])


def with_generators(m: Model, x: Tensor) -> Tensor:
    def rows() -> Iterator[Tensor]:
        yield from x.unbind(0)

    h = x[0] * 0
    for row in rows():
        h = m.step(row, h)
    return h


def with_layers(m: Model, x: Tensor) -> Tensor:
    hidden, count = collections.deque([x]), 0
    for layer in (m.layer, m.chosen[0], m.layer):
        hidden.append(layer(hidden[-1]))
        count = operator.add(count, 1)
    return hidden[-1] * count


def backwards(m: Model, x: Tensor) -> Tensor:
    h, states = x[0] * 0, []
    for t in range(x.shape[0] - 1, -1, -1):
        h = m.step(x[t], h)
        states.append(h)
    for t in reversed(range(x.shape[0])):
        h = m.step(x[t], h)
    return h + torch.stack(states[::-1])


SHARED = {one.__name__: one for one in (with_lists, with_generators, with_layers, backwards)}


@pytest.mark.sampled
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("name", OWN)
def test_what_a_loop_leaves_is_right_at_every_length(name: str) -> None:
    recaptured(Model(OWN[name]), LENGTHS, 2, 3)


@pytest.mark.parametrize("name", ["of_the_step_before", "of_the_step_before_in_a_while", "of_the_tensor_before"])
def test_what_an_odd_step_leaves_is_right_above_the_followed_lengths(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ODD", 81)
    recaptured(Model(OWN[name]), (11, 27, 19, 31, 23, 14, 29, 40, 22, 81, 80, 82), 3)


def test_what_an_odd_step_of_a_long_loop_leaves_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ODD", 301)
    recaptured(Model(of_the_step_before), (64, 500, 200, 250, 400, 350, 301), 3)


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("name", SHARED)
def test_loops_that_leave_tensors_share_graphs(name: str) -> None:
    assert recaptured(Model(SHARED[name]), LENGTHS, 2, 3) <= 3


def test_variables_that_pass_from_step_to_step_are_known() -> None:
    loop = max(loops_of(until_an_error.__code__).values(), key=lambda one: len(one.body))
    assert loop.within == ("h", "m", "x")
    assert loop.after == ("t",)
    (loop,) = loops_of(while_counting.__code__).values()
    assert "t" in loop.within


def test_only_so_much_of_a_capture_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_loops, "MOST", 100)
    model, x = Model(with_generators), torch.randn(20, 3)
    with loops_watched():
        graph = capture(model, (x,))
    assert graph.meta["signature"].watched is None
    monkeypatch.setattr(watched_loops, "MOST", 100_000)
    with loops_watched():
        assert capture(model, (x,)).meta["signature"].watched == ()


@pytest.mark.usefixtures("captures")
def test_models_with_too_much_to_look_at_are_right_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrecorded_uses, "MOST", 100)
    assert recaptured(Model(with_generators), LENGTHS[:6], 2, 3) == 5


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("name", ["_note_call", "_arrive", "_return", "_judge"])
def test_a_fault_has_models_captured_at_each_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_steps.LoopSteps, name, lambda *_: {}[name])
    assert recaptured(Model(with_generators), LENGTHS[:6], 2, 3) == 5


class Below:
    def __init__(self, below: Any = None) -> None:
        self.below = below


def test_large_attributes_do_not_keep_lengths_from_sharing_graphs() -> None:
    model = Model(with_generators)
    model.words = {f"w{n}": n for n in range(50_000)}
    assert recaptured(model, LENGTHS, 2, 3) <= 3


def test_an_attribute_of_any_depth_is_no_reason_to_run_eager() -> None:
    model, x = Model(with_generators), torch.randn(20, 3)
    model.root = functools.reduce(lambda below, _: Below(below), range(300), Below())
    fused = fuse.compile(model)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    assert not fused.last_run.fallbacks


def refused(*_: Any) -> Any:
    raise AssertionError("code of a user's class ran")


class Row(list[int]):
    __iter__ = __len__ = __getitem__ = __eq__ = refused
    __hash__ = None  # type: ignore[assignment]  # as a list's


class Table(dict[str, int]):
    __iter__ = keys = values = items = __eq__ = refused
    __hash__ = None  # type: ignore[assignment]  # as a dictionary's


class Text(str):
    __eq__ = __str__ = refused
    __hash__ = str.__hash__
    __slots__ = ()


class Lazy:
    __class__ = property(refused)
    __getattr__ = refused

    def __init__(self) -> None:
        vars(self)["n"] = 3


MAKE = {"list": lambda: Row([1, 2]), "dictionary": lambda: Table(n=3), "object": Lazy, "text": lambda: Text("a")}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_look_runs_no_code_of_a_users_class(make: Callable[[], Any]) -> None:
    first, second = make(), make()
    assert look([first]) == look([second])
    assert not is_recorded(first)
