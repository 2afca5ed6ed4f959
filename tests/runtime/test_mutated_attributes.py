"""Models that assign their own attributes in ``forward``: compiled calls leave behind what eager's leave behind."""

from __future__ import annotations

import copy
import dataclasses
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.inputs import CheckCall
from fuse.check.oracle import check
from tests.samples import Holder


class Keeps(Holder):
    """Holds a layer as well."""

    default = None

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__(function, **held)
        self.layer = nn.Linear(4, 4)


class Forwards(nn.Module):
    """Keeps its state in a dictionary, and lets attributes stand for the entries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.__dict__["memory"] = {"v": 0.0}

    def __getattr__(self, name: str) -> Any:
        memory = self.__dict__.get("memory", {})
        return memory[name] if name in memory else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        memory = self.__dict__.get("memory", {})
        if name in memory:
            memory[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for step in self.layer(x).detach().unbind(0):
            self.v = self.v * 0.5 + step
            out.append((self.v > 0.1).float() * self.v)
        return torch.stack(out)


@dataclasses.dataclass
class State:
    h: Tensor
    steps: int


def stash(self, x):
    self.attention = torch.softmax(self.layer(x), -1)
    return self.attention * 2


def stash_detached(self, x):
    y = self.layer(x)
    self.seen = y.detach()
    return y


def stash_on_another(self, x):
    self.layer.last = x.exp()
    return self.layer(x)


def recurrent(self, x):
    if self.h is None:
        self.h = torch.zeros_like(x)
    self.h = torch.tanh(self.layer(x) + self.h.detach())
    return self.h


def recurrent_by_default(self, x):
    h = x if self.default is None else self.default.detach()
    self.default = torch.tanh(self.layer(x) + h)
    return self.default * 1


def in_a_tuple(self, x):
    h, c = self.h if self.h is not None else (x, x)
    h = torch.tanh(self.layer(x) + h.detach())
    self.h = (h, c.detach() + h)
    return h


def in_a_list(self, x):
    self.hs = [torch.tanh(x + h) for h in self.hs]
    return self.hs[-1] * 1


def items_of_a_list(self, x):
    """A state for each layer."""
    for i, h in enumerate(self.hs):
        x = torch.tanh(self.layer(x) + h.detach())
        self.hs[i] = x
    self.seen[0], self.seen[1] = self.seen[1], x.detach() * 2
    return x * 1


def in_a_dictionary(self, x):
    self.cache = {"k": torch.tanh(x), "v": self.cache["v"] + 1}
    return self.cache["v"] + x


def an_entry(self, x):
    self.memory["v"] = 0.9 * self.memory["v"] + torch.tanh(x)
    return self.memory["v"] * self.memory["scale"]


def entries_read_and_reset(self, x):
    before = self.memory.copy()
    self.memory.update(v=0.0, seen=before["v"])
    for step in x.unbind(0):
        self.memory["v"] = self.memory["v"] * 0.5 + step
    return self.memory["v"] + sum(self.memory.values())


def in_a_dataclass(self, x):
    self.state = State(torch.tanh(x + self.state.h), 3)
    return self.state.h * 2


def reset_by_a_flag(self, x):
    if hasattr(self, "memory"):
        x = x + self.memory
    self.memory = x * 0.5
    return self.memory + 1


def counted(self, x):
    self.calls += 1
    self.total = 2 + self.calls
    return torch.tanh(x)


def averaged(self, x):
    self.b_mean = 0.9 * self.b_mean + 0.1 * x.mean(0)
    self.b_count += 1
    return x - self.b_mean


def averaged_by_name(self, x):
    self.b_mean = 0.9 * self.b_mean + 0.1 * x.mean(0)
    return x - dict(self.named_buffers())["b_mean"] + self._buffers["b_mean"].exp()


def written_and_assigned(self, x):
    self.h.mul_(0.5).add_(x)
    self.last = self.h
    return self.h + 1


def assigned_in_place(self, x):
    self.h += x
    return self.h * 2


def the_input_itself(self, x):
    before = self.last
    self.last = x
    return x - before if before is not None else x * 1


def a_view_of_the_result(self, x):
    y = torch.tanh(x)
    self.row = y[0]
    return y


def swapped(self, x):
    self.a, self.b = self.b, self.a
    return self.a + x


def assigned_twice(self, x):
    self.h = x + 1
    y = self.h * 2
    self.h = y.tanh()
    return self.h + y


def a_flag(self, x):
    self.first = False if self.first else self.first
    return torch.tanh(x)


CASES: dict[str, Callable[[], Keeps]] = {
    "stash": lambda: Keeps(stash),
    "stash detached": lambda: Keeps(stash_detached),
    "stash on another module": lambda: Keeps(stash_on_another),
    "recurrent": lambda: Keeps(recurrent, h=None),
    "recurrent by a default of the class": lambda: Keeps(recurrent_by_default),
    "in a tuple": lambda: Keeps(in_a_tuple, h=None),
    "items of a list": lambda: Keeps(
        items_of_a_list, hs=[torch.zeros(3, 4), torch.ones(3, 4)], seen=[torch.ones(3, 4), torch.zeros(3, 4)]
    ),
    "in a list": lambda: Keeps(in_a_list, hs=[torch.zeros(3, 4), torch.ones(3, 4)]),
    "in a dictionary": lambda: Keeps(in_a_dictionary, cache={"k": torch.zeros(3, 4), "v": torch.zeros(3, 4)}),
    "an entry of a dictionary": lambda: Keeps(an_entry, memory={"v": torch.zeros(3, 4), "scale": 2.0}),
    "entries that are reset": lambda: Keeps(
        entries_read_and_reset, memory={"v": torch.zeros(4), "seen": torch.zeros(4)}
    ),
    "an entry behind __setattr__": Forwards,
    "in a dataclass": lambda: Keeps(in_a_dataclass, state=State(torch.zeros(3, 4), 3)),
    "absent at first": lambda: Keeps(reset_by_a_flag),
    "counted": lambda: Keeps(counted, calls=5),
    "buffers": lambda: Keeps(averaged, b_mean=torch.zeros(4), b_count=torch.tensor(0)),
    "buffers by name": lambda: Keeps(averaged_by_name, b_mean=torch.zeros(4)),
    "written and assigned": lambda: Keeps(written_and_assigned, h=torch.zeros(3, 4)),
    "assigned in place": lambda: Keeps(assigned_in_place, h=torch.zeros(3, 4)),
    "the input itself": lambda: Keeps(the_input_itself, last=None),
    "a view of the result": lambda: Keeps(a_view_of_the_result),
    "swapped": lambda: Keeps(swapped, a=torch.zeros(3, 4), b=torch.ones(3, 4)),
    "assigned twice": lambda: Keeps(assigned_twice),
    "a flag": lambda: Keeps(a_flag, first=True),
}


def same(one: Any, other: Any) -> None:
    """Equal values, layouts, and classes of what holds them."""
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert type(one[name]) is type(value), name
        if isinstance(value, Tensor):
            torch.testing.assert_close(one[name], value)
            assert one[name].requires_grad == value.requires_grad, name
            assert one[name].stride() == value.stride(), name
        else:
            assert one[name] == value, name


def run_beside_eager(model: nn.Module, calls: list[tuple[Tensor, ...]], training: bool = False) -> fuse.Fused:
    """Call a model fused and a twin eager, one after the other; what they return and hold must be the same."""
    twin = copy.deepcopy(model)
    fused = fuse.compile(model)
    for args in calls:
        with torch.set_grad_enabled(training):
            expected, actual = twin(*args), fused(*args)
        torch.testing.assert_close(actual, expected)
        if training and expected.requires_grad:
            expected.sum().backward()
            actual.sum().backward()
            for mine, eagers in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, eagers.grad)
        same(CheckCall(model, (), {}).attributes(), CheckCall(twin, (), {}).attributes())
        same(dict(model.named_buffers()), dict(twin.named_buffers()))
    return fused


@pytest.fixture
def strict() -> Any:
    """A call that runs eager fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.sampled
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_assigned_is_there_after_every_call(name: str, training: bool, strict: None) -> None:
    fused = run_beside_eager(CASES[name](), [(torch.randn(3, 4),) for _ in range(5)], training)
    assert fused.last_run is not None
    assert fused.last_run.fallbacks == ()
    variants = [compiled for state in fused._own()._known.states for compiled in state.variants]
    assert len(variants) <= 2, "a call was compiled again although nothing new was to be seen"


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_the_oracle_sees_attributes(name: str, strict: None) -> None:
    report = check(CASES[name](), (torch.randn(3, 4),))
    assert report.passed, str(report)


def test_the_oracle_misses_an_attribute_that_is_not_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuse.runtime.variants.mutated_attributes.Carried.assign", lambda self, *run: run[0][0])
    report = check(CASES["stash"](), (torch.randn(3, 4),))
    assert any("attribute attention" in problem for problem in report.problems)


def test_a_state_can_be_reset_and_change_its_shape(strict: None) -> None:
    model = Keeps(recurrent, h=None)
    fused = run_beside_eager(model, [(torch.randn(3, 4),)] * 3)
    model.h = None
    for h in (None, torch.ones(2, 4, dtype=torch.float64), torch.ones(4)):
        model.h = h
        twin, x = copy.deepcopy(model), torch.randn(2, 4)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), twin(x))
            torch.testing.assert_close(fused(x), twin(x))
        torch.testing.assert_close(model.h, twin.h)


def test_a_count_may_become_another_number_or_none(strict: None) -> None:
    model = Keeps(counted, calls=5)
    fused = fuse.compile(model)
    with torch.no_grad():
        fused(torch.ones(3))
        model.calls = 100
        fused(torch.ones(3))
        assert (model.calls, model.total) == (101, 103)
        model.calls = 0.5
        fused(torch.ones(3))
        assert (model.calls, model.total) == (1.5, 3.5)


def test_one_call_assigns_and_another_reads(strict: None) -> None:
    def prefill_or_decode(self: Any, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            self.cache = torch.tanh(x).sum(0, keepdim=True)
            return x
        return x + self.cache

    calls = [(torch.randn(n, 4),) for n in (3, 1, 1, 3, 1, 2, 1)]
    fused = run_beside_eager(Keeps(prefill_or_decode, cache=None), calls)
    decoding = fused._own()._known.states[0].variants
    assert sum(c.carried is not None and not c.carried.assigned for c in decoding) == 1
    reading = Keeps(prefill_or_decode, cache=torch.ones(1, 4))
    run_beside_eager(reading, [calls[1], calls[0], *calls[1:]])  # read first


def test_a_number_that_decides_is_read_as_it_is() -> None:
    def once_more(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return sum((x * number for number in range(self.calls)), torch.sin(x))

    with pytest.warns(UserWarning, match="assigns to another value in each call"):
        fused = run_beside_eager(Keeps(once_more, calls=0), [(torch.ones(3),)] * 12)
    assert fused.last_run is not None
    assert "calls" in fused.last_run.fallbacks[0].reason


def next_mask(self, x):
    """Masks drawn ahead; new ones where they run out."""
    if self.place + x.shape[0] > self.masks.shape[0]:
        self.place, self.masks = 0, torch.rand_like(self.masks)
    mask = self.masks[self.place : self.place + x.shape[0]]
    self.place = self.place + x.shape[0]
    return self.layer(x) * mask


def next_mask_around(self, x):
    """Masks drawn once, used again from the first."""
    mask = self.masks[self.place : self.place + x.shape[0]]
    self.place = (self.place + x.shape[0]) % (self.masks.shape[0] - x.shape[0])
    return self.layer(x) * mask


def every_other(self, x):
    self.calls += 1
    return torch.tanh(self.layer(x)) if self.calls % 2 else self.layer(x) * (self.calls // 3)


def cooling(self, x):
    self.heat = max(self.heat * 0.9, 0.5)
    return torch.softmax(self.layer(x) / self.heat, -1)


def mean_teacher(self, x):
    """A moving average that begins with the mean of all weights so far."""
    alpha = min(1 - 1 / (self.calls + 1), 0.8)
    self.calls += 1
    with torch.no_grad():
        self.masks[:4].mul_(alpha).add_(self.layer.weight, alpha=1 - alpha)
        self.masks[4:8].lerp_(self.layer.weight, 1 - alpha)
    return self.layer(x) * (self.masks[:3] - self.masks[5:8])


def warming_up(self, x):
    self.calls += 1
    return self.layer(x) * min(1.0, self.calls / 8)


@pytest.mark.sampled
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("function", "held"),
    [
        (next_mask, {"place": 0}),
        (next_mask_around, {"place": 0}),
        (every_other, {"calls": 0}),
        (cooling, {"heat": 1.0}),
        (mean_teacher, {"calls": 0}),
        (warming_up, {"calls": 0}),
    ],
    ids=["a place", "a place in a circle", "a turn", "a factor", "a weight", "a ramp"],
)
def test_a_number_that_is_used_and_changed_is_an_input(
    function: Callable[..., Any], held: dict[str, Any], training: bool, strict: None
) -> None:
    model = Keeps(function, **held)
    model.register_buffer("masks", torch.ones(20, 4))
    fused = fuse.compile(model)
    twin, captured = copy.deepcopy(model), 0
    for number in range(14):
        x = torch.randn(3, 4)
        with torch.set_grad_enabled(training):
            torch.manual_seed(number)
            expected = twin(x)
            torch.manual_seed(number)
            torch.testing.assert_close(fused(x), expected)
        assert fused.last_run is not None
        assert fused.last_run.fallbacks == ()
        captured = sum(len(state.variants) for state in fused._own()._known.states)
        same(CheckCall(model, (), {}).attributes(), CheckCall(twin, (), {}).attributes())
    assert captured <= 3, "the program must not hang on the number"


def test_a_number_may_become_one_of_another_type(strict: None) -> None:
    model = Keeps(cooling, heat=2.0)
    twin, fused, x = copy.deepcopy(model), fuse.compile(model), torch.randn(3, 4)
    with torch.no_grad():
        for heat in (None, 3, 2**70, torch.tensor(4.0), 5.0):
            if heat is not None:
                model.heat = twin.heat = heat
            torch.testing.assert_close(fused(x), twin(x))
            same(CheckCall(model, (), {}).attributes(), CheckCall(twin, (), {}).attributes())


@pytest.mark.parametrize(
    "use",
    [
        lambda n, x: x * n,
        lambda n, x: x.sum(n % 1),
        lambda n, x: x + torch.tensor(n),
        lambda n, x: x[n - 1 :],
        lambda n, x: x + len(f"{n}"),
        lambda n, x: x if n else x + 1,
        lambda n, x: x + {1: 2.0, 2: 3.0}.get(n, 4.0),
        lambda n, x: x + (1.0 if isinstance(n, int) and n == 1 else 2.0),
        lambda n, x: torch.full((3,), n) + x,
        lambda n, x: x + max(n, 2),
    ],
)
def test_no_use_of_a_count_goes_unseen(use: Callable[[int, Tensor], Tensor]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return use(self.calls, x)

    run_beside_eager(Keeps(forward, calls=0), [(torch.ones(3),)] * 3)


def test_a_count_can_be_returned() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, int]:
        self.calls += 1
        return x + 1, self.calls

    model = Keeps(forward, calls=0)
    fused = fuse.compile(model)
    with torch.no_grad():
        assert [fused(torch.ones(1))[1] for _ in range(3)] == [1, 2, 3]


REFUSED: dict[str, tuple[Callable[[], Keeps], str]] = {
    "a list grows": (lambda: Keeps(lambda s, x: (s.seen.append(x + 1), x + 1)[1], seen=[]), "changes Keeps.seen"),
    "a dictionary grows": (
        lambda: Keeps(lambda s, x: (s.c.update({len(s.c): x + 1}), x + 1)[1], c={}),
        r"changes Keeps.c\[0\]",
    ),
    "removed": (lambda: Keeps(lambda s, x: (delattr(s, "h"), setattr(s, "h", x), x + 1)[2], h=1), "deletes"),
    "by its dictionary": (
        lambda: Keeps(lambda s, x: (setattr(s, "h", vars(s)["h"] + x), x + 1)[1], h=torch.zeros(3)),
        "but not by its name",
    ),
    "in the registry, too": (
        lambda: Keeps(lambda s, x: (setattr(s, "b_h", x), s._buffers.update(b_h=x + 1), x + 2)[2], b_h=torch.zeros(3)),
        "writes b_h into a registry of its module directly",
    ),
    "out of the registry": (
        lambda: Keeps(lambda s, x: (setattr(s, "b_h", x), s._buffers.pop("b_h", None), x + 2)[2], b_h=torch.zeros(3)),
        "changes Keeps.b_h",
    ),
    "an empty set": (
        lambda: Keeps(lambda s, x: (setattr(s, "seen", {len(s.seen)}), x + 1)[1], seen=set()),
        "assigns the attribute seen, which holds a set",
    ),
    "a list that it holds, too": (
        lambda: Keeps(lambda s, x: (s.hs.__setitem__(0, x + 1), setattr(s, "n", x), x + 1)[2], hs=[torch.zeros(3)]),
        "changes the contents of hs, which another object holds, too",
    ),
    "an object": (
        lambda: Keeps(lambda s, x: (setattr(s, "o", object()), x + 1)[1]),
        "assigns a object to the attribute o",
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_played_back_runs_eager_and_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, reason = REFUSED[name]
    model = make()
    held = dict(vars(model))
    captured = []
    original = fuse.runtime.making.capture_short
    monkeypatch.setattr(fuse.runtime.making, "capture_short", lambda *a: (captured.append(1), original(*a))[1])
    with pytest.raises(fuse.errors.CaptureError, match=reason):
        fuse.graph.capture.capture(model, (torch.ones(3),))
    assert vars(model) == held
    assert type(model) is Keeps
    if name != "removed":
        fused = fuse.compile(model)
        with warnings.catch_warnings(record=True) as told, torch.no_grad():
            warnings.simplefilter("always")
            fused(torch.ones(3))
            assert fused.last_run is not None
            assert re.search(reason, fused.last_run.fallbacks[0].reason)
            for _ in range(3):
                fused(torch.ones(3))
        assert len(told) == len(fused.last_run.fallbacks) == (name != "out of the registry")  # it is out after a call
        assert len(captured) == 2, "what runs eager is captured once more, as it might be a cache that is filled by now"
    if name == "a list grows":
        assert [value.tolist() for value in model.seen] == [[2.0] * 3] * 4


def test_a_list_of_two_modules_is_changed_by_eager() -> None:
    model = Keeps(lambda s, x: (s.h.reverse(), x * s.h[0])[1], h=[1.0, 2.0])
    model.layer.h = model.h
    twin, fused, x = copy.deepcopy(model), fuse.compile(model), torch.ones(3)
    with pytest.warns(UserWarning, match="changes the contents of h, which another object holds, too"):
        assert [fused(x).tolist() for _ in range(4)] == [twin(x).tolist() for _ in range(4)]
    assert model.layer.h is model.h
    assert model.h == twin.h


def test_a_list_that_is_assigned_and_changed_is_eagers() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.h.reverse()
        self.h = [2 * h for h in self.h]
        return x * self.h[0]

    model = Keeps(forward, h=[torch.ones(3), torch.zeros(3)])
    twin, fused, x = copy.deepcopy(model), fuse.compile(model), torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [fused(x).tolist() for _ in range(4)] == [twin(x).tolist() for _ in range(4)]
    assert [h.tolist() for h in model.h] == [h.tolist() for h in twin.h]


def test_other_threads_see_the_model_as_it_is(strict: None) -> None:
    seen, inside, done = [], threading.Event(), threading.Event()

    def forward(self: Any, x: Tensor) -> Tensor:
        self.h = x + self.h
        if threading.current_thread() is threading.main_thread():
            inside.set()
            done.wait(5)
        return self.h

    model = Keeps(forward, h=torch.zeros(3))

    def watch() -> None:
        inside.wait(5)
        seen.append((type(model.h), type(model), model.h.tolist()))
        done.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    fuse.graph.capture.capture(model, (torch.ones(3),), mutated=[fuse.graph.signature.Attribute("", "h")])
    watcher.join()
    assert seen[0][0] is Tensor
    assert seen[0][2] == [0.0, 0.0, 0.0]
    assert type(model) is Keeps


@pytest.mark.parametrize("held", ["by another attribute", "in a list"])
def test_a_dictionary_of_states_that_is_held_elsewhere_is_read_as_eager_reads_it(held: str) -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = {"h": torch.zeros(3)}
            self.alias: Any = self.state if held == "by another attribute" else [self.state]

        def forward(self, x: Tensor) -> Tensor:
            self.state["h"] = self.state["h"] + x
            return (self.alias if isinstance(self.alias, dict) else self.alias[0])["h"] * 2

    model = Aliased()
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            x = torch.randn(3)
            torch.testing.assert_close(fused(x), eager(x))
