"""Terms: the computations of operators, in one canonical spelling, each stored once.

    torch.add(x, y, alpha=2) / 4      ->      mul(add(x, mul(y, 2.0)), 0.25)

A pattern and the graph are both turned into terms. Terms are *interned*: a table stores each term once, so that equal
computations are the same object. Leaves are given values; numbers, and tensors that depend on no input, are leaves,
too. A term has the type of its value (shape, dtype, device), so that terms of different shapes are never equal.

Terms are only compared. No graph is made from them.
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

from fuse.graph.describing import dtype_name

LEAF, NUMBER, FILL, CONSTANT, PART = "leaf", "number", "fill", "constant", "part"
VIEWS = frozenset(["reshape", "permute", "expand", "slice", "cast", PART])
"""Names of terms that compute no new number: views of their operand, and conversions to another dtype."""

BY_STRIDES = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)
"""Operators whose result depends on strides, which terms do not contain."""

KNOWN = frozenset([NUMBER, FILL, CONSTANT])
"""Names of terms with a known value: a Python number, a uniform tensor, any other tensor that depends on no input."""


@dataclass(frozen=True)
class TensorType:
    """Shape, dtype and device of a value, without strides, which do not affect the computation."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    device: torch.device | None

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"


_GIVEN = KNOWN | {LEAF}

NUMBER_TYPE = TensorType((), None, None)
"""The type of a number."""


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

    def __post_init__(self) -> None:  # stored, because they are read very often
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
    """A table of interned terms; new terms get the present ``origin``.

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
        """The term with these operands, unchanged; :mod:`fuse.rewrite.patterns.canonical` finds the canonical spelling.

        ``known_as``: constants by which terms are compared instead of ``constants``.
        """
        operands, constants = tuple(operands), tuple(constants)
        compared = constants if known_as is None else known_as
        key = (name, tuple([term.serial for term in operands]), repr(compared) if compared else "", tensor_type)
        known = self._known.get(key)
        if known is None:
            serial = len(self._known)
            known = Term(name, operands, constants, tensor_type, serial, self.origin, elementwise, commutative)
            self._known[key] = known
        return known

    def leaf(self, key: Hashable, tensor_type: Any) -> Term:
        """A given value, identified by ``key``."""
        known = self._known.get((LEAF, key))
        if known is None:
            known = Term(LEAF, (), (("key", key),), tensor_type, len(self._known), self.origin)
            self._known[LEAF, key] = known
        return known

    def number(self, value: Any, beside: Term) -> Term:
        """A Python number in an elementwise operator with ``beside``: beside a float, 2 and 2.0 are equal."""
        floating = beside.dtype is not None and beside.dtype.is_floating_point
        if isinstance(value, int) and floating:
            value = float(value)
        return self.make(NUMBER, (), NUMBER_TYPE, [("value", value)])

    def constant(self, value: Tensor, tensor_type: TensorType) -> Term:
        """A tensor with known elements; a fill if they are equal.

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
        """A tensor of equal elements, whose value is rounded to the dtype."""
        assert tensor_type.dtype is not None
        return self.make(FILL, (), tensor_type, [("value", torch.tensor(value, dtype=tensor_type.dtype).item())])


def shortest(value: Any) -> Any:
    """The shortest decimal that equals ``value`` in float32, as it was probably written, if float32 is precise enough.

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
    """The type of a tensor; a tuple of types for several tensors; None for anything else."""
    if isinstance(value, Tensor):
        device = value.fake_device if isinstance(value, FakeTensor) else value.device
        return TensorType(tuple(value.shape), value.dtype, device)
    return tuple(type_of(part) for part in value) if isinstance(value, (tuple, list)) else None


def below(*roots: Term) -> Iterator[Term]:
    """``roots`` and all terms below them, each once, operands behind their readers."""
    seen: set[Term] = set()
    stack = list(reversed(roots))
    while stack:
        term = stack.pop()
        if term not in seen:
            seen.add(term)
            yield term
            stack.extend(reversed(term.operands))
