"""State guards: whether a compiled graph is valid for the current state of the model.

:class:`StateGuard` watches the identity of parameters and buffers, the module tree, ``training``, hooks and plain
attributes, with a few comparisons that run in C. While all dictionaries have their old versions, none is compared.
Otherwise dictionaries compare their values by identity first.

Not watched: globals and closures that ``forward`` reads, files, attributes of objects with ``__slots__``.
"""

from __future__ import annotations

import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuse.graph.signature import Attribute
from fuse.graph.state.object_contents import Contents, attributes_of, contents, module_of
from fuse.graph.state.reachable_state import GLOBAL_HOOKS
from fuse.graph.submodule_calls import HOOKS, ReplacedForward
from fuse.runtime.guards.call_guards import ArrayContents, same_value

_DICTS = (dict, OrderedDict)
_TENSOR_DICTS = ("_parameters", "_buffers")
_UNREAD = frozenset(
    (
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_non_persistent_buffers_set",
    )
)
"""Attributes of modules that no call reads, or that only describe hooks which are watched."""
Pairs = Sequence[tuple[dict[Any, Any], dict[Any, Any]]]
"""Pairs of an expected and a live dictionary."""
_NUMBERS = frozenset((int, float, bool, complex))
_PLAIN = _NUMBERS | {str, types.NoneType, torch.dtype, torch.device}
LARGEST_WATCHED = 1 << 16
"""Most bytes of an array in the model (numpy's, ``array``, ``bytearray``) whose contents are watched."""

MOST_RENEWALS = 64
"""Changes that were undone before the next call, after which a guard compares dictionaries in every call."""


class StateGuard:
    """A snapshot of everything in a model that ``forward`` may depend on, except the contents of tensors.

    ``unwatched`` are attributes that ``forward`` assigns, so that each call changes them.

    >>> model = nn.Linear(2, 2)
    >>> guard = StateGuard(model)
    >>> model.weight.data.zero_(); guard.holds()
    tensor([[0., 0.],
            [0., 0.]])
    True
    >>> _ = model.eval(); guard.holds()
    False
    """

    def __init__(
        self, model: nn.Module, watch_tensors: bool = True, unwatched: frozenset[Attribute] = frozenset()
    ) -> None:
        self.unwatched = unwatched
        self._pairs: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # (expected, live)
        self._partly: list[tuple[dict[Any, Any], dict[Any, Any], frozenset[str]]] = []  # (expected, live, but for)
        self._empty: list[Any] = [hooks for hooks in GLOBAL_HOOKS if not hooks]
        self._seen: set[int] = set()
        self._watch_tensors = watch_tensors
        self._left_out = {
            id(module): names
            for path, module in model.named_modules()
            if (names := frozenset(attribute.name for attribute in unwatched if attribute.owner == path))
        }
        self._pairs += [(dict(hooks), hooks) for hooks in GLOBAL_HOOKS if hooks]
        for module in model.modules():
            self._watch_module(module)
        self._versioned: _Versioned | None = None if self._partly else _Versioned.of(self._pairs, self._empty)
        if not self._compares():  # another thread made a change meanwhile
            self._versioned = None

    def holds(self) -> bool:
        """Whether nothing has changed since the snapshot."""
        if self._versioned is not None and self._versioned.hold():
            return True
        if any(self._empty) or not self._compares():
            return False
        if self._versioned is None:
            return True
        renewed = self._versioned.renewed(self._pairs, self._empty)
        if not self._compares():  # another thread made a change meanwhile
            return False
        self._versioned = renewed
        return True

    def changed(self) -> tuple[dict[Any, Any], str] | None:
        """A dictionary that has changed since the snapshot, such as the attributes of a module, and the name of the
        entry that did; None if none has."""
        for expected, live, left_out in (*((*pair, frozenset[str]()) for pair in self._pairs), *self._partly):
            for name in dict.fromkeys((*expected, *live)):
                now, had = live.get(name), expected.get(name)
                if name in left_out or type(now) is ReplacedForward or _is_as_before(had, now):
                    continue
                if now is not None and type(had) is dict and type(now) in _DICTS:  # parameters, buffers or submodules
                    inside = [key for key in {**had, **now} if not _is_as_before(had.get(key), now.get(key))]
                    return live, inside[0] if inside and type(inside[0]) is str else str(name)
                return live, str(name)
        return None

    def _compares(self) -> bool:
        """Whether all watched dictionaries have their expected contents."""
        try:
            for expected, live in self._pairs:
                if expected != live and expected != _without_replacement(live):
                    return False
            for expected, live, left_out in self._partly:
                watched = {name: value for name, value in live.items() if name not in left_out}
                if expected != watched and expected != _without_replacement(watched):
                    return False
        except Exception:  # two values that cannot be compared (tensors, arrays) are not the same object
            return False
        return True

    def _watch_module(self, module: nn.Module) -> None:
        if id(module) in self._seen or isinstance(module, torch.jit.ScriptModule):  # no program is made of these
            return
        self._seen.add(id(module))
        expected = {}
        own = not type(module).__module__.startswith("torch.nn.")
        left_out = self._left_out.get(id(module), frozenset())
        for name, value in module.__dict__.items():
            if name in left_out or type(value) is ReplacedForward:
                continue
            if (name in HOOKS and not value) or name in _UNREAD:
                self._empty += [value] if name in HOOKS else []
                expected[name] = value
            elif name in _TENSOR_DICTS and not self._watch_tensors:
                expected[name] = value
            elif name == "_modules":
                expected[name] = dict(value)
            elif name in _TENSOR_DICTS and left_out:
                expected[name] = _ANY
                others = {key: self._snapshot(held, own) for key, held in value.items() if key not in left_out}
                self._partly.append((others, value, left_out))
            else:
                expected[name] = self._snapshot(value, own)
        if left_out:
            self._partly.append((expected, module.__dict__, left_out))
        else:
            self._pairs.append((expected, module.__dict__))

    def _snapshot(self, value: Any, own: bool) -> Any:
        """A value that compares equal to ``value`` as long as that has not changed.

        ``own``: an attribute of the user's code, whose numbers must keep their type too.
        """
        kind = type(value)
        if own and kind in _NUMBERS:
            return _Number(value)
        if own and kind in (list, tuple) and _PLAIN.issuperset(map(type, value)):
            return _PlainItems(value)
        if issubclass(kind, Tensor):
            return _Same(value) if value.numel() == 1 else value
        if kind is list:
            return [self._snapshot(item, own) for item in value]
        if kind is dict or kind is OrderedDict:
            return {key: self._snapshot(item, own) for key, item in value.items()}
        if kind in (set, frozenset):
            return _PlainSet(value) if own else set(value)
        if kind is tuple:
            items = tuple(self._snapshot(item, own) for item in value)
            return value if all(map(operator.is_, items, value)) else items
        if issubclass(kind, (dict, list, set, deque)):  # the subclass may override how its contents are read
            held = contents(value)
            return _Holding(value, held, [self._snapshot(item, own) for item in held.values])
        if (memory := ArrayContents.of(value)) and len(memory.held.values[0]) <= LARGEST_WATCHED:
            return memory
        if issubclass(kind, nn.Module):
            for module in value.modules():
                self._watch_module(module)
        elif _is_plain_object(kind) and (inside := attributes_of(value)) is not None:
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._pairs.append(({key: self._snapshot(item, True) for key, item in inside.items()}, inside))
            return _Same(value)
        return value


_dict_version: Any = getattr(torch._C._dynamo.guards, "dict_version", None)
"""The version of a dictionary, which differs after each change."""


class _Versioned:
    """A check by version numbers that no dictionary has changed since it was compared.

    ``empty`` are the empty containers, ``filled`` the other dictionaries with their ``versions``. ``lists`` and other
    containers, which have no versions, are compared with ``expected_lists``.
    """

    def __init__(self, pairs: Pairs, empty: Sequence[Any], renewals: int) -> None:
        self.renewals = renewals
        self.empty: list[Any] = list(empty)
        self.filled: list[dict[Any, Any]] = []
        self.expected_lists: list[Any] = []
        self.lists: list[Any] = []
        for expected, live in pairs:
            self._watch(expected, live)
        self.versions = list(map(_dict_version, self.filled))
        self.hold = self._comparison()

    @staticmethod
    def of(pairs: Pairs, empty: Sequence[Any], renewals: int = 0) -> _Versioned | None:
        """The check for pairs of equal dictionaries and empty containers; None if there are no versions."""
        try:
            return _Versioned(pairs, empty, renewals)
        except Exception:  # torch counts no versions with this Python, or another thread makes a change
            return None

    def _watch(self, expected: Any, live: Any) -> None:
        if expected is live:
            return
        if type(expected) is dict:
            (self.filled if live else self.empty).append(live)
            for name, value in expected.items():
                self._watch(value, live[name])
        elif type(expected) is tuple:
            for item, held in zip(expected, live, strict=True):
                self._watch(item, held)
        elif isinstance(expected, (list, set, _PlainSet, _Holding, ArrayContents)) or type(live) is list:
            self.expected_lists.append(expected)
            self.lists.append(live)

    def _comparison(self) -> Callable[[], bool]:
        """A function that tells whether nothing has changed."""
        empty, filled, versions, version = self.empty, self.filled, self.versions, _dict_version
        expected, lists = self.expected_lists, self.lists

        def hold() -> bool:
            if any(empty) or list(map(version, filled)) != versions:
                return False
            try:
                return expected == lists
            except Exception:  # tensors, arrays
                return False

        return hold

    def renewed(self, pairs: Pairs, empty: Sequence[Any]) -> _Versioned | None:
        """A new check after changes that were undone; None after ``MOST_RENEWALS`` such changes."""
        return _Versioned.of(pairs, empty, self.renewals + 1) if self.renewals < MOST_RENEWALS else None


class _Number:
    """Compares equal to the same number of the same type: 2 == 2.0 == True, but type promotion differs."""

    __slots__ = ("value",)

    def __init__(self, value: complex) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return same_value(other, self.value)


class _PlainItems:
    """Compares equal to a list or tuple of equal plain items of the same types."""

    __slots__ = ("held", "ids")

    def __init__(self, held: list[Any] | tuple[Any, ...]) -> None:
        self.held = type(held)(held)
        self.ids = list(map(id, held))

    def __eq__(self, other: Any) -> bool:
        if type(other) is not type(self.held) or len(other) != len(self.held):
            return False
        return list(map(id, other)) == self.ids or all(map(same_value, other, self.held))


class _PlainSet:
    """Compares equal to a set of equal elements, numbers in them of the same types."""

    __slots__ = ("elements", "kind")

    def __init__(self, held: set[Any] | frozenset[Any]) -> None:
        self.kind = type(held)
        self.elements = _exact(held)

    def __eq__(self, other: object) -> bool:
        return type(other) is self.kind and _exact(other) == self.elements


def _exact(value: Any) -> Any:
    """A value that is equal for equal values whose numbers have the same types and signs.

    >>> _exact((2, {0.0})) == _exact((2, {0.0})), _exact({2}) == _exact({2.0}), _exact({0.0}) == _exact({-0.0})
    (True, False, False)
    """
    if type(value) in _NUMBERS:
        return type(value), repr(value)
    if type(value) in (set, frozenset, tuple):
        return type(value), (tuple if type(value) is tuple else frozenset)(map(_exact, value))
    return value


class _Same:
    """Compares equal to one object only: a tensor of one element would equal another tensor with the same number, and a
    configuration an equal copy of it, whose attributes are not watched."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return other is self.value


class _Holding:
    """Compares equal to one container object only, while its contents are unchanged (``inside`` are snapshots of them).

    Methods of the container's class are not called.
    """

    __slots__ = ("inside", "keys", "value")

    def __init__(self, value: object, held: Contents, inside: list[Any]) -> None:
        self.value = value
        self.keys = held.keys
        self.inside = inside

    def __eq__(self, other: object) -> bool:
        now = contents(other)
        same_keys = now.keys is self.keys or list(map(id, now.keys or ())) == list(map(id, self.keys or ()))
        return other is self.value and same_keys and self.inside == now.values


class _Any:
    """Compares equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True


_ANY = _Any()


def _is_as_before(expected: Any, live: Any) -> bool:
    try:
        return bool([expected] == [live])  # which compares identities first
    except Exception:  # two tensors
        return False


def _is_plain_object(kind: type) -> bool:
    """Whether objects of a class hold attributes of the user's, such as a configuration or an activation."""
    other = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)
    return not (issubclass(kind, other) or str(module_of(kind)).startswith("fuse."))


def _without_replacement(own: dict[Any, Any]) -> dict[Any, Any] | None:
    """A module's attributes without a ``forward`` that another thread replaced for itself; None if none did."""
    if type(own.get("forward")) is not ReplacedForward:
        return None
    return {name: value for name, value in own.items() if name != "forward"}
