"""Values that Python learned while a call was recorded; later calls must have the same.

    if (x > 0).any():         learned: a boolean            True
    n = int(lengths.max())    learned: a number             17
    x[mask], x.unique()       learned: a size               (17, 4)
    x / x.max().item()        nothing: the number goes back to tensors, and is computed in each call

A program that is specialised on learned values computes them again in each call, and returns them beside its results.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fuse.devices import is_host

Guard = Literal["truth", "number", "values", "size"]


@dataclass(frozen=True)
class Learned:
    """One value that Python learned, at the user's line ``source``.

    ``leaf``: the position of the tensor with this value among the program's confirming outputs. ``index``: its index in
    that tensor; None if the value is the whole tensor. ``expected``: the value at capture. ``key``: equal if the same
    operators compute the value from the same inputs.
    """

    source: str
    guard: Guard
    leaf: int
    index: int | None
    expected: object
    key: int = 0

    def __str__(self) -> str:
        if self.guard == "truth":
            return f"a value read at {self.source or '?'} is {self.expected}"
        if self.guard == "number":
            return f"the number read at {self.source or '?'} is {self.expected}"
        if self.guard == "size":
            return f"the size of the tensor made at {self.source or '?'} is {self.expected}"
        return f"the values read at {self.source or '?'} are those of the capture"


@dataclass(frozen=True)
class ReadLine:
    """A user's line that reads values, ``count`` times; ``guard`` is ``none`` if only tensors depend on the values."""

    source: str
    guard: Guard | Literal["none"]
    count: int


@dataclass(frozen=True)
class Learning:
    """All values that Python learned in a call. ``leaves``: the number of confirming outputs of the program.

    >>> learned = Learning(1, (Learned("model.py:3", "truth", 0, None, True),), ())
    >>> learned.difference([torch.tensor(True)]) is None
    True
    >>> str(learned.difference([torch.tensor(False)]))
    'a value read at model.py:3 is True'
    """

    leaves: int
    learned: tuple[Learned, ...]
    lines: tuple[ReadLine, ...]

    def values_by_key(self, values: Sequence[Tensor | None]) -> dict[int, object]:
        """The values of this call, by key."""
        return {
            one.key: tuple(value.shape) if one.guard == "size" else bits(_element(value, one.index))
            for one in self.learned
            if one.guard != "values" and (value := values[one.leaf]) is not None
        }

    def is_of_sizes(self) -> bool:
        """Whether calls of other sizes may have learned the same: only booleans and integers."""
        return all(one.guard in ("truth", "number") and isinstance(one.expected, int) for one in self.learned)

    def facts(self) -> tuple[tuple[object, ...], ...]:
        """Lines that read values, and these values: equal for calls that took the same way through ``forward``."""
        return tuple((one.source, one.guard, one.leaf, one.index, one.expected) for one in self.learned)

    def fits(self, known: Mapping[int, object]) -> bool:
        """Whether no learned value differs from its value in ``known``."""
        return all(
            one.guard == "values" or one.key not in known or known[one.key] == bits(one.expected)
            for one in self.learned
        )

    def another_size(self, source: str, shape: tuple[int, ...]) -> Learned | None:
        """The first size learned at a line that is not ``shape``."""
        sizes = (one for one in self.learned if one.guard == "size" and one.source == source)
        return next((one for one in sizes if one.expected != shape), None)

    def difference(self, values: Sequence[Tensor | None]) -> Learned | None:
        """The first learned value that differs in this call; ``values`` are the program's outputs, confirming ones
        first."""
        lists: dict[int, object] = {}
        for one in self.learned:
            value = values[one.leaf]
            assert value is not None
            if one.guard == "size":
                if tuple(value.shape) != one.expected:
                    return one
                continue
            if one.guard == "values":
                assert isinstance(one.expected, Tensor)
                if not same_bits(value, one.expected):
                    return one
                continue
            if one.leaf not in lists:
                lists[one.leaf] = value.tolist()
            found = lists[one.leaf]
            if one.index is not None:
                found = found[one.index]  # type: ignore[index]  # a list then
            if found is not one.expected and bits(found) != bits(one.expected):
                return one
        return None


def contradict(one: Learning | None, other: Learning | None) -> bool:
    """Whether a line read another value in one call than in the other, which explains that their graphs differ.

    If the calls read at different lines before that, something else made them take different ways.

    >>> def of(*truths):
    ...     lines = enumerate(truths)
    ...     return Learning(1, tuple(Learned(f"model.py:{n}", "truth", 0, n, truth) for n, truth in lines), ())
    >>> contradict(of(True), of(False)), contradict(of(True, False), of(True, True))
    (True, True)
    >>> contradict(of(True), of(True, True)), contradict(None, of(True))
    (False, False)
    """
    if one is None or other is None:
        return False
    for guard in ("truth", "number"):
        reads = ([(a.source, a.expected) for a in learning.learned if a.guard == guard] for learning in (one, other))
        first = next((pair for pair in zip(*reads, strict=False) if pair[0] != pair[1]), None)
        if first is not None and first[0][0] == first[1][0]:
            return True
    return False


@dataclass(frozen=True)
class Truths:
    """Booleans read one after another at one line: indices ``first`` to ``last`` (excluded) of confirming output
    ``leaf``.

    All of them except the last equal ``goes_on``.
    """

    leaf: int
    first: int
    last: int
    goes_on: bool


def truths_read(learned: Sequence[Learned]) -> list[Truths]:
    """The lines that read several booleans, all equal but the last.

    >>> def of(*truths):
    ...     return [Learned("model.py:3", "truth", 0, index, truth) for index, truth in enumerate(truths)]
    >>> truths_read(of(True, True, False))
    [Truths(leaf=0, first=0, last=3, goes_on=True)]
    >>> truths_read(of(True, False, True)), truths_read(of(True, True))
    ([], [])
    """
    found: list[list[Learned]] = []
    for one in learned:
        if one.guard != "truth" or one.index is None:
            continue
        before = found[-1][-1] if found else None
        if before and (before.leaf, before.source, before.index) == (one.leaf, one.source, one.index - 1):
            found[-1].append(one)
        else:
            found.append([one])
    return [
        Truths(read[0].leaf, index, index + len(read), bool(read[0].expected))
        for read in found
        if (index := read[0].index) is not None and len(read) > 1 and _ends(read)
    ]


def _ends(read: Sequence[Learned]) -> bool:
    *others, last = (one.expected for one in read)
    return len(set(others)) == 1 and last is not others[0]


def _element(value: Tensor, index: int | None) -> object:
    return (value if index is None else value[index]).item()


def bits(number: object) -> object:
    """A value that is equal for two numbers only if they have the same bits: it distinguishes signed zeros, and NaN
    equals itself.

    >>> bits(0.0) == bits(-0.0), bits(float("nan")) == bits(float("nan")), bits(3) == bits(3)
    (False, True, True)
    """
    if isinstance(number, float):
        return struct.pack("d", number)
    if isinstance(number, complex):
        return struct.pack("dd", number.real, number.imag)
    return number


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and elements, bit by bit, so that NaN equals itself.

    >>> zeros, nan = torch.zeros(1), torch.tensor(torch.nan)
    >>> same_bits(zeros, -zeros), same_bits(nan, nan)
    (False, True)
    >>> square, complex = torch.arange(4.0).reshape(2, 2), torch.tensor([1 + 2j])
    >>> same_bits(square.t(), square), same_bits(square.t(), square.t().clone()), same_bits(complex.conj(), complex)
    (False, True, False)
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.resolve_conj().resolve_neg().contiguous(), other.resolve_conj().resolve_neg().contiguous()
    if is_host(one) and is_host(other):
        return bool(_compare(one.data_ptr(), other.data_ptr(), one.nbytes) == 0)
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


_compare = ctypes.CDLL(None).memcmp  # several times as fast as an operator of torch on bytes
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
