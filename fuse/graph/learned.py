"""Values that Python learned while a call was recorded, and the parts that later calls must confirm.

    if (x > 0).any():         the truth of a value          True
    n = int(lengths.max())    a number                      17
    x[mask], x.unique()       a size                        (17, 4)
    x / x.max().item()        nothing: the number goes back to tensors, and is computed in each call

A program that was specialised on what Python learned computes it again in each call, and gives it beside its results.
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
    """One thing that Python learned at the user's line ``source``: ``leaf`` of the values that the program gives beside
    its results, at ``place`` if that holds several, was ``expected``. ``key`` is equal where the same operators compute
    it from the same inputs."""

    source: str
    guard: Guard
    leaf: int
    place: int | None
    expected: object
    key: int = 0

    def __str__(self) -> str:
        if self.guard == "truth":
            return f"a value read at {self.source or '?'} is {self.expected}"
        if self.guard == "number":
            return f"the number read at {self.source or '?'} is {self.expected}"
        if self.guard == "size":
            return f"the size of what is made at {self.source or '?'} is {self.expected}"
        return f"the values read at {self.source or '?'} are as they were"


@dataclass(frozen=True)
class ReadLine:
    """What is read at one line of the user's, ``count`` times: ``guard`` is ``none`` where nothing depends on it but
    values."""

    source: str
    guard: Guard | Literal["none"]
    count: int


@dataclass(frozen=True)
class Learning:
    """All that Python learned in a call. ``leaves``: how many values the program gives beside its results.

    >>> learned = Learning(1, (Learned("model.py:3", "truth", 0, None, True),), ())
    >>> learned.difference([torch.tensor(True)]) is None
    True
    >>> str(learned.difference([torch.tensor(False)]))
    'a value read at model.py:3 is True'
    """

    leaves: int
    learned: tuple[Learned, ...]
    lines: tuple[ReadLine, ...]

    def told(self, values: Sequence[Tensor | None]) -> dict[int, object]:
        """The learned values, by key."""
        return {
            one.key: tuple(value.shape) if one.guard == "size" else bits(_element(value, one.place))
            for one in self.learned
            if one.guard != "values" and (value := values[one.leaf]) is not None
        }

    def fits(self, told: Mapping[int, object]) -> bool:
        """Whether nothing that was learned is otherwise in ``told``."""
        return all(
            one.guard == "values" or one.key not in told or told[one.key] == bits(one.expected) for one in self.learned
        )

    def another_size(self, source: str, shape: tuple[int, ...]) -> Learned | None:
        """The first size that was learned at a line and is not ``shape``."""
        sizes = (one for one in self.learned if one.guard == "size" and one.source == source)
        return next((one for one in sizes if one.expected != shape), None)

    def difference(self, values: Sequence[Tensor | None]) -> Learned | None:
        """The first thing that is not as it was learned; ``values`` begin with those given beside the results."""
        told: dict[int, object] = {}
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
            if one.leaf not in told:
                told[one.leaf] = value.tolist()
            found = told[one.leaf]
            if one.place is not None:
                found = found[one.place]  # type: ignore[index]  # a list then
            if found is not one.expected and bits(found) != bits(one.expected):
                return one
        return None


@dataclass(frozen=True)
class Truths:
    """The truths that one line of the user's read one after another: places ``first`` to ``last`` (excluded) of value
    number ``leaf`` of those that tell what was learned. All but the last are ``goes_on``."""

    leaf: int
    first: int
    last: int
    goes_on: bool


def truths_read(learned: Sequence[Learned]) -> list[Truths]:
    """The lines that read a truth several times, the same but for the last time.

    >>> def of(*truths):
    ...     return [Learned("model.py:3", "truth", 0, place, truth) for place, truth in enumerate(truths)]
    >>> truths_read(of(True, True, False))
    [Truths(leaf=0, first=0, last=3, goes_on=True)]
    >>> truths_read(of(True, False, True)), truths_read(of(True, True))
    ([], [])
    """
    found: list[list[Learned]] = []
    for one in learned:
        if one.guard != "truth" or one.place is None:
            continue
        before = found[-1][-1] if found else None
        if before and (before.leaf, before.source, before.place) == (one.leaf, one.source, one.place - 1):
            found[-1].append(one)
        else:
            found.append([one])
    return [
        Truths(read[0].leaf, place, place + len(read), bool(read[0].expected))
        for read in found
        if (place := read[0].place) is not None and len(read) > 1 and _ends(read)
    ]


def _ends(read: Sequence[Learned]) -> bool:
    *others, last = (one.expected for one in read)
    return len(set(others)) == 1 and last is not others[0]


def _element(value: Tensor, place: int | None) -> object:
    return (value if place is None else value[place]).item()


def bits(number: object) -> object:
    """What is equal for two numbers only if they are the same, zeros by sign and NaN included.

    >>> bits(0.0) == bits(-0.0), bits(float("nan")) == bits(float("nan")), bits(3) == bits(3)
    (False, True, True)
    """
    if isinstance(number, float):
        return struct.pack("d", number)
    if isinstance(number, complex):
        return struct.pack("dd", number.real, number.imag)
    return number


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one layout hold the same, NaN included.

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


_compare = ctypes.CDLL(None).memcmp  # of torch's operators, one of bytes takes several times as long
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
