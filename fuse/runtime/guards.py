"""Guards: checks at every call that a compiled graph is still valid.

Two guards. :class:`StateGuard` watches the model: which tensors are its parameters and buffers, the module tree,
``training``, hooks and plain attributes. :class:`CallGuard` watches one call: layouts of tensors, values of other
arguments, context variables that the code names, the modes torch is in. Both are made of a few comparisons that run in
C: dictionaries compare their values by identity first, and torch's own ``TensorGuards`` checks type, dtype, device,
layout, ``requires_grad``, dispatch keys (autocast and inference mode among them), and that no tensor occurs twice.

Not watched: globals and closures that ``forward`` reads, files, the inside of objects with ``__slots__``.
"""

from __future__ import annotations

import math
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _module
from torch.utils import _pytree as pytree

from fuse.devices import HOST, autocast_modes
from fuse.graph.contents import Contents, attributes_of, base_of, class_dict, contents, memory_kinds, module_of, mro
from fuse.graph.diverting import ReplacedForward
from fuse.graph.outside import value_of
from fuse.graph.signature import Attribute, InputSpec, held_tensor

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    _module._global_forward_hooks,
    _module._global_forward_pre_hooks,
    _module._global_backward_hooks,
    _module._global_backward_pre_hooks,
)
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
"""Containers of modules that no call reads, or only of hooks that are watched themselves."""
LARGEST_WATCHED = 1 << 16
"""Bytes of an array that the model holds (numpy's, ``array``, ``bytearray``) up to which its numbers are watched."""

MOST_RENEWALS = 64
"""Changes that were taken back by the next call, after which a guard compares what dictionaries hold in every call."""

_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many there are: a default device is one of them, to be asked for only then."""
_grad_mode, _inference_mode, _default_dtype = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.get_default_dtype,
)
_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms

_PLAIN_LEAVES = frozenset((Tensor, nn.Parameter, int, float, bool, str, types.NoneType, torch.dtype, torch.device))


class StateGuard:
    """A snapshot of everything in a model that ``forward`` may depend on, other than the tensors' contents.

    ``unwatched`` are attributes that ``forward`` assigns: each call changes them.

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
        self._empty: list[Any] = list(_GLOBAL_HOOKS)
        self._numbers: list[tuple[dict[str, Any], str, Any]] = []
        self._seen: set[int] = set()
        self._watch_tensors = watch_tensors
        self._left_out = {
            id(module): names
            for path, module in model.named_modules()
            if (names := frozenset(attribute.name for attribute in unwatched if attribute.owner == path))
        }
        for module in model.modules():
            self._watch_module(module)
        self._versioned: _Versioned | None = None if self._partly else _Versioned.of(self._pairs)
        if not self._compares():  # another thread made a change meanwhile
            self._versioned = None

    def holds(self) -> bool:
        """Whether nothing has changed since the snapshot."""
        if any(self._empty):
            return False
        if self._versioned is None:
            return self._compares()
        if self._versioned.holds():
            return True
        if not self._compares():
            return False
        renewed = self._versioned.renewed(self._pairs)
        if not self._compares():  # another thread made a change meanwhile
            return False
        self._versioned = renewed
        return True

    def _compares(self) -> bool:
        """Whether all that is watched is what it was."""
        try:
            for expected, live in self._pairs:
                if expected != live and expected != _without_replacement(live):
                    return False
            for expected, live, left_out in self._partly:
                watched = {name: value for name, value in live.items() if name not in left_out}
                if expected != watched and expected != _without_replacement(watched):
                    return False
            for owner, name, value in self._numbers:
                if owner[name] is not value and not same_value(owner[name], value):
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
            if (name in _HOOKS and not value) or name in _UNREAD:
                self._empty += [value] if name in _HOOKS else []
                expected[name] = value
            elif name in _TENSOR_DICTS and not self._watch_tensors:
                expected[name] = value
            elif name == "_modules":
                expected[name] = dict(value)
            elif name in _TENSOR_DICTS and left_out:
                expected[name] = _ANY
                others = {key: self._snapshot(held) for key, held in value.items() if key not in left_out}
                self._partly.append((others, value, left_out))
            else:
                expected[name] = self._snapshot(value)
                if own and type(value) in (int, float):
                    # 2 == 2.0 == True, but they promote differently
                    self._numbers.append((module.__dict__, name, value))
        if left_out:
            self._partly.append((expected, module.__dict__, left_out))
        else:
            self._pairs.append((expected, module.__dict__))

    def _snapshot(self, value: Any) -> Any:
        """A value that compares equal to ``value`` as long as that has not changed."""
        kind = type(value)
        if issubclass(kind, Tensor):
            return _Same(value) if value.numel() == 1 else value
        if kind is list:
            return [self._snapshot(item) for item in value]
        if kind is dict or kind is OrderedDict:
            return {key: self._snapshot(item) for key, item in value.items()}
        if kind is set:
            return set(value)
        if kind is tuple:
            items = tuple(self._snapshot(item) for item in value)
            return value if all(map(operator.is_, items, value)) else items
        if issubclass(kind, (dict, list, set, deque)):  # its class may have its own idea of what is in it
            held = contents(value)
            return _Holding(value, held, [self._snapshot(item) for item in held.values])
        if (memory := _Memory.of(value)) and len(memory.held.values[0]) <= LARGEST_WATCHED:
            return memory
        if issubclass(kind, nn.Module):
            for module in value.modules():
                self._watch_module(module)
        elif _is_plain_object(kind) and id(value) not in self._seen and (own := attributes_of(value)) is not None:
            self._seen.add(id(value))
            self._pairs.append(({key: self._snapshot(item) for key, item in own.items()}, own))
        return value


_dict_version: Any = getattr(torch._C._dynamo.guards, "dict_version", None)
"""A number that is another after each change of a dictionary."""


class _Versioned:
    """That no dictionary has changed since it was compared, told without a look at what it holds.

    ``empty`` are the dictionaries that hold nothing, ``filled`` the others, with their ``versions``. ``lists`` and the
    like, of which nobody counts versions, are compared with what they should hold.
    """

    def __init__(self, pairs: Sequence[tuple[dict[Any, Any], dict[Any, Any]]], renewals: int) -> None:
        self.renewals = renewals
        self.empty: list[dict[Any, Any]] = []
        self.filled: list[dict[Any, Any]] = []
        self.expected_lists: list[Any] = []
        self.lists: list[Any] = []
        for expected, live in pairs:
            self._watch(expected, live)
        self.versions = list(map(_dict_version, self.filled))

    @staticmethod
    def of(pairs: Sequence[tuple[dict[Any, Any], dict[Any, Any]]], renewals: int = 0) -> _Versioned | None:
        """For dictionaries that hold what is expected of them."""
        try:
            return _Versioned(pairs, renewals)
        except Exception:  # torch counts no versions with this Python, or another thread makes a change
            return None

    def _watch(self, expected: Any, live: Any) -> None:
        if expected is live:
            return
        if type(expected) is dict:
            (self.filled if live else self.empty).append(live)
            for name, value in expected.items():
                self._watch(value, live[name])
        elif isinstance(expected, (list, set, _Holding, _Memory)) or (isinstance(expected, tuple) and expected):
            self.expected_lists.append(expected)
            self.lists.append(live)

    def holds(self) -> bool:
        """Whether everything is what it was."""
        if any(self.empty) or list(map(_dict_version, self.filled)) != self.versions:
            return False
        try:
            return self.expected_lists == self.lists
        except Exception:  # tensors, arrays
            return False

    def renewed(self, pairs: Sequence[tuple[dict[Any, Any], dict[Any, Any]]]) -> _Versioned | None:
        """The same after changes that were taken back; nothing where they are made again and again."""
        return _Versioned.of(pairs, self.renewals + 1) if self.renewals < MOST_RENEWALS else None


class _Same:
    """Equal to one object only: a tensor of one element would otherwise equal another that holds the same number."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return other is self.value


class _Holding:
    """Equal to one container only, as long as it holds what it held (``inside`` are snapshots of it); its class is not
    asked."""

    __slots__ = ("inside", "keys", "value")

    def __init__(self, value: object, held: Contents, inside: list[Any]) -> None:
        self.value = value
        self.keys = held.keys
        self.inside = inside

    def __eq__(self, other: object) -> bool:
        now = contents(other)
        same_keys = now.keys is self.keys or list(map(id, now.keys or ())) == list(map(id, self.keys or ()))
        return other is self.value and same_keys and self.inside == now.values


class _Memory:
    """Equal to one array only, as long as it holds the numbers that it held."""

    __slots__ = ("held", "value")

    def __init__(self, value: object, held: Contents) -> None:
        self.value = value
        self.held = held

    @staticmethod
    def of(value: object) -> _Memory | None:
        """For an array that can be compared."""
        base = base_of(value)
        return _Memory(value, contents(value, base)) if base in memory_kinds() else None

    def __eq__(self, other: object) -> bool:
        return other is self.value and self.held.is_of(other)


class _Any:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True


_ANY = _Any()


def _is_plain_object(kind: type) -> bool:
    """Whether objects of a class hold settings, such as a configuration; nothing of fuse's own, as a fused part of the
    model holds, and nothing that can be called."""
    callables = any("__call__" in class_dict(base) for base in mro(kind))
    other = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)
    return not (callables or issubclass(kind, other) or str(module_of(kind)).startswith("fuse."))


def same_value(a: object, b: object) -> bool:
    """Equal and of one type; zeros by sign, NaN equal to NaN.

    >>> same_value(1, 1), same_value(1, True), same_value(0.0, -0.0), same_value(math.nan, float("nan"))
    (True, False, False, True)
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return isinstance(b, _Memory) and b == a
    if isinstance(a, float) and isinstance(b, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    try:
        return bool(a == b)
    except Exception:  # arrays and the like: only the same object is the same
        return False


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], pytree.TreeSpec | None]:
    """The leaves of a call's arguments in capture's order; the structure is None for plain positional leaves.

    >>> flatten((torch.ones(1), 2), {})
    ((tensor([1.]), 2), None)
    """
    if not kwargs and _PLAIN_LEAVES.issuperset(map(type, args)):
        return args, None
    return pytree.tree_flatten((args, kwargs))


def modes() -> tuple[Any, ...]:
    """The modes of torch that decide what a call computes and returns."""
    return (
        _grad_mode(),
        _inference_mode(),
        autocast_modes(),
        _default_dtype(),
        torch.get_default_device() if _function_modes() else HOST,
        _deterministic(),
        forward_ad._current_level >= 0,
    )


def _without_replacement(own: dict[Any, Any]) -> dict[Any, Any] | None:
    """The attributes of a module of which another thread replaced ``forward`` for itself; None where none did."""
    if type(own.get("forward")) is not ReplacedForward:
        return None
    return {name: value for name, value in own.items() if name != "forward"}


@dataclass(frozen=True, eq=False)
class CallGuard:
    """Which calls one compiled variant serves.

    ``pick`` selects the tensors of the placeholders from ``(*leaves, *state)``; ``state`` are the tensors that do not
    come with the call. ``repeated`` are pairs of leaves that are one tensor, ``pinned`` leaves that are a tensor of
    the model. ``context`` are context variables and their values.
    """

    count: int
    spec: pytree.TreeSpec | None
    modes: tuple[Any, ...]
    values: tuple[tuple[int, Any], ...]
    state: tuple[Tensor, ...]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    check: Callable[..., bool]
    repeated: tuple[tuple[int, int], ...]
    pinned: tuple[tuple[int, Tensor], ...]
    context: tuple[tuple[ContextVar[Any], Any], ...] = ()

    def match(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec | None, current_modes: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """The tensors of the placeholders if the call is one of these, else None."""
        if len(leaves) != self.count or current_modes != self.modes or spec != self.spec:
            return None
        for index, value in self.values:
            if leaves[index] is not value and not same_value(leaves[index], value):
                return None
        for first, second in self.repeated:
            if leaves[first] is not leaves[second]:
                return None
        for index, tensor in self.pinned:
            if leaves[index] is not tensor:
                return None
        tensors = self.pick((*leaves, *self.state))
        return tensors if self.check(*tensors) else None

    def differs_in_sizes(self, other: CallGuard) -> bool:
        """Whether calls of these two guards differ in nothing but what their tensors are."""
        return (
            (self.count, self.spec, self.modes, self.repeated) == (other.count, other.spec, other.modes, other.repeated)
            and all(i == j and same_value(a, b) for (i, a), (j, b) in zip(self.values, other.values, strict=True))
            and [(i, id(tensor)) for i, tensor in self.pinned] == [(i, id(tensor)) for i, tensor in other.pinned]
        )

    def in_context(self) -> bool:
        """Whether the context variables have the values that they had."""
        for variable, value in self.context:
            now = value_of(variable)
            if now is not value and not (type(value) in _PLAIN_LEAVES and same_value(now, value)):
                return False
        return True


def sources_of(inputs: Sequence[InputSpec], model: nn.Module, count: int) -> list[int | Tensor]:
    """Where the tensors of placeholders come from: a position among the leaves of the call, of which there are
    ``count``, and of the attributes that it reads; or a tensor that stays."""
    offsets = {"argument": 0, "attribute": count}
    return [offsets[spec.kind] + spec.index if spec.kind in offsets else held_tensor(spec, model) for spec in inputs]


def call_guard(
    leaves: Sequence[Any],
    spec: pytree.TreeSpec | None,
    sources: Sequence[int | Tensor],
    model_tensors: Sequence[Tensor],
    context: tuple[tuple[ContextVar[Any], Any], ...] = (),
) -> CallGuard:
    """A guard for calls like this one.

    ``sources`` says for every placeholder where its tensor comes from: the position of a leaf, or a tensor that
    stays. ``context`` is what the call may read of context variables.
    """
    state = tuple(source for source in sources if isinstance(source, Tensor))
    positions, next_state = [], len(leaves)
    for source in sources:
        if isinstance(source, Tensor):
            positions.append(next_state)
            next_state += 1
        else:
            positions.append(source)
    first: dict[int, int] = {}
    repeated = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and first.setdefault(id(leaf), index) != index:
            repeated.append((first[id(leaf)], index))
    known = {id(tensor): tensor for tensor in model_tensors}
    pick = picker(positions)
    return CallGuard(
        count=len(leaves),
        spec=spec,
        modes=modes(),
        values=tuple((i, _Memory.of(leaf) or leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)),
        state=state,
        pick=pick,
        check=_tensor_check(pick((*leaves, *state))),
        repeated=tuple(repeated),
        pinned=tuple((i, known[id(leaf)]) for i, leaf in enumerate(leaves) if id(leaf) in known),
        context=context,
    )


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda pool: tuple(pool[i] for i in positions)


def _tensor_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """``TensorGuards.check`` for these tensors. The guard holds no tensor, and an empty one answers False."""
    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return check if tensors else lambda: True


def overlaps(tensors: Sequence[Tensor], written: frozenset[int]) -> bool:
    """Whether a tensor that is written shares memory with another one.

    >>> x = torch.zeros(8)
    >>> overlaps([x[:4], x[4:]], frozenset({0})), overlaps([x[:5], x[4:]], frozenset({0}))
    (False, True)
    """
    spans = []
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.itemsize, index in written))
    spans.sort()
    furthest = furthest_written = 0
    for start, stop, is_written in spans:
        if start < furthest_written or (is_written and start < furthest):
            return True
        furthest = max(furthest, stop)
        if is_written:
            furthest_written = max(furthest_written, stop)
    return False
