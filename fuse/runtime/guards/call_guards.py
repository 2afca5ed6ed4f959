"""Call guards: whether a compiled variant serves a call.

:class:`CallGuard` checks the layouts of tensors, the values of other arguments, context variables that the code names,
and torch's modes. torch's own ``TensorGuards`` checks type, dtype, device, layout, ``requires_grad``, dispatch keys
(autocast and inference mode among them), and that no tensor occurs twice. The guard of the model is in
``state_guard.py``.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from fuse.devices import HOST, autocast_modes
from fuse.graph.signature import InputSpec, held_tensor
from fuse.graph.state.object_contents import Contents, base_of, contents, memory_kinds
from fuse.graph.state.reachable_state import value_of
from fuse.graph.structure.arguments import flatten_arguments
from fuse.runtime.guards.unpacking import Unpack, positional, unpacking

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Number of active function modes. A default device is one, so that it is read only if there are any."""
_grad_mode, _inference_mode, _default_dtype = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.get_default_dtype,
)
_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms

_PLAIN_LEAVES = frozenset((Tensor, nn.Parameter, int, float, bool, str, types.NoneType, torch.dtype, torch.device))


class ArrayContents:
    """Compares equal to one array object only, and only while the array's contents are unchanged."""

    __slots__ = ("held", "value")

    def __init__(self, value: object, held: Contents) -> None:
        self.value = value
        self.held = held

    @staticmethod
    def of(value: object) -> ArrayContents | None:
        """The contents of an array; None for other objects."""
        base = base_of(value)
        return ArrayContents(value, contents(value, base)) if base in memory_kinds() else None

    def __eq__(self, other: object) -> bool:
        return other is self.value and self.held.is_of(other)


def same_value(a: object, b: object) -> bool:
    """Whether two values have one type and are equal; zeros must have the same sign, and NaN equals NaN.

    >>> same_value(1, 1), same_value(1, True), same_value(0.0, -0.0), same_value(math.nan, float("nan"))
    (True, False, False, True)
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return isinstance(b, ArrayContents) and b == a
    if isinstance(a, float) and isinstance(b, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    try:
        return bool(a == b)
    except Exception:  # arrays and the like are compared by identity
        return False


def _same_or_integers(a: object, b: object) -> bool:
    """Whether two values are the same, or both are integers."""
    return (type(a) is int and type(b) is int) or same_value(a, b)


def integers_of(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The integers among the leaves of a call.

    >>> integers_of([torch.ones(1), 3, True, 2.0, 5])
    (3, 5)
    """
    return tuple(leaf for leaf in leaves if type(leaf) is int)


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], pytree.TreeSpec | None]:
    """The leaves of a call's arguments, in the order of capture, and their structure; None for plain positional ones.

    >>> flatten((torch.ones(1), 2), {})
    ((tensor([1.]), 2), None)
    """
    if not kwargs and _PLAIN_LEAVES.issuperset(map(type, args)):
        return args, None
    leaves, spec = flatten_arguments(args, kwargs)
    return leaves, _one_object(spec)


_recent: tuple[pytree.TreeSpec, ...] = ()
_MOST_RECENT = 8
"""Structures of arguments that are remembered."""


def _one_object(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """The recent structure that is equal to this one, so that later comparisons of the two are of identity."""
    global _recent
    for known in _recent:
        if known == spec:
            return known
    _recent = (spec, *_recent)[:_MOST_RECENT]
    return spec


def any_nested(leaves: Iterable[Any]) -> bool:
    """Whether a leaf is a nested tensor, which has no sizes: it must not be compared with others.

    >>> any_nested([torch.ones(2), 3]), any_nested([torch.nested.nested_tensor([torch.ones(2)])])
    (False, True)
    """
    for leaf in leaves:  # noqa: SIM110  # every call asks, and a generator takes twice as long
        if isinstance(leaf, Tensor) and leaf.is_nested:
            return True
    return False


def modes() -> tuple[Any, ...]:
    """The modes of torch on which the result of a call depends."""
    return (
        _grad_mode(),
        _inference_mode(),
        autocast_modes(),
        _default_dtype(),
        torch.get_default_device() if function_modes() else HOST,
        _deterministic(),
        forward_ad._current_level >= 0,
    )


@dataclass(frozen=True, eq=False)
class CallGuard:
    """The conditions under which one compiled variant serves a call.

    Attributes:
        count: number of leaves.
        spec: structure of the arguments; None for plain positional leaves.
        modes: torch's modes.
        sizes: expected sizes of leaves that are tensors, by position.
        values: expected values of leaves that are no tensors, by position.
        state: tensors of placeholders that do not come with the call.
        pick: selects the tensors of the placeholders from ``(*leaves, *state)``.
        check: checks the layouts and other facts of these tensors.
        repeated: pairs of leaves that are the same tensor.
        pinned: leaves that are tensors of the model, by position.
        context: context variables with their expected values.
    """

    count: int
    spec: pytree.TreeSpec | None
    modes: tuple[Any, ...]
    sizes: tuple[tuple[int, torch.Size], ...]
    values: tuple[tuple[int, Any], ...]
    state: tuple[Tensor, ...]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    check: Callable[..., bool]
    repeated: tuple[tuple[int, int], ...]
    pinned: tuple[tuple[int, Tensor], ...]
    context: tuple[tuple[ContextVar[Any], Any], ...] = ()

    @property
    def integers(self) -> tuple[int, ...]:
        """The integers among the leaves, in their order."""
        return integers_of([value for _, value in self.values])

    @cached_property
    def unpack(self) -> Unpack | None:
        """Takes the leaves out of arguments with this structure; None if no such function can be generated."""
        return positional if self.spec is None else unpacking(self.spec)

    def match(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec | None, current_modes: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """The tensors of the placeholders if the variant serves the call, else None."""
        if len(leaves) == self.count:
            for index, size in self.sizes:  # what most often differs
                if type(leaf := leaves[index]) is Tensor and leaf.shape != size:
                    return None
        if not self._fits(leaves, spec, current_modes, same_value):
            return None
        tensors = self.pick((*leaves, *self.state))
        return tensors if self.check(*tensors) else None

    def _fits(
        self,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec | None,
        current_modes: tuple[Any, ...],
        alike: Callable[[object, object], bool],
    ) -> bool:
        """Whether a call is like the guard's, facts about tensors and further repeated or pinned leaves apart.

        ``alike`` compares plain values.
        """
        if len(leaves) != self.count or current_modes != self.modes or spec != self.spec:
            return False
        for index, value in self.values:
            if leaves[index] is not value and not alike(leaves[index], value):
                return False
        for first, second in self.repeated:
            if leaves[first] is not leaves[second]:
                return False
        return all(leaves[index] is tensor for index, tensor in self.pinned)

    def fits_at_other_sizes(
        self,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec | None,
        current_modes: tuple[Any, ...],
        model_tensors: frozenset[int],
    ) -> bool:
        """Whether a call differs from the guard's only in facts about tensors and in integers; ``model_tensors``: the
        ``id`` of each tensor of the model."""
        if not self._fits(leaves, spec, current_modes, _same_or_integers):
            return False
        tensors = [id(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        pinned = sum(tensor in model_tensors for tensor in tensors)
        return len(tensors) - len(set(tensors)) == len(self.repeated) and pinned == len(self.pinned)

    def differs_in_sizes(self, other: CallGuard) -> bool:
        """Whether two guards are equal except for the facts about tensors, and integers."""
        return (
            (self.count, self.spec, self.modes, self.repeated) == (other.count, other.spec, other.modes, other.repeated)
            and all(
                i == j and _same_or_integers(a, b) for (i, a), (j, b) in zip(self.values, other.values, strict=True)
            )
            and [(i, id(tensor)) for i, tensor in self.pinned] == [(i, id(tensor)) for i, tensor in other.pinned]
        )

    def in_context(self) -> bool:
        """Whether the context variables have their expected values."""
        for variable, value in self.context:
            now = value_of(variable)
            if now is not value and not (type(value) in _PLAIN_LEAVES and same_value(now, value)):
                return False
        return True


def sources_of(inputs: Sequence[InputSpec], model: nn.Module, count: int) -> list[int | Tensor]:
    """The origins of the placeholders' tensors: a position among the ``count`` leaves of the call and the attributes
    that it reads; or a tensor that is the same in all calls."""
    offsets = {"argument": 0, "attribute": count}
    return [offsets[spec.kind] + spec.index if spec.kind in offsets else held_tensor(spec, model) for spec in inputs]


def call_guard(
    leaves: Sequence[Any],
    spec: pytree.TreeSpec | None,
    sources: Sequence[int | Tensor],
    model_tensors: Set[int],
    context: tuple[tuple[ContextVar[Any], Any], ...] = (),
) -> CallGuard:
    """A guard for calls like this one.

    ``sources`` has, for each placeholder, the position of a leaf, or a tensor that is the same in all calls.
    ``model_tensors`` has the ``id`` of each tensor of the model, and ``context`` the context variables that the call
    may read.
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
    pick = picker(positions)
    return CallGuard(
        count=len(leaves),
        spec=spec,
        modes=modes(),
        sizes=tuple((i, leaves[i].shape) for i in sorted(set(positions)) if i < len(leaves)),
        values=tuple(
            (i, ArrayContents.of(leaf) or leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)
        ),
        state=state,
        pick=pick,
        check=tensor_check(pick((*leaves, *state))),
        repeated=tuple(repeated),
        pinned=tuple((i, leaf) for i, leaf in enumerate(leaves) if id(leaf) in model_tensors),
        context=context,
    )


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that selects the elements at ``positions``, as a tuple.

    >>> picker([2, 0])("abc"), picker([1])("abc"), picker([])("abc")
    (('c', 'a'), ('b',), ())
    """
    if len(positions) > 1:
        return itemgetter(*positions)
    if not positions:
        return lambda pool: ()
    (only,) = positions
    return lambda pool: (pool[only],)


def tensor_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """``TensorGuards.check`` for these tensors, which it does not hold; always True for no tensors."""
    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return check if tensors else lambda: True


def overlaps(tensors: Sequence[Tensor], written: frozenset[int]) -> bool:
    """Whether a tensor whose position is in ``written`` shares memory with another one.

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
