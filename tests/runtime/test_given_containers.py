"""Models that change lists, dictionaries and objects among their arguments: compiled calls leave what eager's leave."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.graph.structure.arguments import flatten_arguments
from tests.samples import Holder


class Cache:
    """Written like the caches of the transformers library."""

    def __init__(self) -> None:
        self.key_cache: list[Tensor] = []
        self.seen = 0

    def update(self, key: Tensor, layer: int) -> Tensor:
        if layer == len(self.key_cache):
            self.key_cache.append(key)
        else:
            self.key_cache[layer] = torch.cat([self.key_cache[layer], key], dim=0)
        return self.key_cache[layer]


@dataclasses.dataclass
class Memory:
    k: Tensor | None = None
    table: dict[int, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Answer:
    y: Tensor
    past: Any


class Pair(NamedTuple):
    a: list[Tensor]
    b: dict[str, Tensor]


class Frozen:
    __slots__ = ("k",)

    def __init__(self, k: Tensor) -> None:
        self.k = k


def _cat_in_a_list(s: Any, x: Tensor, past: list[Tensor]) -> Tensor:
    past[0] = torch.cat([past[0], x])
    return past[0].sum(0)


def _swap(s: Any, x: Tensor, past: list[list[Tensor]]) -> Tensor:
    past[0], past[1] = past[1], past[0]
    past[0].append(x * 2)
    return past[1][0] + x


def _in_place(s: Any, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
    cache["k"][:, 1] = x[:, 0]
    cache["v"].add_(1)
    cache["view"] = cache["k"][:, :2]
    cache["same"] = cache["k"]
    return cache["view"] * 2


def _aliases(s: Any, x: Tensor, cache: dict[str, Any]) -> tuple[Tensor, Any]:
    y = x.exp()
    cache["y"], cache["part"], cache["both"] = y, y[1:], (y, [x])
    return y, cache


def _grown(s: Any, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
    for layer in range(2):
        x = s.layer(cache.update(x, layer))[-1:].expand(2, 4).contiguous()
    return x, cache


def _removed(s: Any, x: Tensor, past: list[Tensor], table: dict[str, Any]) -> Tensor:
    first = past.pop(0)
    past.insert(1, x + first)
    del table["a"]
    table.setdefault("n", []).append(x)
    table["count"] = 7
    return first * 2


def _memory(s: Any, x: Tensor, memory: Memory) -> Answer:
    memory.k = x if memory.k is None else torch.cat([memory.k, x])
    memory.table[len(memory.table)] = memory.k * 2
    memory.extra = "new"  # type: ignore[attr-defined]
    return Answer(memory.k.sum(0), [memory, memory.table])


def _of_kinds(s: Any, x: Tensor, pair: Pair, ordered: Any, default: Any) -> Tensor:
    pair.a.append(x)
    pair.b.update(u=x + 1)
    ordered.move_to_end("a")
    default["z"].append(x * 3)
    return x - 1


def _read_only(s: Any, x: Tensor, cache: Cache) -> tuple[Tensor, Any]:
    return x + cache.key_cache[0], cache.key_cache


def _t(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 4)))


def _filled() -> Cache:
    cache = Cache()
    cache.key_cache = [_t(), _t()]
    return cache


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "a list": (_cat_in_a_list, lambda: ([_t()],)),
    "lists that swap": (_swap, lambda: ([[_t()], [_t(), _t()]],)),
    "writes in place": (_in_place, lambda: ({"k": _t(2, 3), "v": _t(5)},)),
    "aliases": (_aliases, lambda: ({"old": _t()},)),
    "an empty cache": (_grown, lambda: (Cache(),)),
    "a cache": (_grown, lambda: (_filled(),)),
    "removed": (_removed, lambda: ([_t(), _t()], {"a": _t(), "b": 1})),
    "a dataclass": (_memory, lambda: (Memory(),)),
    "a filled dataclass": (_memory, lambda: (Memory(_t(), {0: _t()}),)),
    "kinds": (_of_kinds, lambda: (Pair([_t()], {"u": _t()}), OrderedDict(a=_t(), b=_t()), defaultdict(list, z=[1]))),
    "only returned": (_read_only, lambda: (_filled(),)),
}


class Names(dict[int, str]):
    """Names of objects and of memory, by address; ``alive`` keeps them from being reused."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Any] = []

    def add(self, value: Any, name: str) -> None:
        """Name all containers, tensors and memory that ``value`` leads to, if they have no name yet."""
        self.alive.append(value)
        if isinstance(value, Tensor):
            self.setdefault(id(value), name)
            self.setdefault(value.untyped_storage()._cdata, f"memory of {name}")
        elif isinstance(value, tuple):
            for number, part in enumerate(value):
                self.add(part, f"{name}/{number}")
        elif id(value) not in self and (isinstance(value, (list, dict)) or hasattr(value, "__dict__")):
            self[id(value)] = name
            inside = value if isinstance(value, (list, dict)) else vars(value)
            for key, part in inside.items() if isinstance(inside, dict) else enumerate(inside):
                self.add(part, f"{name}/{key}")


def described(value: Any, names: Names) -> Any:
    """``value`` with the names of its objects and of their memory."""
    names.add(value, "new")
    if isinstance(value, Tensor):
        layout = tuple(value.shape), value.stride(), value.storage_offset(), value.requires_grad
        return names[id(value)], names[value.untyped_storage()._cdata], layout, value.detach().tolist()
    if isinstance(value, dict):
        return names[id(value)], str(type(value)), [(key, described(part, names)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return names[id(value)] if isinstance(value, list) else "", [described(part, names) for part in value]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return names[id(value)], str(type(value)), [(k, described(part, names)) for k, part in vars(value).items()]
    return value


def after(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """What a call leaves: its result and arguments, and which objects and memory are those from before."""
    names = Names()
    names.add((args, kwargs), "old")
    old = [value for value in names.alive if isinstance(value, Tensor)]
    result = model(*args, **kwargs)
    return described((result, args, kwargs, old), names), result


def agree(one: Any, other: Any) -> None:
    """Numbers may differ by rounding, everything else is equal."""
    if isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other)
        assert len(one) == len(other), (one, other)
        for a, b in zip(one, other, strict=True):
            agree(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by name"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_call_changes_is_as_in_eager(name: str, training: bool, by_name: bool) -> None:
    function, make = CHANGES[name]
    model = Holder(function)
    model.layer = nn.Linear(4, 4)
    fused = fuse.compile(model)
    with torch.set_grad_enabled(training), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            args = (_t() if name != "writes in place" else _t(2, 3), *make())
            twin = copy.deepcopy(args)
            names = ("x", *function.__code__.co_varnames[2 : function.__code__.co_argcount])
            given = [((), dict(zip(names, one, strict=True))) if by_name else (one, {}) for one in (args, twin)]
            if by_name:
                model.forward = lambda _f=function, **kwargs: _f(model, **kwargs)
            (found, _), (expected, _) = after(fused, *given[0]), after(model, *given[1])
            assert fused.last_run is not None
            assert not fused.last_run.fallbacks
            agree(found, expected)


def _appends(s: Any, x: Tensor, past: list[Tensor], *_: Any) -> Tensor:
    past.append(x * 2)
    return x + len(past)


class Owns:
    """Is told of each attribute."""

    def __init__(self, k: Tensor) -> None:
        self.k = k

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _assigns(s: Any, x: Tensor, one: Any) -> Tensor:
    one.k = torch.cat([one.k, x])
    return one.k.sum(0)


def _twice() -> tuple[Any, ...]:
    past = [_t()]
    return past, past


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], str]] = {
    "a class with its own way": (_assigns, lambda: (Owns(_t()),), "forward changes argument"),
    "slots": (_assigns, lambda: (Frozen(_t()),), "forward changes"),
    "one list twice": (_appends, _twice, "given twice"),
    "a key that is a tensor": (
        lambda s, x, d: (d.__setitem__(x, 1), x * 2)[1],
        lambda: ({"a": _t()},),
        "its new key is a",
    ),
    "a new object": (lambda s, x, d: (d.append(iter([x])), x * 2)[1], lambda: ([_t()],), "a graph cannot make a new"),
    "a set": (lambda s, x, d: (d.add(3), x * 2)[1], lambda: ({1, 2},), "forward changes argument"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_filled_in_runs_eager_and_says_so(name: str) -> None:
    function, make, reason = REFUSED[name]
    model = Holder(function)
    fused = fuse.compile(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            args = (_t(), *make())
            twin = copy.deepcopy(args)
            torch.testing.assert_close(fused(*args), model(*twin))
            assert fused.last_run is not None
            assert reason in fused.last_run.fallbacks[0].reason


def test_a_list_that_the_model_holds_or_that_is_given_twice_is_not_taken_for_another() -> None:
    def forward(s: Any, x: Tensor, past: list[Tensor], other: list[Tensor]) -> Tensor:
        past[0] = x * 2
        return s.held[0] + other[0]

    model = Holder(forward, held=[torch.zeros(2, 4)])
    fused = fuse.compile(model)
    x = _t()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            torch.testing.assert_close(fused(x, [x], [x]), x)
            assert fused.last_run is not None
            assert not fused.last_run.fallbacks
        one = [x]
        torch.testing.assert_close(fused(x, one, one), x * 2)
        assert "twice" in fused.last_run.fallbacks[0].reason
        torch.testing.assert_close(fused(x, model.held, [x]), x * 3)
        assert fused.last_run.fallbacks
        torch.testing.assert_close(model.held[0], x * 2)


def test_a_call_that_raises_leaves_what_eager_leaves() -> None:
    def forward(s: Any, x: Tensor, past: list[Tensor]) -> Tensor:
        past.append(x)
        return torch.linalg.inv(x)

    model = Holder(forward)
    fused = fuse.compile(model)
    with torch.no_grad():
        past: list[Tensor] = []
        for _ in range(2):
            fused(torch.eye(3), past := [])
        for compiled in (fused, model):
            with pytest.raises(RuntimeError, match="singular"):
                compiled(torch.zeros(3, 3), past := [])
            assert len(past) == 1


def test_a_cache_that_grows_is_captured_at_few_sizes() -> None:
    model = Holder(_grown)
    model.layer = nn.Linear(4, 4)
    fused = fuse.compile(model)
    captured, resized = 0, 0
    with torch.no_grad():
        mine, theirs = Cache(), Cache()
        for _ in range(9):
            x = torch.randn(2, 4)
            before = fused.compiled
            torch.testing.assert_close(fused(x, mine)[0], model(x, theirs)[0])
            assert fused.last_run is not None
            if fused.compiled is not None and fused.compiled is not before:
                captured += not fused.compiled.resized
                resized += fused.compiled.resized
            for one, other in zip(mine.key_cache, theirs.key_cache, strict=True):
                torch.testing.assert_close(one, other)
    assert captured < 9
    assert resized > 0


def test_gradients_flow_through_the_entries() -> None:
    model = Holder(_grown)
    model.layer = nn.Linear(4, 4)
    fused = fuse.compile(model)
    found = []
    for run in (fused, model):
        for _ in range(2):
            model.zero_grad()
            cache = Cache()
            torch.manual_seed(0)
            total = torch.zeros(())
            for _ in range(3):
                total = total + run(torch.randn(2, 4), cache)[0].sum()
            (total + sum(key.square().sum() for key in cache.key_cache)).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == 2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_cache_made_in_forward_is_made_anew() -> None:
    def forward(s: Any, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        cache = Cache() if cache is None else cache
        return cache.update(x * 2, 0), cache

    fused = fuse.compile(Holder(forward))
    with torch.no_grad():
        made = [fused(_t())[1] for _ in range(3)]
        assert fused.last_run is not None
        assert not fused.last_run.fallbacks
        assert len({id(one) for one in made}) == len({id(one.key_cache) for one in made}) == 3
        x = _t()
        result, same = fused(x, made[0])
        assert same is made[0]
        assert result is same.key_cache[0]


@pytest.mark.parametrize("name", ["a cache", "a list", "writes in place", "a filled dataclass"])
def test_the_oracle_compares_containers_and_runs_a_second_call_on_what_they_held(name: str) -> None:
    function, make = CHANGES[name]
    model = Holder(function)
    model.layer = nn.Linear(4, 4)
    report = check(model, (_t(2, 3) if name == "writes in place" else _t(), *make()))
    assert report.passed, report
    assert not report.fallbacks


def test_the_oracle_misses_a_container_that_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuse.runtime.variants.mutated_attributes.fill", lambda container, values: None)
    model = Holder(_cat_in_a_list)
    assert not check(model, (_t(), [_t()])).passed


def test_an_object_with_very_many_entries_stays_one_leaf() -> None:
    cache = _filled()
    cache.numbers = list(range(5000))  # type: ignore[attr-defined]
    assert flatten_arguments((cache,), {})[0] == [cache]
