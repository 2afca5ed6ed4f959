"""A capture leaves the Python world as it was, object by object, and asks none of it anything."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

import fuse
from fuse.errors import CaptureError
from fuse.graph.capture import capture
from fuse.graph.state.object_contents import attributes_of, base_of, contents
from fuse.graph.state.reachable_state import reached_by
from fuse.runtime.guards.state_guard import StateGuard

ASKED: list[str] = []
CACHE: dict[Any, Tensor] = {}
BY_CLASS: dict[type, str] = {}
KINDS: OrderedDict[str, type] = OrderedDict(relu=nn.ReLU, tanh=nn.Tanh)


class Function(nn.Module):
    """Runs a function, which reaches the rest of the world by its closure and globals."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def asks(kind: type) -> type:
    """A class made from ``kind`` whose instances tell when they are asked anything, and answer nonsense."""

    def answering(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            ASKED.append(f"{kind.__name__}.{name}")
            raise AssertionError(f"{name} was asked")

        return method

    names = "__iter__ __len__ __eq__ __getitem__ __contains__ __missing__ __deepcopy__ __copy__ __bool__ __reduce_ex__"
    methods = "keys items values copy get pop update clear"
    found = {name: answering(name) for name in f"{names} {methods}".split()}
    return type("Asked", (kind,), {**found, "__hash__": object.__hash__, "size": property(answering("size"))})


def made(kind: type, content: Any) -> Any:
    value = asks(kind).__new__(asks(kind), content) if kind in (tuple, frozenset) else asks(kind)()
    if kind in (dict, OrderedDict):
        for key, item in content.items():
            kind.__setitem__(value, key, item)
    elif kind in (list, deque):
        kind.extend(value, content)
    elif kind is set:
        set.update(value, content)
    return value


CONTENTS: dict[type, Any] = {
    dict: {"a": [1], "b": (2,)},
    OrderedDict: {"a": [1], "b": (2,)},
    list: [[1], {}],
    deque: [[1], {}],
    set: [1, "a"],
    tuple: ([1], 2),
    frozenset: [1, 2],
}


@pytest.mark.parametrize("kind", CONTENTS, ids=lambda kind: kind.__name__)
def test_no_container_is_asked_what_it_holds(kind: type) -> None:
    held = made(kind, CONTENTS[kind])
    before = contents(held)
    model = Function(lambda x: (held, torch.tanh(x))[1])
    model.held = held
    ASKED.clear()
    capture(model, (torch.ones(3),), {})
    guard = StateGuard(model)
    assert guard.holds()
    with torch.no_grad():
        fused = fuse.compile(model)
        fused(torch.ones(3))
        fused(torch.ones(3))
    assert ASKED == []
    assert before.is_of(held)
    if kind in (list, dict):
        kind.clear(held)
        assert not guard.holds()


class Makes(OrderedDict[str, Any]):
    """Makes an instance of the class that it holds, as tables of activations do."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


MADE = Makes(relu=nn.ReLU, tanh=nn.Tanh)


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return MADE["tanh"](x)


def test_a_table_that_makes_what_is_asked_for_stays_a_table_of_classes() -> None:
    with torch.no_grad():
        fused = fuse.compile(Looks())
        fused(torch.ones(3))
    assert fused.last_run is not None
    assert fused.last_run.fallbacks == ()
    assert list(dict.items(MADE)) == [("relu", nn.ReLU), ("tanh", nn.Tanh)]
    assert isinstance(MADE["relu"], nn.ReLU)


def changed_things() -> dict[str, tuple[Any, Callable[[Any, Tensor], Any]]]:
    """What a call changes, and how."""
    ordered = OrderedDict(a=1, b=2, c=3)
    by_key: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary({nn.Linear: [1]})
    slotted = type("Slotted", (), {"__slots__": ("a", "b")})()
    slotted.a = [1]
    registry = type("Registry", (), {"table": {"a": 1}, "count": 0})
    counted = type("Counted", (), {"__init__": lambda self: setattr(self, "n", 0)})()
    return {
        "a dictionary": ({"a": 1, "b": 2}, lambda d, x: (d.pop("a"), d.update(c=x))),
        "the order of a dictionary": ({"a": 1, "b": 2}, lambda d, x: d.update(a=d.pop("a"))),
        "an ordered dictionary": (ordered, lambda d, x: (d.move_to_end("a"), d.pop("b"))),
        "a default dictionary": (collections.defaultdict(list, a=[1]), lambda d, x: d["b"].append(x)),
        "a counter": (collections.Counter("aab"), lambda d, x: d.update("b")),
        "a list in a list": ([[1, 2], 3], lambda v, x: v[0].append(x)),
        "a set": ({1, 2}, lambda v, x: v.add(3)),
        "a deque": (deque([1, 2], maxlen=2), lambda v, x: v.append(x)),
        "a weak dictionary": (by_key, lambda d, x: d.__setitem__(nn.Conv1d, x)),
        "slots": (slotted, lambda v, x: (setattr(v, "b", x), v.a.append(1))),
        "a class": (registry, lambda v, x: (setattr(v, "count", v.count + 1), v.table.update(b=x))),
        "an object": (counted, lambda v, x: setattr(v, "n", x)),
        "a proxy of a dictionary": (types.MappingProxyType({"a": [1]}), lambda v, x: v["a"].append(x)),
    }


def snapshot(value: Any, seen: dict[int, Any] | None = None) -> dict[int, Any]:
    """Everything that a value leads to: what is in it, in order."""
    seen = {} if seen is None else seen
    if id(value) not in seen and not isinstance(value, (int, str, Tensor, types.FunctionType)):
        now = contents(value)
        held = attributes_of(value) if base_of(value) is object else None
        seen[id(value)] = value, now.keys, now.values, None if held is None else list(held.items())
        for part in (*now.values, *(held or {}).values()):
            snapshot(part, seen)
    return seen


def same_objects(one: dict[int, Any], other: dict[int, Any]) -> bool:
    def told(found: dict[int, Any]) -> Any:
        return {key: (keys, list(map(id, values)), held) for key, (_, keys, values, held) in found.items()}

    return told(one) == told(other)


@pytest.mark.parametrize("fails", [False, True], ids=["captured", "not captured"])
@pytest.mark.parametrize("where", ["attribute", "closure", "argument"])
@pytest.mark.parametrize("name", changed_things())
def test_what_a_call_changes_is_put_back_object_by_object(name: str, where: str, fails: bool) -> None:
    thing, change = changed_things()[name]

    def forward(x: Tensor, given: Any = None) -> Tensor:
        change(model.thing if where == "attribute" else thing if where == "closure" else given, x)
        if fails:
            raise ValueError("a fault of the user's")
        return x + 1

    model = Function(forward)
    if where == "attribute":
        model.thing = thing
    before = snapshot(thing)
    with pytest.raises(CaptureError, match="a fault of the user's" if fails else "forward changes"):
        capture(model, (torch.ones(3), thing) if where == "argument" else (torch.ones(3),), {})
    assert same_objects(before, snapshot(thing))


def test_what_is_left_of_a_dead_reference_stays_away() -> None:
    class Key:
        pass

    keys = [Key(), Key()]
    table = weakref.WeakKeyDictionary(dict.fromkeys(keys, 1))
    model = Function(lambda x: (table, x + 1)[1])
    before = reached_by(model)
    del keys[0]
    before.restore(lambda now, then: False)
    assert len(list(table)) == len(table) == 1


class Cached(nn.Module):
    """Fills a table at the first call of each size."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] not in CACHE:
            CACHE[x.shape[0]] = torch.arange(x.shape[0]) * 2.0
        return x + CACHE[x.shape[0]]


def test_a_cache_that_fills_at_the_first_call_is_filled_by_eager_and_the_next_call_is_captured() -> None:
    CACHE.clear()
    with torch.no_grad():
        fused = fuse.compile(Cached())
        for size in (3, 5):
            torch.testing.assert_close(fused(torch.ones(size)), 1 + torch.arange(size) * 2.0)
            assert fused.last_run is not None
            assert "CACHE" in fused.last_run.fallbacks[0].reason
            torch.testing.assert_close(fused(torch.ones(size)), 1 + torch.arange(size) * 2.0)
            assert fused.last_run.fallbacks == ()
    assert sorted(CACHE) == [3, 5]
    assert all(type(value) is Tensor for value in CACHE.values())


class Remembers(nn.Module):
    """What it keeps of its first call is no cache: it makes a difference to the later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "x" not in self.first:
            self.first["x"] = x.clone()
        return x - self.first["x"]


def test_what_is_kept_of_the_first_call_is_what_eager_kept() -> None:
    with torch.no_grad():
        fused = fuse.compile(Remembers())
        assert [fused(torch.full((2,), float(i))).tolist() for i in range(4)] == [[i, i] for i in range(4)]
    assert fused.last_run is not None
    assert fused.last_run.fallbacks == ()


class Property(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = 4

    @functools.cached_property
    def table(self) -> Tensor:
        return torch.arange(self.size) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


def test_a_cached_property_is_filled_by_eager() -> None:
    model = Property()
    with torch.no_grad():
        fused = fuse.compile(model)
        for _ in range(3):
            torch.testing.assert_close(fused(torch.ones(4)), torch.arange(4) + 0.5)
    assert fused.last_run is not None
    assert fused.last_run.fallbacks == ()
    assert type(model.table) is Tensor


@functools.lru_cache
def mask_of(size: int) -> Tensor:
    return torch.ones(size, size).tril()


@functools.cache
def name_of(size: int) -> str:
    return f"size {size}"


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        name_of(len(x))
        return x * mask_of(len(x))


def test_a_function_with_a_cache_keeps_no_stand_in() -> None:
    mask_of.cache_clear()
    name_of.cache_clear()
    mask_of(2)
    capture(Masked(), (torch.ones(3, 3),))
    assert mask_of.cache_info().currsize == 0  # it cannot drop one entry
    assert name_of.cache_info().currsize == 1
    torch.testing.assert_close(Masked()(torch.ones(3, 3)), torch.ones(3, 3).tril())
    size = mask_of.cache_info().currsize
    capture(Masked(), (torch.ones(3, 3),))
    assert mask_of.cache_info().currsize == size == 1


def backend_of(x: Tensor) -> str:
    """As libraries do that work with tensors of several others."""
    kind = type(x)
    if kind not in BY_CLASS:
        BY_CLASS[kind] = "torch"
    return BY_CLASS[kind]


def test_entries_for_the_class_of_stand_ins_are_taken_out_and_no_effect() -> None:
    BY_CLASS.clear()
    BY_CLASS[Tensor] = "torch"
    capture(Function(lambda x: x + len(backend_of(x))), (torch.ones(3),), {})
    assert {Tensor: "torch"} == BY_CLASS


@functools.singledispatch
def described(value: Any) -> int:
    return 1


@described.register
def _(value: Tensor) -> int:
    return 2


def test_a_function_that_dispatches_by_class_forgets_the_class_of_stand_ins() -> None:
    described(torch.ones(1))
    graph = capture(Function(lambda x: x + described(x)), (torch.ones(3),), {})
    assert len(graph.graph.nodes) == 3
    dispatch: Any = described.dispatch
    cells = [cell.cell_contents for cell in dispatch.__closure__]
    cache = next(content for content in cells if type(content) is weakref.WeakKeyDictionary)
    assert list(cache) == [Tensor]


def test_a_weakly_keyed_entry_for_a_stand_in_is_no_effect() -> None:
    packed = WeakIdKeyDictionary()

    def forward(x: Tensor) -> Tensor:
        packed[x] = 3
        return x * packed[x]

    capture(Function(forward), (torch.ones(3),), {})
    assert len(packed.data) == 0


def library() -> Any:
    """Modules of a package, one of which is loaded when it is first asked for, and a registry behind a class."""
    inner = types.ModuleType("a_library.inner")
    exec(
        "class Registry:\n"
        "    entries = {}\n"
        "    def note(self, x):\n"
        "        self.entries['x'] = x\n"
        "        return self.made(x)\n"
        "    @classmethod\n"
        "    def made(cls, x):\n"
        "        cls.last = x\n"
        "        return x * 2\n"
        "    def never_called(self):\n"
        "        return SECRET\n"
        "SECRET = [1]\n"
        "registry = Registry()\n",
        inner.__dict__,
    )

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            ASKED.append(name)
            raise AttributeError(name)

    outer = Lazy("a_library")
    outer.inner = inner
    return outer


a_library = library()


def test_a_registry_in_another_module_is_found_through_what_the_code_names() -> None:
    model = Function(lambda x: a_library.inner.registry.note(x))
    ASKED.clear()
    reached = reached_by(model)
    assert ASKED == []
    names = [held.name for held in reached.held]
    assert "Registry.entries" in names
    assert "SECRET" not in names
    with pytest.raises(CaptureError, match=r"forward changes Registry"):
        capture(model, (torch.ones(3),), {})
    assert a_library.inner.Registry.entries == {}
    assert not hasattr(a_library.inner.Registry, "last")


def test_a_name_that_forward_makes_is_gone_again() -> None:
    space: dict[str, Any] = {"__name__": "somewhere", "torch": torch}
    exec("def forward(x):\n    global LAST\n    LAST = x\n    return x + 1", space)
    with pytest.raises(CaptureError, match="forward changes LAST"):
        capture(Function(space["forward"]), (torch.ones(3),), {})
    assert "LAST" not in space


def test_what_is_put_into_an_argument_reaches_the_caller() -> None:
    def forward(x: Tensor, seen: list[Tensor], found: dict[str, Tensor]) -> Tensor:
        seen.append(x * 2)
        found["x"] = x
        return x + 1

    seen: list[Tensor] = []
    found: dict[str, Tensor] = {}
    fused = fuse.compile(Function(forward))
    with torch.no_grad():
        for _ in range(2):
            fused(torch.ones(3), seen, found)
            assert fused.last_run is not None
            assert not fused.last_run.fallbacks
    assert [value.tolist() for value in seen] == [[2.0] * 3] * 2
    assert list(found) == ["x"]


def test_hidden_modules_are_put_back_too() -> None:
    layer = nn.Linear(2, 2)

    def forward(x: Tensor) -> Any:
        layer.last = x
        return x + 1

    model = Function(forward)
    model.layers = [layer]
    before = dict(layer.__dict__)
    with pytest.raises(CaptureError, match="forward changes"):
        capture(model, (torch.ones(2),), {})
    assert layer.__dict__ == before


leaves = st.integers(-3, 3) | st.sampled_from(["a", "b"])
nests = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3).map(OrderedDict)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3).map(lambda d: made(dict, d))
        | st.lists(inner, max_size=3).map(lambda v: made(list, v))
        | st.lists(inner, max_size=3).map(deque)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=2).map(lambda d: types.SimpleNamespace(**d))
        | st.sets(leaves, max_size=3)
    ),
    max_leaves=8,
)


def disturb(value: Any, choose: Callable[[int], int], x: Tensor) -> None:
    """Change what a value leads to, here and there, past the methods of its class."""
    base = base_of(value)
    held = attributes_of(value) if base is object and not isinstance(value, (int, str)) else None
    parts = contents(value).values if base is not object else list((held or {}).values())
    for part in parts:
        disturb(part, choose, x)
    what = choose(4)
    if base in (dict, OrderedDict):
        keys = list(base.keys(value))
        if what == 1 and keys:
            base.__setitem__(value, keys[0], base.pop(value, keys[0]))
        elif what == 2 and keys:
            base.__delitem__(value, keys[-1])
        elif what == 3:
            base.__setitem__(value, "new", x)
    elif base in (list, deque):
        if what == 1:
            base.append(value, x)
        elif what == 2:
            base.clear(value)
        elif what == 3:
            base.reverse(value)
    elif base is set:
        (set.add(value, "new") if what == 1 else set.clear(value)) if what else None
    elif held is not None and what:
        held["new"] = x


@given(nests, st.lists(st.integers(0, 3), min_size=40, max_size=40))
@settings(max_examples=60, deadline=None)
def test_whatever_a_call_does_to_nests_of_containers_they_are_as_before(nest: Any, choices: list[int]) -> None:
    chosen = iter(choices * 10)

    def forward(x: Tensor) -> Tensor:
        disturb(nest, lambda n: next(chosen, 0) % n, x)
        return x + 1

    model = Function(forward)
    before = snapshot(nest)
    with contextlib.suppress(CaptureError):  # it says that forward changes something
        capture(model, (torch.ones(2),), {})
    after = snapshot(nest)
    assert same_objects(without_sets(before), without_sets(after))
    assert sets_of(before) == sets_of(after)


def without_sets(found: dict[int, Any]) -> dict[int, Any]:
    return {key: value for key, value in found.items() if base_of(value[0]) is not set}


def sets_of(found: dict[int, Any]) -> dict[int, set[int]]:
    """A set has no order to speak of: how full its table was is not seen from outside."""
    return {key: set(map(id, value[2])) for key, value in found.items() if base_of(value[0]) is set}


class Shared:
    """What another thread may change at any time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.items: list[int] = []


SHARED = Shared()


class UsesShared(nn.Module):
    """Meets another thread while it is captured."""

    def forward(self, x: Tensor) -> Tensor:
        other = threading.Thread(target=SHARED.items.append, args=(1,))
        other.start()
        other.join()
        return torch.tanh(x)


def test_what_threads_share_is_not_put_back() -> None:
    SHARED.items.clear()
    capture(UsesShared(), (torch.ones(3),))
    assert SHARED.items == [1]


class Locked(nn.Module):
    """A module that holds a lock is a module like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.calls.append(1)
        return torch.tanh(x)


def test_what_a_module_with_a_lock_changes_is_seen() -> None:
    model = Locked()
    with pytest.raises(CaptureError, match="calls"):
        capture(model, (torch.ones(3),))
    assert model.calls == []


class SetsRequiresGrad(nn.Module):
    def __init__(self, of: str) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(3, 3), of
        self.register_buffer("loss", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.of == "weight":
            self.linear.weight.requires_grad_(False)
        elif self.of == "buffer":
            self.loss.requires_grad_()
        elif self.of == "argument":
            x.requires_grad = True
        return torch.tanh(self.linear(x)) + self.loss


def states(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.filterwarnings("ignore:.*requires_grad")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("of", ["weight", "buffer", "argument", "nothing"])
def test_tensors_that_forward_makes_require_gradients_do(of: str, train: bool) -> None:
    """They are the caller's: such a call runs eager, and the next is fused where it finds them so; or an argument gets
    the flag before the call, where ``forward`` begins with it."""
    model = SetsRequiresGrad(of)
    fused, other = fuse.compile(model), copy.deepcopy(model)
    with torch.set_grad_enabled(train):
        for call in range(3):
            given = [torch.ones(2, 3) for _ in range(2)]
            result, expected = fused(given[0]), other(given[1])
            assert (result.requires_grad, given[0].requires_grad) == (expected.requires_grad, given[1].requires_grad)
            for mine, theirs in zip(states(model), states(other), strict=True):
                assert mine.requires_grad == theirs.requires_grad
            assert fused.last_run is not None
            eager = (of in ("weight", "buffer") and call == 0) or (of == "argument" and not train)
            assert ["sets requires_grad of" in f.reason for f in fused.last_run.fallbacks] == [True] * eager


LOADED = sys.modules


def _imports_late(x: Tensor) -> Tensor:
    import this_is_here  # type: ignore[import-not-found]

    return x * this_is_here.TWO * ("torch" in LOADED)


def test_modules_that_a_call_imports_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the code has a name of its own for the modules that are loaded."""
    (tmp_path / "this_is_here.py").write_text("TWO = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    fused = fuse.compile(Function(_imports_late))
    assert fused(torch.ones(2)).tolist() == [2.0, 2.0]
    assert fused.last_run.fallbacks == ()
    assert LOADED.pop("this_is_here").TWO == 2.0
