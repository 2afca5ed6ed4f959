"""Terms: what operators compute, in one spelling, and each spelling once.

    torch.add(x, y, alpha=2) / 4      ->      mul(add(x, mul(y, 2.0)), 0.25)

A pattern and the graph it is looked for in are both turned into terms. Terms are *interned*: a table makes each term
once, so that two computations are the same if their terms are the same object. Leaves stand for the values that are
given; numbers, and tensors that are made of no input, are leaves too. A term knows what its value looks like (shape,
dtype, device), so terms of different shapes are never equal, whatever their operators.

Terms are for comparing only. No graph that runs is ever made from them.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

LEAF, NUMBER, FILL, CONSTANT, PART = "leaf", "number", "fill", "constant", "part"
VIEWS = frozenset(["reshape", "permute", "expand", "slice", "cast", PART])
"""Terms that compute no new number: other looks at their operand, and its conversion to another dtype."""

BY_STRIDES = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)
"""Operators whose values depend on how a tensor lies in memory, which terms do not tell."""

KNOWN = frozenset([NUMBER, FILL, CONSTANT])
"""Terms whose value is known: a Python number, a tensor of equal elements, any other tensor made of no input."""


@dataclass(frozen=True)
class TensorType:
    """Shape, dtype and device of a value. Strides are left out: they do not change what is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    device: torch.device | None

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


_GIVEN = KNOWN | {LEAF}

NUMBER_TYPE = TensorType((), None, None)
"""The tensor_type of a number."""


@dataclass(frozen=True, eq=False)
class Term:
    """One computed value.

    ``name``: of the operator. ``constants``: its other arguments, by name. ``type``: a tuple of types if the operator
    returns several tensors; ``part`` terms are its single results. ``elementwise``: the operator follows its broadcast
    operands element by element. ``commutative``: its operands may be swapped. ``serial``: number of the term in its
    table; operands have smaller numbers. ``origin``: the node that the term was first made for, or None. ``computes``:
    the term is neither a view nor a number nor a leaf. ``value``: of a number or a fill; the key of a leaf.
    """

    name: str
    operands: tuple[Term, ...]
    constants: tuple[tuple[str, Any], ...]
    type: Any
    serial: int
    origin: Any = field(repr=False)
    elementwise: bool = False
    commutative: bool = False
    is_view: bool = field(init=False)
    computes: bool = field(init=False)
    value: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:  # asked of every term again and again
        object.__setattr__(self, "is_view", self.name in VIEWS)
        object.__setattr__(self, "computes", not self.is_view and self.name not in _GIVEN)
        object.__setattr__(self, "value", self.constants[0][1] if self.constants else None)

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.type.shape
        return shape

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.type.dtype
        return dtype

    def __str__(self) -> str:
        if self.name in (NUMBER, FILL):
            return f"{self.value:g}" if isinstance(self.value, float) else str(self.value)
        if self.name == LEAF:
            return str(self.value)
        constants = [f"{name}={value}" for name, value in self.constants if value is not None]
        return f"{self.name}({', '.join([*map(str, self.operands), *constants])})"


class Terms:
    """A table of interned terms; ``origin`` is noted on the terms that are made while it is set.

    >>> terms = Terms()
    >>> x = terms.leaf("x", TensorType((2, 3), torch.float32, None))
    >>> str(terms.make("tanh", [x], x.type)), terms.make("tanh", [x], x.type) is terms.make("tanh", [x], x.type)
    ('tanh(x)', True)
    """

    def __init__(self) -> None:
        self.origin: object = None
        self._known: dict[Hashable, Term] = {}

    def make(
        self,
        name: str,
        operands: Iterable[Term],
        tensor_type: TensorType | tuple[TensorType | None, ...],
        constants: Iterable[tuple[str, Any]] = (),
        *,
        elementwise: bool = False,
        commutative: bool = False,
        known_as: tuple[tuple[str, Any], ...] | None = None,
    ) -> Term:
        """The term of these operands, as it stands; :mod:`fuse.rewrite.patterns.canonical` spells it.

        Constants that are ``known_as`` others make one term with those.
        """
        operands, constants = tuple(operands), tuple(constants)
        told = constants if known_as is None else known_as
        key = (name, tuple([term.serial for term in operands]), repr(told) if told else "", tensor_type)
        known = self._known.get(key)
        if known is None:
            serial = len(self._known)
            known = Term(name, operands, constants, tensor_type, serial, self.origin, elementwise, commutative)
            self._known[key] = known
        return known

    def leaf(self, key: Hashable, tensor_type: Any) -> Term:
        """A value that is given, known by ``key``."""
        known = self._known.get((LEAF, key))
        if known is None:
            known = Term(LEAF, (), (("key", key),), tensor_type, len(self._known), self.origin)
            self._known[LEAF, key] = known
        return known

    def number(self, value: Any, beside: Term) -> Term:
        """A Python number that meets ``beside`` in an elementwise operator: 2 and 2.0 are one beside a float."""
        floating = beside.dtype is not None and beside.dtype.is_floating_point
        if isinstance(value, int) and floating:
            value = float(value)
        return self.make(NUMBER, (), NUMBER_TYPE, [("value", value)])

    def constant(self, value: Tensor, tensor_type: TensorType) -> Term:
        """A tensor whose elements are known; one whose elements are equal is a fill.

        >>> terms = Terms()
        >>> str(terms.constant(torch.full((2, 3), 0.5), TensorType((2, 3), torch.float32, None)))
        '0.5'
        """
        if all(step == 0 or size == 1 for size, step in zip(value.shape, value.stride(), strict=True)):
            return self.fill(value.flatten()[0].item(), tensor_type)
        bits = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1, 1).view(torch.uint8)
        if bits.numel() and bool((bits == bits[0]).all()):
            return self.fill(value.flatten()[0].item(), tensor_type)
        return self.make(CONSTANT, (), tensor_type, [("digest", hashlib.sha256(bits.numpy().tobytes()).hexdigest())])

    def fill(self, value: Any, tensor_type: TensorType) -> Term:
        """A tensor of equal elements, rounded to its dtype."""
        assert tensor_type.dtype is not None
        return self.make(FILL, (), tensor_type, [("value", torch.tensor(value, dtype=tensor_type.dtype).item())])


def shortest(value: Any) -> Any:
    """The shortest decimal that is ``value`` in float32: what was written, where arithmetic is no finer than that.

    >>> shortest(0.10000000149011612), shortest(2**-0.5) == shortest(1 / 2**0.5), shortest(1e300)
    (0.1, True, 1e+300)
    """
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    try:
        rounded = _in_float32(value)
        if math.isinf(rounded):
            return value
        candidates = (float(f"{rounded:.{digits}g}") for digits in range(6, 10))
        return next((short for short in candidates if _in_float32(short) == rounded), value)
    except OverflowError:
        return value


def _in_float32(value: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


def type_of(value: Any) -> Any:
    """The tensor_type of a (fake) tensor, or a tuple of looks for several; None for what is no tensor."""
    if isinstance(value, Tensor):
        device = value.fake_device if isinstance(value, FakeTensor) else value.device
        return TensorType(tuple(value.shape), value.dtype, device)
    return tuple(type_of(part) for part in value) if isinstance(value, (tuple, list)) else None


def below(*roots: Term) -> Iterator[Term]:
    """``roots`` and everything they are made of, each term once, operands after what reads them."""
    seen: set[Term] = set()
    stack = list(reversed(roots))
    while stack:
        term = stack.pop()
        if term not in seen:
            seen.add(term)
            yield term
            stack.extend(reversed(term.operands))
