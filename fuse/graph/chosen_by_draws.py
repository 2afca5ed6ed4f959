"""Choices by random numbers as data: both sides are computed, and the program selects one in each call.

    token = trg[t] if random.random() < ratio else top1      ->      token = where(choices[t], trg[t], top1)

With a choice in each step, hardly any call goes the same way as another, and a program for one way would serve no other
call. A first recording shows which functions compare several drawn numbers. They are recorded again with their simple
choices replaced (:mod:`fuse.graph.choices`); other choices are still learned.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuse.errors import CaptureError
from fuse.graph.choices import Choosing, rewritten
from fuse.graph.drawn_numbers import DrawnTruth, DrawRecord, is_drawn

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
    if record.chooses or record.compared() < FEWEST:
        return
    nothing = Choosing(is_drawn, int, lambda *_: None)
    codes = [one.__code__ for one in functions if one.__code__ in record.codes and rewritten(one, nothing)]
    if codes:
        raise Chooses(frozenset(codes))


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

        choosing = Choosing(is_ours, self._begin, self.both)
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

    def both(self, truth: DrawnTruth, first: int, one: Any, second: int, other: Any) -> Any:
        """The side that ``truth`` selects; each side was computed from this number of operators on."""
        self.begun -= 2
        if truth.comparison.expected:
            del self.dispatches[second:]  # eager does not compute the other side
        else:
            del self.dispatches[first:second]
        if one is True and other is False:
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
    strides = [stride for size, stride in zip(side.shape, side.stride(), strict=True) if size > 1]
    return strides == sorted(strides, reverse=True) and 0 not in strides
