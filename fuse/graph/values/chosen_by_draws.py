"""Choices by random numbers as data: both sides are computed, and the program selects one in each call.

    token = trg[t] if random.random() < ratio else top1      ->      token = where(choices[t], trg[t], top1)

With a choice in each step, hardly any call goes the same way as another, and a program for one way would serve no other
call. A first recording shows which functions compare several drawn numbers. They are recorded again with their simple
choices replaced (:mod:`fuse.graph.values.choices`); other choices are still learned.
"""

from __future__ import annotations

import contextlib
import dis
import operator
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fuse.errors import CaptureError
from fuse.graph.numbers.drawn_numbers import DrawnTruth, DrawRecord, is_drawn
from fuse.graph.numbers.read_numbers import Number
from fuse.graph.values.choices import NOTHING, Choosing, rewritten

_PLAIN = (
    *(Tensor, FakeTensor, nn.Parameter, nn.Buffer, Number, int, float, bool, str, slice, range, type(None)),
    *(torch.Size, torch.dtype, torch.device),
)
_TELLING = frozenset(
    """
    _base _getframe _version as_strided data_ptr dir eval exec id is_contiguous is_set_to locals storage storage_offset
    stride untyped_storage vars
    """.split()  # noqa: SIM905
)
"""Names of functions that tell a tensor from an equal one, or that see the variables of a function."""
FEWEST = 2
"""Fewest draws of which Python learns something, so that choices become data: for one, two programs are made."""


class Chooses(CaptureError):
    """``forward`` chooses by several random numbers, in functions with this code; the call is recorded again."""

    def __init__(self, codes: frozenset[types.CodeType]) -> None:
        super().__init__("forward chooses by random numbers")
        self.codes = codes


def raise_if_several(record: DrawRecord, functions: Sequence[types.FunctionType]) -> None:
    """Ask for another recording if the functions of this one have choices that may be data.

    Raises:
        Chooses: they have.
    """
    if record.compared() < FEWEST or any(tells_apart(one.__code__) for one in functions):
        return
    codes = [one.__code__ for one in functions if one.__code__ in record.codes and rewritten(one, NOTHING)]
    if codes:
        raise Chooses(frozenset(codes))


def tells_apart(code: types.CodeType) -> bool:
    """Whether code may tell the result of a choice from the side that eager takes: by identity, or by its layout."""
    if not _TELLING.isdisjoint(code.co_names):
        return True
    before = ""
    for operation in code.co_code[::2]:
        name = dis.opname[operation]
        if name == "IS_OP" and before not in ("LOAD_CONST", "LOAD_GLOBAL"):  # neither loads a result
            return True
        before = before if name in ("CACHE", "EXTENDED_ARG") else name
    return any(tells_apart(one) for one in code.co_consts if isinstance(one, types.CodeType))


@dataclass(eq=False)
class ChoicesByDraws:
    """The choices of one recording.

    ``dispatches``: the operators that eager runs. ``copied(side, made)``: notes that eager has ``side`` itself, where
    the graph has ``made``. ``begun``: sides that were begun, and not followed by a choice.
    """

    record: DrawRecord
    dispatches: list[Any]
    copied: Callable[[Tensor, Tensor], None]
    begun: int = 0

    def raise_if_cut_off(self) -> None:
        """Refuse a recording in which a side raised, and the user's code went on: eager may not take that side."""
        if self.begun:
            raise CaptureError("one side of a choice by random numbers raises an error")

    @contextlib.contextmanager
    def made(self, functions: Sequence[types.FunctionType], codes: frozenset[types.CodeType]) -> Iterator[None]:
        """A context in which the functions with these codes make choices that are data, in this thread."""
        thread = threading.get_ident()

        def is_ours(value: Any) -> bool:
            return is_drawn(value) and threading.get_ident() == thread

        def compare(name: str, left: Any, right: Any) -> Any:
            is_simple = {type(left), type(right)} <= {Number, int, float, bool}
            self.record.chooses = is_simple and threading.get_ident() == thread
            try:
                return getattr(operator, name)(left, right)
            finally:
                self.record.chooses = False

        choosing = Choosing(compare, is_ours, self._begin, self._are_plain, self.both)
        before = [(one, one.__code__) for one in functions if one.__code__ in codes]
        try:
            for function, _ in before:
                function.__code__ = rewritten(function, choosing) or function.__code__
            yield
        finally:
            for function, code in before:
                function.__code__ = code

    def _begin(self) -> int:
        self.begun += 1
        return len(self.dispatches)

    def _are_plain(self, _: int, *operands: Any) -> bool:
        self.begun -= 1
        return all(map(_is_plain, operands))

    def both(self, truth: DrawnTruth, first: int, one: Any, second: int, other: Any, is_flag: bool) -> Any:
        """The side that ``truth`` selects; each side was computed from this number of operators on."""
        self.begun -= 2
        if truth.comparison.expected:
            del self.dispatches[second:]  # eager does not compute the other side
        else:
            del self.dispatches[first:second]
        if is_flag and one is True and other is False:
            return truth
        if self.record.reader.closed or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return one if bool(truth) else other
        if not _are_alike(one, other):
            return one if bool(truth) else other
        count = len(self.dispatches)
        result = torch.where(self.record.choice(truth.comparison), one, other)
        del self.dispatches[count:]
        for side in (one, other):
            self.copied(side, result)
        self.record.reader.gave_symbols = True
        return result


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether nothing but values tells two tensors apart. Neither has a gradient: what was not chosen in any step has
    none in eager mode, and would have zeros."""
    if one.requires_grad or other.requires_grad or type(one) is not type(other):
        return False
    facts = [(side.shape, side.dtype, side.device, side.layout) for side in (one, other)]
    return facts[0] == facts[1] and all(map(_is_row_major, (one, other)))


def _is_row_major(side: Tensor) -> bool:
    """Whether each ``view`` of a contiguous tensor of this shape is possible, too."""
    dims = [(size, stride) for size, stride in zip(side.shape, side.stride(), strict=True) if size > 1]
    steps = [stride for _, stride in dims]
    return 0 not in steps and steps[:-1] == [size * stride for size, stride in dims[1:]]


def _is_plain(operand: Any) -> bool:
    """Whether lookups and methods of an operand are known to have no effect."""
    if type(operand) in (list, tuple):
        return all(map(_is_plain, operand))
    if type(operand) is dict:
        return all(map(_is_plain, (*operand, *operand.values())))
    return operand is torch or type(operand) in _PLAIN
