"""Random numbers that ``forward`` draws from Python's ``random`` or from ``numpy.random``.

    if random.random() < 0.5:              learned: True. A later call draws and compares before its program runs
    start = random.randint(0, 8)
    x[:, start : start + 4]                a Number (read_numbers.py); the program gets what the call draws as a tensor
    token = trg[t] if random.random() < 0.5 else top1        where(choices[i], trg[t], top1), if a call compares several
                                                             (choices.py); the program gets the results as one tensor

A recording draws from a copy of the generator, which has the state before the call: the numbers are those that eager
would draw, and the user's generator does not move. A later call makes the same draws on the generator itself. If
``forward`` went another way for these numbers, the state is put back, and nothing has happened.
"""

from __future__ import annotations

import contextlib
import math
import operator
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from fuse.errors import CaptureError
from fuse.graph.numbers.learned import Learned, bits
from fuse.graph.numbers.read_numbers import Number, Reading, drawn_number
from fuse.graph.sources import user_line
from fuse.graph.state.python_generators import GLOBAL, copied, global_generators, name_of, put_back_state, raw_state_of

_OF_RANDOM = (
    *("random", "uniform", "triangular", "gauss", "normalvariate", "expovariate", "betavariate"),
    *("randint", "randrange", "getrandbits", "choice"),
)
_OF_NUMPY = ("random", "random_sample", "rand", "uniform", "normal", "randn", "randint")
LARGEST_CHOICES = 512
"""The elements of the tensor of choices: room for so many steps, at one byte each."""
LARGEST_OUTCOMES = 64
"""The most integers that a draw may give whose result Python learns: with more, the next call hardly draws the same."""
_MOVING = ("seed", "setstate", "getstate", "set_state", "get_state")
_FROM_ZERO_TO_ONE = ("random", "random_sample", "rand")
"""Functions without arguments that draw a real number of at least 0 and less than 1."""
_SAME = frozenset({("lt", 0), ("ge", 0), ("lt", 1), ("le", 1), ("gt", 1), ("ge", 1), ("eq", 1), ("ne", 1)})
"""Comparisons with 0 or 1 that have one result for all such numbers."""
LARGEST_INPUTS = 16
"""The most drawn numbers that a program gets as tensors. Each is an input of its own, so that a loop in which every
step gets one does not roll."""


@dataclass(frozen=True)
class Draw:
    """One call of a ``method`` of a generator."""

    generator: Any
    method: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def of(self, generator: Any) -> Any:
        """The number that ``generator`` draws, from its present state."""
        return getattr(generator, self.method)(*self.args, **dict(self.kwargs))

    def outcomes(self) -> float:
        """The number of integers that it may draw, at most; infinite for real numbers."""
        given = [*self.args, *(value for _, value in self.kwargs)]
        if self.method == "choice":
            return len(given[0])
        if self.method == "getrandbits":
            return math.inf if given[0] > 62 else float(1 << given[0])
        if self.method not in ("randint", "randrange") or any(type(one) is not int for one in given):
            return math.inf
        return int(max(given) - min(0, *given) + 1)

    def __str__(self) -> str:
        return f"{name_of(self.generator)} {self.method} {self.args!r} {self.kwargs!r}"


@dataclass(frozen=True)
class DrawComparison:
    """A comparison of draw number ``draw`` with ``other`` at the user's line ``source``, which Python learned.

    ``name``: ``lt``, ``eq``, ``ge`` and so on. ``expected``: the result at capture. ``modulus``: the remainder of the
    draw by this integer is compared; None for the draw itself.

    >>> DrawComparison(0, "eq", 1, True, "model.py:3", modulus=2).holds([7])
    True
    """

    draw: int
    name: str
    other: float | int
    expected: bool
    source: str
    modulus: int | None = None

    @cached_property
    def compare(self) -> Callable[[Any, Any], bool]:
        """The comparison as a function of the draw and ``other``."""
        compare: Callable[[Any, Any], bool] = getattr(operator, self.name)
        modulus = self.modulus
        return compare if modulus is None else lambda number, other: compare(number % modulus, other)

    def holds(self, numbers: Sequence[Any]) -> bool:
        return self.compare(numbers[self.draw], self.other)


@dataclass(frozen=True)
class Drawn:
    """All draws of a call, in order, what Python learned of them, and the choices that are data.

    >>> drawn = Drawn((Draw(random.Random(0), "random"),), (DrawComparison(0, "lt", 0.5, False, "model.py:3"),))
    >>> drawn.draw(), drawn.difference([0.1]).source
    ([0.8444218515250481], 'model.py:3')
    """

    draws: tuple[Draw, ...]
    comparisons: tuple[DrawComparison, ...] = ()
    choices: tuple[DrawComparison, ...] = ()

    def states(self) -> list[tuple[Any, Any]]:
        """The generators and their present states."""
        return [(generator, raw_state_of(generator)) for generator in self._generators]

    def draw(self) -> list[Any]:
        """The numbers of a call."""
        return [draw(*args) if not kwargs else draw(*args, **kwargs) for draw, args, kwargs in self._calls]

    def chosen(self, numbers: Sequence[Any]) -> Tensor:
        """The choices of a call with these numbers."""
        truths = bytearray(LARGEST_CHOICES)
        truths[: len(self.choices)] = bytes([compare(numbers[i], other) for compare, i, other in self._chosen])
        return torch.frombuffer(truths, dtype=torch.bool)

    def difference(self, numbers: Sequence[Any]) -> Learned | None:
        """The first comparison that has another result for these numbers than at capture, as Python learns it."""
        for compare, draw, other, expected, one in self._compared:
            if compare(numbers[draw], other) is not expected:
                return Learned(one.source, "truth", -1, None, expected)
        return None

    def values_by_key(self, numbers: Sequence[Any]) -> dict[int, object]:
        """The results of all comparisons for these numbers, by key of :class:`fuse.graph.numbers.learned.Learned`."""
        return {key: one.holds(numbers) for key, one in zip(self._keys, self.comparisons, strict=True)}

    def apart(self, known: Mapping[int, object]) -> int:
        """The number of draws of which Python would learn something else than here."""
        pairs = zip(self._keys, self.comparisons, strict=True)
        return len({one.draw for key, one in pairs if known.get(key, one.expected) is not one.expected})

    @cached_property
    def _generators(self) -> list[Any]:
        return list({id(draw.generator): draw.generator for draw in self.draws}.values())

    @cached_property
    def _calls(self) -> list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
        return [(getattr(one.generator, one.method), one.args, dict(one.kwargs)) for one in self.draws]

    @cached_property
    def _compared(self) -> list[tuple[Callable[[Any, Any], bool], int, Any, bool, DrawComparison]]:
        return [(one.compare, one.draw, one.other, one.expected, one) for one in self.comparisons]

    @cached_property
    def _chosen(self) -> list[tuple[Callable[[Any, Any], bool], int, Any]]:
        return [(one.compare, one.draw, one.other) for one in self.choices]

    @cached_property
    def _keys(self) -> list[int]:
        """A number depends on all draws before it."""
        before: list[int] = []
        for draw in self.draws:
            before.append(hash((before[-1] if before else 0, str(draw))))
        return [hash((before[one.draw], one.name, bits(one.other), one.modulus)) for one in self.comparisons]


def put_back(states: Sequence[tuple[Any, Any]]) -> None:
    """Restore states of :meth:`Drawn.states`."""
    for generator, state in states:
        put_back_state(generator, state)


@dataclass(eq=False)
class DrawRecord:
    """The draws of one recording.

    ``as_input(number, draw)`` makes a drawn number an input of the graph. ``plain``: integers are learned instead.
    ``as_choices`` makes the tensor of choices an input, and returns the fake tensor and the real one. ``chooses``:
    whether a comparison may be data: only conditions read its result.
    """

    reader: Reading
    as_input: Callable[[int | float, int], Node]
    plain: bool
    as_choices: Callable[[], tuple[Tensor, Tensor]]
    chooses: bool = False
    codes: set[types.CodeType] = field(default_factory=set)  # of the user's functions that compare drawn numbers
    draws: list[Draw] = field(default_factory=list)
    inputs: int = 0
    _comparisons: dict[tuple[int, str, object, int | None], DrawComparison] = field(default_factory=dict)
    _copies: dict[int, Any] = field(default_factory=dict)
    _choices: list[DrawComparison] = field(default_factory=list)
    _tensors: tuple[Tensor, Tensor] | None = None

    def found(self) -> Drawn | None:
        """The draws of the call; None if there are none."""
        found = Drawn(tuple(self.draws), tuple(self._comparisons.values()), tuple(self._choices))
        return found if self.draws else None

    def compared(self) -> int:
        """The number of draws of which Python learned something."""
        return len({one.draw for one in self._comparisons.values()})

    def draw(self, draw: Draw) -> Number | int:
        """The next number."""
        if any(type(one) not in (int, float, bool, range) for one in (*draw.args, *dict(draw.kwargs).values())):
            self._refuse()
        key = id(draw.generator)
        if key not in self._copies:
            self._copies[key] = copied(draw.generator)
        value = draw.of(self._copies[key])
        if type(value) not in (int, float):
            self._refuse()
        self.draws.append(draw)
        drawing = _Drawing(self, len(self.draws) - 1, value)
        return drawn_number(self.reader, value, drawing, self._bound(draw, value))

    def compare(self, number: int, value: Any, name: str, other: Any) -> bool | DrawnTruth:
        """The truth of a comparison, which is learned unless it is the same for all numbers that may be drawn."""
        found: bool = getattr(operator, name)(value, other)
        if self.draws[number].method in _FROM_ZERO_TO_ONE and (other < 0 or other > 1 or (name, other) in _SAME):
            return found
        one = DrawComparison(number, name, other, found, user_line())
        if self.chooses:
            return DrawnTruth(self, one)
        self.codes.add(users_code())
        return self.learn(one)

    def learn(self, one: DrawComparison) -> bool:
        """The truth of a comparison, which is learned."""
        return self._comparisons.setdefault((one.draw, one.name, bits(one.other), one.modulus), one).expected

    def choice(self, one: DrawComparison) -> Tensor:
        """The truth of a comparison as a tensor, which is not learned."""
        if self._tensors is None:
            self._tensors = self.as_choices()
        if one not in self._choices:
            if len(self._choices) == LARGEST_CHOICES:
                raise CaptureError(f"forward makes more than {LARGEST_CHOICES} choices by random numbers")
            with _disable_current_modes():
                self._tensors[1][len(self._choices)] = one.expected
            self._choices.append(one)
        return self._tensors[0][self._choices.index(one)]

    def _bound(self, draw: Draw, value: Any) -> int | None:
        """The largest absolute value that an integer may have, if it follows from the arguments."""
        given = [abs(one) for one in (*draw.args, *dict(draw.kwargs).values()) if type(one) is int]
        follows = type(value) is int and draw.method in ("randint", "randrange") and given
        return max(given) if follows else None

    def _refuse(self) -> None:
        raise CaptureError(f"forward draws random numbers at {user_line()} in a way that a graph cannot hold")


@dataclass(frozen=True, eq=False)
class _Drawing:
    """The random number that draw ``number`` of a recording drew."""

    record: DrawRecord
    number: int
    value: float | int

    @property
    def is_plain(self) -> bool:
        return self.record.plain and type(self.value) is int

    def compared(self, name: str, other: float | int) -> bool | DrawnTruth:
        return self.record.compare(self.number, self.value, name, other)

    def learned(self) -> int:
        """The number itself, which is learned; a later call draws the same integer, but hardly the same real number."""
        if self.record.draws[self.number].outcomes() > LARGEST_OUTCOMES:
            raise CaptureError(f"forward uses random numbers at {user_line()} in a way that a graph cannot hold")
        self.record.learn(DrawComparison(self.number, "eq", self.value, True, user_line()))
        return int(self.value)

    def remainder(self, modulus: int) -> int | None:
        """The remainder of bits that Python drew, which is learned; None for other draws, and if it may be one of
        many."""
        draw = self.record.draws[self.number]
        if draw.method != "getrandbits" or draw.outcomes() <= LARGEST_OUTCOMES or modulus > LARGEST_OUTCOMES:
            return None
        found = int(self.value % modulus)
        if modulus > 1:
            self.record.learn(DrawComparison(self.number, "eq", found, True, user_line(), modulus))
        return found

    def node(self) -> Node:
        self.record.inputs += 1
        if self.record.inputs > LARGEST_INPUTS:
            raise CaptureError(f"forward computes with more than {LARGEST_INPUTS} random numbers of Python")
        return self.record.as_input(self.value, self.number)


class DrawnTruth:
    """The truth of a comparison with a drawn number: learned where a condition needs it. Nothing else sees it."""

    __slots__ = ("comparison", "record")

    def __init__(self, record: DrawRecord, comparison: DrawComparison) -> None:
        self.record = record
        self.comparison = comparison

    def __bool__(self) -> bool:
        return self.record.learn(self.comparison)


def is_drawn(value: Any) -> bool:
    """Whether ``value`` is the truth of a comparison with a drawn number."""
    return type(value) is DrawnTruth


def users_code() -> types.CodeType:
    """The code that called, from outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("fuse."):
        frame = frame.f_back
    return frame.f_code


# ---- in place of the functions of the modules ------------------------------------------------------------------------


@contextlib.contextmanager
def draws_followed(
    record: DrawRecord,
    names: Sequence[tuple[str, dict[str, Any], Any]],
    cells: Sequence[tuple[str, types.CellType, Any]],
    code: Sequence[types.FunctionType],
) -> Iterator[None]:
    """A context in which ``record`` makes this thread's draws from the generators behind ``random`` and
    ``numpy.random``.

    ``names``: the names in code of the user that may be such functions (``from random import random``), with the
    globals that they are in, and their values; so do ``cells``, which closures hold, and keyword defaults of
    functions in ``code`` (type checkers bind them there).
    """
    thread, refusing = threading.get_ident(), record.reader.refusing

    def instead(generator: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or record.reader.closed:
                return original(*args, **kwargs)
            with refusing():
                if name in _MOVING:
                    raise CaptureError(
                        f"forward reads or sets the state of {name_of(generator)}; a graph cannot hold that"
                    )
                if name != "choice":
                    return record.draw(Draw(generator, name, args, tuple(kwargs.items())))
                found = record.draw(Draw(generator, name, (range(len(*args, **kwargs)),)))
            return args[0][int(found)]

        return drawn

    functions = {
        id(original): (original, instead(generator, name, original))
        for generator in global_generators()
        for name in (*(_OF_RANDOM if generator is GLOBAL else _OF_NUMPY), *_MOVING)
        if (original := getattr(_module_of(generator), name, None)) is not None
        and getattr(original, "__self__", None) is generator  # the user may have put another function there
    }
    setitem, spaces = dict.__setitem__, [vars(_module_of(generator)) for generator in global_generators()]
    found = [(space, name, value) for space in spaces for name, value in space.items() if id(value) in functions]
    found += [(space, name, value) for name, space, value in names if id(value) in functions and space not in spaces]
    places: list[tuple[Callable[[Any], None], Any]] = [(partial(setitem, *where), value) for *where, value in found]
    places += [(partial(setattr, cell, "cell_contents"), value) for _, cell, value in cells if id(value) in functions]
    for function in code:
        named = function.__kwdefaults__ or {}
        places += [(partial(setitem, named, name), value) for name, value in named.items() if id(value) in functions]
    try:
        for put, value in places:
            put(functions[id(value)][1])
        yield
    finally:
        for put, value in places:
            put(value)


def _module_of(generator: Any) -> Any:
    """The module whose functions are the methods of a generator."""
    return random if generator is GLOBAL else sys.modules["numpy.random"]
