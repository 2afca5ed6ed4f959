"""Run operators on fake tensors, and compute the same result only once.

    add(f32[4, 8], f32[4, 8])   ->   f32[4, 8], from FakeTensorMode          the first time
    add(f32[4, 8], f32[4, 8])   ->   f32[4, 8], from the stored recipe        every other time

A loop dispatches the same few operators on the same layouts again and again, and FakeTensorMode takes a tenth of a
millisecond for each. The result of an ATen operator on fake tensors depends only on the layouts of its tensors and on
its other arguments. So recipes for results are stored under these, for one capture. There are recipes for new tensors,
for views of the first argument, and for arguments returned themselves. Everything else (factories, constants with data,
custom operators) is passed to torch each time.

A loop reads another part of a tensor in each step. So ``select`` and ``slice`` are computed here, and operators that
compute new tensors are stored without the storage offsets of their operands.

Strides and dtypes are eager's, also where FakeTensorMode differs (:mod:`fuse.graph.fakes.layouts`,
:mod:`fuse.graph.fakes.mixed_norms`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from fuse import ops
from fuse.devices import without_autocast
from fuse.graph.fakes.layouts import eager_strides, strides_of_view
from fuse.graph.fakes.mixed_norms import eager_dtype
from fuse.graph.locks import ForkedLock
from fuse.graph.strides import contiguous_strides

aten = torch.ops.aten
_META = torch.device("meta")
CONSTANTS = frozenset(
    [int, bool, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format]
)
"""Types of arguments that are equal only if they are interchangeable."""


@dataclass(frozen=True, eq=False)
class TensorMetadata:
    """Everything that an operator can see of a fake tensor, except its values.

    ``offset`` and strides are in elements. Equal metadata are one object, so that they are compared by identity.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    storage_bytes: int
    requires_grad: bool
    without_offset: TensorMetadata | None = None
    """The metadata with offset 0 and any storage, which tensors share that differ only in these."""

    def of_view(self, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> tuple[Any, ...]:
        """The fields of a view of this tensor, without gradients."""
        return (self.dtype, size, stride, offset, self.device, self.storage_bytes, False)


@dataclass(frozen=True)
class Recipe:
    """How to make one result: a new tensor, a view of the first argument, or the argument at position ``argument``."""

    metadata: TensorMetadata | None
    is_view: bool = False
    argument: int = -1


class _NoKey(Exception):
    """An argument that cannot be part of a key."""


class FakeRunner:
    """Runs operators under one fake mode, and stores recipes for their results."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._mode = fake_mode
        may_read = fake_mode._allow_unsafe_data_ptr_access
        self._guard: Any = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr if may_read else torch._C._set_throw_on_mutable_data_ptr
        )
        self.known_metadata: dict[int, TensorMetadata | None] = {}
        """``id`` of a tensor -> its metadata; None if metadata does not describe it completely."""
        self._held: list[Tensor] = []  # keeps tensors alive, so that no other gets their id
        self._computes: dict[int, tuple[OpOverload, bool]] = {}
        self._states: dict[torch.device, dict[str, Any]] = {}  # attributes of a new fake tensor
        self._interned: dict[tuple[Any, ...], TensorMetadata] = {}
        self._plain: dict[int, Tensor] = {}  # id of a tensor -> a meta tensor over its whole storage
        self._recipes: dict[Hashable, tuple[type, tuple[Recipe, ...]] | None] = {}

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """``op(*args, **kwargs)`` on fake tensors, with eager's strides and dtypes."""
        if op.namespace != "aten" or not args or not isinstance(args[0], (Tensor, list, tuple)):
            return self._ask(op, args, kwargs)
        if torch.Tag.inplace_view in op.tags:  # the operator changes the shape of its argument and returns it
            return op(*args, **kwargs)
        if id(op) in PARTS and not kwargs and (part := self.part(op, args)) is not None:
            return part
        key = self.key(op, args, kwargs)
        if key is None:
            return self._ask(op, args, kwargs)
        recipes = self._recipes.get(key)
        if recipes is not None:
            container, parts = recipes
            made = [self.make(recipe, args) for recipe in parts]
            return made[0] if container is Tensor else container(made)
        result = self._ask(op, args, kwargs)
        if key not in self._recipes:
            self._recipes[key] = self._learn(op, args, result)
        return result

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A context outside of the recording: operators run on fake tensors, and are not recorded."""
        with _disable_current_modes(), self._mode, torch.no_grad(), without_autocast():
            yield

    def computes(self, op: OpOverload) -> bool:
        """Whether the layouts of the results of ``op`` do not depend on the storage offsets of operands: it makes new
        tensors, or writes in place."""
        known = self._computes.get(id(op))
        if known is None:
            known = self._computes[id(op)] = op, ops.kind(op) in _COMPUTING or op in _COPYING
        return known[1]

    def recipes(self, key: Hashable) -> tuple[type, tuple[Recipe, ...]] | None:
        """Container type and recipes of the results of a call with this key; None if torch must compute them."""
        return self._recipes.get(key)

    def key(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
        """A key of everything that determines the layouts of the results of ``op``; None if there is no such key."""
        computes = self.computes(op)
        found: list[Any] = [id(op), torch.get_default_dtype(), is_recording(), len(args)]
        try:
            self._add_to_key(found, args, computes)
            if kwargs:
                self._add_to_key(found, tuple(kwargs.items()), computes)
        except _NoKey:
            return None
        return tuple(found)

    def _ask(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = op(*args, **kwargs)
        if op is aten.view.default and 1 in result.shape and isinstance(args[0], FakeTensor):
            strides = strides_of_view(args[0], result.shape)
            return result if strides == result.stride() else result.as_strided(result.shape, strides)
        if ops.is_view(op):
            return result
        if isinstance(result, (tuple, list)):
            return type(result)([self._as_in_eager(op, args, kwargs, part, i) for i, part in enumerate(result)])
        return self._as_in_eager(op, args, kwargs, result, 0)

    def _as_in_eager(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, position: int
    ) -> Any:
        if not isinstance(result, FakeTensor) or result.layout is not torch.strided:
            return result
        if any(result is argument for argument in (*args, *kwargs.values())):
            return result
        strides = eager_strides(op, args, kwargs, result) or result.stride()
        dtype = eager_dtype(op, args, position, result)
        if strides == result.stride() and dtype == result.dtype:
            return result
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(result.shape, strides, dtype=dtype, device="meta")
            return FakeTensor(self._mode, meta, result.fake_device)

    def view(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a view operator, computed by torch on a tensor without data.

        Raises:
            RuntimeError: there is no such view.
        """
        whole = args[0]
        with torch._C._DisableTorchDispatch():
            plain = torch.empty(0, dtype=whole.dtype, device="meta")
            plain.set_(whole.untyped_storage(), whole.storage_offset(), whole.shape, whole.stride())
            made = op(plain, *args[1:], **kwargs)
            if isinstance(made, Tensor):
                return self._fake(made, whole.fake_device)
            return type(made)([self._fake(part, whole.fake_device) for part in made])

    def metadata_of(self, tensor: Tensor) -> TensorMetadata | None:
        """The metadata of a tensor; None if metadata does not describe it completely."""
        if id(tensor) not in self.known_metadata:
            self.known_metadata[id(tensor)] = self._metadata(tensor)
            self._held.append(tensor)
        return self.known_metadata[id(tensor)]

    def forget(self, tensor: Tensor) -> None:
        """Drop the metadata of ``tensor``, whose shape or memory is about to change."""
        self.known_metadata.pop(id(tensor), None)
        self._plain.pop(id(tensor), None)

    def part(self, op: OpOverload, args: tuple[Any, ...]) -> Tensor | None:
        """The result of ``select`` or ``slice``; None if torch must compute it."""
        recipe = None if is_recording() else self.recipe_of_part(op, args)
        return None if recipe is None else self.make(recipe, args)

    def recipe_of_part(self, op: OpOverload, args: tuple[Any, ...]) -> Recipe | None:
        """The recipe for the result of ``select`` or ``slice``, without gradients; None if torch must compute it."""
        metadata = self.metadata_of(args[0])
        layout = PARTS[id(op)](metadata, *args[1:]) if metadata is not None else None
        if metadata is None or layout is None:
            return None
        return Recipe(self._intern(metadata.of_view(*layout)), is_view=True)

    def _add_to_key(self, found: list[Any], values: Sequence[Any], ignore_offset: bool) -> None:
        """Add ``values`` to the key ``found``; with ``ignore_offset``, without the storage offsets of tensors."""
        known = self.known_metadata
        for value in values:
            kind = type(value)
            if kind is float or kind is complex:
                found += kind, repr(value)  # 0.0 and -0.0 are equal, and other constants
            elif kind in CONSTANTS:
                found += kind, value
            elif isinstance(value, Tensor):
                metadata = known.get(id(value)) or self.metadata_of(value)
                if metadata is None:
                    raise _NoKey
                found.append(metadata.without_offset if ignore_offset else metadata)
            elif kind is tuple or kind is list:
                found += kind, len(value)
                self._add_to_key(found, value, ignore_offset)
            else:
                if kind.__hash__ is None:
                    raise _NoKey
                found += kind, value

    def _intern(self, facts: tuple[Any, ...]) -> TensorMetadata:
        known = self._interned.get(facts)
        if known is None:
            dtype, size, stride, _, device, storage_bytes, requires_grad = facts
            ignore_offset = (dtype, size, stride, 0, device, -1, requires_grad)
            without_offset = self._intern(ignore_offset) if storage_bytes >= 0 else None
            known = self._interned[facts] = TensorMetadata(
                dtype, size, stride, facts[3], device, storage_bytes, requires_grad, without_offset
            )
        return known

    def _metadata(self, tensor: Tensor) -> TensorMetadata | None:
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None or tensor.layout is not torch.strided:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        facts: tuple[Any, ...] = (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.fake_device,
            tensor.untyped_storage().nbytes(),
            tensor.requires_grad,
        )
        return self._intern(facts)

    def _learn(self, op: OpOverload, args: tuple[Any, ...], result: Any) -> tuple[type, tuple[Recipe, ...]] | None:
        parts = result if isinstance(result, (tuple, list)) else (result,)
        recipes = [self._recipe(op, args, part) for part in parts]
        known = tuple(recipe for recipe in recipes if recipe is not None)
        if len(known) < len(recipes) or not known:
            return None
        return (Tensor if parts is not result else type(result)), known

    def _recipe(self, op: OpOverload, args: tuple[Any, ...], result: Any) -> Recipe | None:
        for position, argument in enumerate(args):
            if argument is result:
                return Recipe(None, argument=position)
        if not isinstance(result, Tensor) or (metadata := self.metadata_of(result)) is None or metadata.requires_grad:
            return None
        storage = result.untyped_storage()._cdata
        shares = [isinstance(a, Tensor) and a.untyped_storage()._cdata == storage for a in args]
        if ops.is_view(op):
            return Recipe(metadata, is_view=True) if shares[0] else None
        with torch._C._DisableTorchDispatch():
            alone = torch.empty_strided(metadata.size, metadata.stride, dtype=metadata.dtype, device="meta")
        dense = alone.untyped_storage().nbytes()
        is_new = not any(shares) and metadata.offset == 0 and metadata.storage_bytes == dense
        return Recipe(metadata) if is_new else None

    def make(self, recipe: Recipe, args: tuple[Any, ...]) -> Tensor:
        """The result that ``recipe`` describes, for a call with these arguments."""
        metadata = recipe.metadata
        if metadata is None:
            argument: Tensor = args[recipe.argument]
            return argument
        with _DisableTorchDispatch():
            if recipe.is_view:
                whole: Any = self._plain.get(id(args[0]))
                if whole is None or whole.dtype is not metadata.dtype:
                    whole = torch.empty(0, dtype=metadata.dtype, device=_META)
                    whole.set_(args[0].untyped_storage(), 0, (0,), (1,))
                    self._plain[id(args[0])] = whole
                meta = whole.as_strided(metadata.size, metadata.stride, metadata.offset)
            else:
                meta = _empty_strided(metadata.size, metadata.stride, dtype=metadata.dtype, device=_META)
            made = self._fake(meta, metadata.device)
        if recipe.is_view:
            self._plain[id(made)] = whole
        self.known_metadata[id(made)] = metadata
        self._held.append(made)
        return made

    def _fake(self, meta: Tensor, device: torch.device) -> Tensor:
        """``FakeTensor(mode, meta, device)``, whose slow constructor runs once for each device."""
        state = self._states.get(device)
        if state is None:
            first = FakeTensor(self._mode, meta, device)
            self._states[device] = vars(first).copy()
            return first
        made: Tensor = _make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        self._guard(made)
        made.__dict__ = state.copy()
        return made


_DisableTorchDispatch = torch._C._DisableTorchDispatch
_empty_strided = torch.empty_strided
_make_subclass = Tensor._make_subclass


@contextlib.contextmanager
def out_of_inference() -> Iterator[None]:
    """A context without inference mode: tensors made in it cannot be viewed outside of it."""
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """A context in which fake tensors do not log a traceback for each operator that does not fit; here that is
    expected. The logger is as before once no thread is in such a context."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with _silence.lock:
        if _silence.contexts == 0:
            _silence.disabled_before, logger.disabled = logger.disabled, True
        _silence.contexts += 1
    try:
        yield
    finally:
        with _silence.lock:
            _silence.contexts -= 1
            if _silence.contexts == 0:
                logger.disabled = _silence.disabled_before


class _Silence:
    """The contexts of all threads in which fake tensors do not log."""

    def __init__(self) -> None:
        self.lock = ForkedLock()
        self.contexts = 0
        self.disabled_before = False


_silence = _Silence()


def mode_of(value: Tensor) -> FakeTensorMode:
    """The fake mode of a fake tensor; new tensors made under it are fake, too.

    >>> with FakeTensorMode() as mode:
    ...     value = torch.empty(2, 3)
    >>> mode_of(value) is mode
    True
    """
    assert isinstance(value, FakeTensor)
    return value.fake_mode


def fake_like(value: Tensor, stride: Sequence[int] | None = None) -> Tensor:
    """A new fake tensor with the shape and dtype of ``value`` and these strides; contiguous by default.

    >>> with FakeTensorMode():
    ...     value = torch.empty(2, 3).t()
    >>> fake_like(value).stride(), fake_like(value, value.stride()).stride()
    ((2, 1), (1, 3))
    """
    with mode_of(value):
        return torch.empty_strided(
            value.shape, stride or contiguous_strides(value.shape), dtype=value.dtype, device=value.device
        )


def is_recording() -> bool:
    """Whether autograd records operators called now. It does not within a dispatch mode, which autograd has called."""
    return torch.is_grad_enabled() and not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)


_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


_Layout = tuple[tuple[int, ...], tuple[int, ...], int]


def _selected(metadata: TensorMetadata, dim: Any, index: Any) -> _Layout | None:
    """``select(x, dim, index)``: size, stride and offset."""
    rank = len(metadata.size)
    if type(dim) is not int or type(index) is not int or not -rank <= dim < rank:
        return None
    dim %= rank
    extent, stride = metadata.size[dim], metadata.stride[dim]
    if not -extent <= index < extent:
        return None
    size, strides = metadata.size[:dim] + metadata.size[dim + 1 :], metadata.stride[:dim] + metadata.stride[dim + 1 :]
    return size, strides, metadata.offset + index % extent * stride


def _sliced(
    metadata: TensorMetadata, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1
) -> _Layout | None:
    """``slice(x, dim, start, end, step)``: size, stride and offset."""
    rank = len(metadata.size)
    bounds_are_numbers = all(type(bound) is int or bound is None for bound in (start, end))
    if type(dim) is not int or type(step) is not int or step < 1 or not bounds_are_numbers or not -rank <= dim < rank:
        return None
    dim %= rank
    first, last, _ = slice(start, end, step).indices(metadata.size[dim])
    size, strides = list(metadata.size), list(metadata.stride)
    size[dim] = max(-((first - last) // step), 0)
    strides[dim] *= step
    return tuple(size), tuple(strides), metadata.offset + first * metadata.stride[dim]


PARTS: dict[int, Callable[..., _Layout | None]] = {
    id(torch.ops.aten.select.int): _selected,
    id(torch.ops.aten.slice.Tensor): _sliced,
}
"""``id`` of an operator -> the function for the layout of its result, as in :func:`fuse.ops.info`."""
_COMPUTING = frozenset(["pointwise", "gemm", "reduction"])
"""Kinds of operators for which :meth:`FakeRunner.computes` holds."""
_COPYING = frozenset([aten.cat.default, aten.stack.default, aten.clone.default, aten.copy_.default])
"""Operators that copy elements, for which it holds too."""
