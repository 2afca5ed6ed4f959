"""Sizes of fake tensors as extents, while ``forward`` is followed: each size as an expression in the arguments' sizes.

    x               [n0, n1, 64]                    an argument
    y = x[::2]      [(n0 + 1) // 2, n1, 64]         by the operator's own rule
    y.relu()        [(n0 + 1) // 2, n1, 64]         the operator passes sizes on
    x[x > 0]        [?]                             unknown

Two sizes of one call may be equal by chance, so the tensor tells a size, and not its value. A number in the arguments
of an operator comes without its origin, since C++ gets it as a plain number: it counts as the extent that ``forward``
made with this value. If several have it, the size is unknown. A bound of a slice or a width of a padding that is 0 or
1 may also be a literal: it is unknown if ``forward`` computed such a number, but for slices in brackets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.weak import WeakTensorKeyDictionary

from fuse import ops
from fuse.kernel.arithmetic.extents import LEAST_LOWERED, Conditions, Extent, always_equal, divided, plain, terms_of
from fuse.kernel.arithmetic.polynomials import Terms
from fuse.kernel.recipes.registry import bind
from fuse.kernel.sizes.shape_rules import RULES, Shape, has_sizes_of_tensors, name_of, shapes_in

MOST_JOINED = 4
"""Most tensors that are joined along a dimension whose size is told: the number of more may depend on sizes."""
_UNKNOWN = (TypeError, ValueError, ZeroDivisionError, IndexError, RuntimeError)
"""Errors of arithmetic with unknown sizes."""
_VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
_SHAPED = frozenset({"full", "zeros", "ones", "empty", "rand", "randn", "new_full", "new_zeros", "new_ones"})
_SHAPED |= {"new_empty", "expand"}
"""Operators that are told their result's sizes."""
_WITH_NUMBERS = _VIEWS | _SHAPED | {"slice", "split", "constant_pad_nd", "arange"}
_WITH_NUMBERS |= {name for name in RULES if name.startswith("upsample")}
"""Operators whose numbers may be ``forward``'s own. Those of others, such as strides, count as constants."""


CUTS = frozenset(
    getattr(torch.ops.aten, name).default
    if name.endswith("_with_sizes")
    else getattr(getattr(torch.ops.aten, name), "int" if name == "select" else "Tensor")
    for name in ("slice", "select", "split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes")
)
"""Operators that cut tensors."""
CUTTING = frozenset({"__getitem__", "__setitem__", "narrow", "select", "split", "split_with_sizes"})
"""Functions of C that cut where ``forward`` says; others compute where."""


class SizesOfFakes:
    """The sizes of fake tensors as extents of these conditions, which keep all that are computed."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._sizes: Any = WeakTensorKeyDictionary()
        self._by_value: dict[int, Terms | None] = {}  # None if several have this value
        self._given: dict[int, Terms] | None = None  # by value: numbers of the operator that runs, if they are told
        self._entered = 0

    def note(self, tensor: Tensor, sizes: Sequence[Any]) -> None:
        """Note the sizes of a tensor; one that is not the tensor's own is unknown."""
        told = sizes if len(sizes) == tensor.dim() else (None,) * tensor.dim()
        pairs = zip(tensor.shape, told, strict=True)
        self._sizes[tensor] = tuple(
            had if had < LEAST_LOWERED else size if size is not None and plain(size) == had else None
            for had, size in pairs
        )

    def of(self, tensor: Tensor) -> Shape | None:
        """The sizes of a tensor; None if it is from outside."""
        found: Shape | None = self._sizes.get(tensor)
        return found if found is None or len(found) == tensor.dim() else (None,) * tensor.dim()

    def give(self, number: Extent) -> None:
        """Note that ``forward`` has this number."""
        self._computed()[number.terms] = plain(number)

    @contextlib.contextmanager
    def given(self, *numbers: Any) -> Iterator[None]:
        """A context in which an operator is given these numbers, and else literals: of several with one value, it is
        these."""
        self._given = {plain(one): one.terms for one in numbers if isinstance(one, Extent)}
        try:
            yield
        finally:
            self._given = None

    def varies(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a tensor is cut along a dimension whose size varies, or is unknown."""
        given = bind(op, self._symbolic(args, False), self._symbolic(kwargs, False))
        return type(given["self"][0][given["dim"]]) is not int

    def has(self, number: int) -> bool:
        """Whether an extent with this value was made."""
        for terms, value in islice(self._computed().items(), self._entered, None):
            self._by_value[value] = terms if self._by_value.get(value, terms) == terms else None
        self._entered = len(self._computed())
        return number in self._by_value

    def made(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note the sizes of what an operator made."""
        tensors = [one for one in _tensors(result) if one not in self._sizes]
        if not tensors:
            return
        try:
            told = self._told(op, args, kwargs, tensors)
        except _UNKNOWN:
            told = [()] * len(tensors)
        for tensor, sizes in zip(tensors, told, strict=True):
            self.note(tensor, sizes)

    def _computed(self) -> dict[Terms, int]:
        assert self._conditions.computed is not None
        return self._conditions.computed

    def _told(
        self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor]
    ) -> Sequence[Sequence[Any]]:
        name = name_of(op).removeprefix("unsafe_")
        own = name in _WITH_NUMBERS
        given = bind(op, self._symbolic(args, own), self._symbolic(kwargs, own))
        if name == "split":
            return _pieces(given, len(results))
        if name in _VIEWS:
            return [self._viewed(given["self"][0], tuple(results[0].shape))]
        if name in _SHAPED:
            return [[self._own(one) for one in results[0].shape]]
        if name == "stack" or (name == "cat" and len(given["tensors"]) > MOST_JOINED):
            return [_joined(given, tuple(results[0].shape))]
        exact = bind(op, args, kwargs)
        if name == "arange":
            start, step = self._place(exact.get("start", 0)), given.get("step", 1)
            return [(-((start - given["end"]) // step),)]
        if name == "slice":
            made = self._sliced(given, {bound: exact[bound] for bound in ("start", "end")})
        elif name == "constant_pad_nd":
            made = RULES[name]({**given, "pad": list(map(self._place, exact["pad"]))})
        else:
            made = RULES[name](given) if name in RULES else None
        others = [self._passed_on(op, given, one) for one in (results if made is None else results[1:])]
        return others if made is None else [made, *others]

    def _symbolic(self, value: Any, own: bool) -> Any:
        """An argument with a tuple of its sizes in place of each tensor, and own numbers as extents."""
        if isinstance(value, Tensor):
            found = self.of(value)
            return (tuple(value.shape) if found is None else found,)
        if isinstance(value, (tuple, list)):
            return [self._symbolic(one, own) for one in value]
        if isinstance(value, Mapping):
            return {name: self._symbolic(one, own) for name, one in value.items()}
        return self._own(value) if own and type(value) is int else value

    def _own(self, number: int) -> Any:
        """A number of ``forward`` as the extent with this value; itself if there is none; None if there are several."""
        told = self._given or {}
        if abs(number) < LEAST_LOWERED or not (number in told or self.has(number)):
            return number
        terms = told.get(number) or self._by_value[number]
        return None if terms is None else Extent(number, terms, self._conditions)

    def _place(self, number: int) -> Any:
        """A bound of a slice or a width of a padding, which may be small, as ``_own`` gives others."""
        if type(number) is not int or abs(number) >= LEAST_LOWERED:
            return self._own(number) if type(number) is int else number
        if self._given is not None:
            terms = self._given.get(number)
            return number if terms is None else Extent(number, terms, self._conditions)
        return None if self.has(number) else number

    def _sliced(self, given: Mapping[str, Any], bounds: Mapping[str, Any]) -> Shape | None:
        """The shape of a slice between these ``bounds``; where it is cut, its size is unknown if one of these is."""
        told = {name: self._place(one) for name, one in bounds.items() if type(one) is int}
        if all(one is not None for one in told.values()):
            return RULES["slice"]({**given, **told})
        (shape,), dim = given["self"], given["dim"] % len(given["self"][0])
        return tuple(None if place == dim else size for place, size in enumerate(shape))

    def _viewed(self, shape: Shape, made: tuple[int, ...]) -> Sequence[Any]:
        """The sizes of a view: those of the tensor, ``forward``'s own, constants, and one that follows from all."""
        told: list[Any] = []
        left: list[int] = []
        for place, size in enumerate(made):
            own = self._own(size)
            found = [one for one in shape if _is(one, size)] + ([own] if isinstance(own, Extent) else [])
            told.append(_only(found) if own is not None else None)
            left += [place] if not found else []
        elements, rest = prod(shape), prod(one for place, one in enumerate(told) if place not in left)
        constant = [made[place] for place in left]
        if always_equal(elements, rest * prod(constant)):
            for place in left:
                told[place] = made[place]
        elif len(left) == 1:
            told[left[0]] = divided(elements, rest)
        return told

    def _passed_on(self, op: OpOverload, given: Mapping[str, Any], result: Tensor) -> Sequence[Any]:
        """The sizes of a result that an operator has from its tensors."""
        shape = tuple(result.shape)
        shapes = list(shapes_in(list(given.values())))
        if ops.is_pointwise(op):
            return [_first(size, place - len(shape), shapes) for place, size in enumerate(shape)]
        same = [one for one in shapes if len(one) == len(shape) and all(map(_is, one, shape))]
        if same and ops.kind(op) != "gemm":
            return same[0]
        if not has_sizes_of_tensors(op) or any(None in one for one in shapes):
            return ()
        return [_only([one for of in shapes for one in of if _is(one, size)]) for size in shape]


def _is(size: Any, value: int) -> bool:
    return size is not None and plain(size) == value


def _only(sizes: Sequence[Any]) -> Any:
    """The one of these sizes; None if there are several."""
    return sizes[0] if len({terms_of(one) for one in sizes}) == 1 else None


def _first(value: int, place: int, shapes: Sequence[Shape]) -> Any:
    """The size at a place of shapes that are broadcast."""
    return next((of[place] for of in shapes if len(of) >= -place and _is(of[place], value)), None)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for one in result:
            yield from _tensors(one)


def _pieces(given: Mapping[str, Any], count: int) -> list[list[Any]]:
    """The shapes of so many pieces of one size, and of what is left."""
    (shape,), dim, size = given["self"], given["dim"], given["split_size"]
    pieces = (shape[dim] + size - 1) // size  # kept by the conditions: a loop over them has as many steps
    if plain(pieces) != count:
        raise ValueError(count)
    sizes = [size] * (count - 1) + [shape[dim] - size * (count - 1)]
    return [[own if place == dim % len(shape) else one for place, one in enumerate(shape)] for own in sizes]


def _joined(given: Mapping[str, Any], result: tuple[int, ...]) -> list[Any]:
    """The sizes of tensors that are stacked or concatenated, how many there are unknown."""
    shapes = [shape for (shape,) in given["tensors"]]
    dim = given["dim"] % len(result)
    made = list(shapes[0])
    made[dim : dim + (len(made) == len(result))] = [None]
    return made
