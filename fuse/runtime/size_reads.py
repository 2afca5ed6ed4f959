"""How ``forward`` uses the sizes of tensors: run once more, with sizes that note what they are compared with.

    if x.shape[0] > 100:               noted:  not n0 > 100
        x = x[:100]
    for t in range(len(x)):            nothing is noted: the loop runs as often as there are steps
        h = cell(x[t], h)
    return h / math.sqrt(x.shape[0])   noted: n0 == 37, so that nothing is known of other sizes

Sizes are followed in the Python code of the model and of the libraries it calls, until an operator is dispatched;
``counting.py`` does so where Python counts, and ``unnoted.py`` refuses what leaves no note. The graph that is recorded
is thrown away.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from fuse.graph.capture import prepared
from fuse.graph.joint import JointRecorder
from fuse.graph.mutated_attributes import Plan, settled
from fuse.graph.patched import patched
from fuse.graph.recorder import Recorder
from fuse.kernel.extents import Conditions
from fuse.runtime.counting import counting
from fuse.runtime.unnoted import noted

UNKNOWN = "unknown"
"""Prefix of the names of sizes without a formula."""


class Unfollowed(Exception):
    """Sizes were used in a way that cannot be noted."""


Formulas = Mapping[int, Any]
"""Sizes of the call at hand by their values: extents where a formula is known, numbers where they are always the same.
"""


def size_conditions(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    formulas: Formulas,
    conditions: Conditions,
    gradients: bool,
) -> None:
    """Run ``forward`` on fake tensors; what it compares sizes with is noted in ``conditions``. With ``gradients`` these
    are recorded, which it may ask for.

    Raises:
        Unfollowed: it compared a size of which no formula is known.
        CaptureError: the call cannot be captured.
    """
    following = _Following(formulas, conditions)

    def record(plan: Plan) -> Any:
        with prepared(model, args, kwargs) as fake_mode:
            follower = _TrainedFollower if gradients else _Follower
            return follower(model, fake_mode, plan, following).run(args, dict(kwargs))

    settled(record, ())
    following.check()


class _Following:
    """What tensors answer that are asked for sizes, in one thread, while they are followed."""

    def __init__(self, formulas: Formulas, conditions: Conditions) -> None:
        self._formulas = formulas
        self._conditions = conditions
        self._unknown: dict[int, Any] = {}
        self._thread = threading.get_ident()
        self._plain = 1
        self._refused: list[str] = []

    def number(self, number: int) -> Any:
        """A size as ``forward`` sees it."""
        if self._plain or threading.get_ident() != self._thread or number < 2:
            return number
        if number in self._formulas:
            return self._formulas[number]
        if number not in self._unknown:
            self._unknown[number] = self._conditions.size(f"{UNKNOWN}{len(self._unknown)}", number)
        return self._unknown[number]

    def known(self, number: int) -> Any:
        """The length of a list as ``forward`` sees it: a size, if one has this value."""
        return self.number(number) if number in self._formulas else number

    def check(self) -> None:
        """Raise ``Unfollowed`` where something was asked that was not noted."""
        if self._refused:
            raise Unfollowed(self._refused[0])
        if sum(UNKNOWN in text for text in self._conditions.noted) > len(self._unknown):  # each is noted to be a size
            raise Unfollowed("a size is compared of which no formula is known")

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """As long as this lasts, fake tensors answer with sizes that note how they are used."""
        names = counting(self.number, self.known)
        with patched(FakeTensor, {name: answer(self) for name, answer in _ANSWERS.items()}):
            self._plain -= 1
            try:
                with noted(self._refused.append, lambda: self._plain > 0, names):
                    yield
            finally:
                self._plain += 1

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """As long as this lasts, sizes are numbers."""
        self._plain += 1
        try:
            yield
        finally:
            self._plain -= 1


def _shape(following: _Following) -> Any:
    return property(lambda tensor: _shape_of(following, tensor))


def _shape_of(following: _Following, tensor: Tensor) -> _Size:
    return _Size(map(following.number, Tensor.size(tensor)))


class _Size(tuple[int, ...]):
    """A shape whose number of elements follows from its sizes; ``torch.Size`` itself has no subclasses."""

    @property  # type: ignore[misc]  # what ``isinstance`` asks
    def __class__(self) -> type:
        return torch.Size

    def numel(self) -> int:
        return math.prod(self)

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return _Size(found) if isinstance(place, slice) else found

    def __add__(self, other: Any) -> Any:
        return _Size((*self, *other))


def _size(following: _Following) -> Callable[..., Any]:
    def size(tensor: Tensor, dim: int | None = None) -> Any:
        return _shape_of(following, tensor) if dim is None else following.number(Tensor.size(tensor, dim))

    return size


def _stride(following: _Following) -> Callable[..., Any]:
    def stride(tensor: Tensor, dim: int | None = None) -> Any:
        if dim is not None:
            return following.number(Tensor.stride(tensor, dim))
        return tuple(map(following.number, Tensor.stride(tensor)))

    return stride


def _numel(following: _Following) -> Callable[..., Any]:
    return lambda tensor: math.prod(_shape_of(following, tensor))


def _nbytes(following: _Following) -> Any:
    return property(lambda tensor: math.prod(_shape_of(following, tensor)) * tensor.itemsize)


def _storage_offset(following: _Following) -> Callable[..., Any]:
    return lambda tensor: following.number(int(Tensor.storage_offset(tensor)))


_ANSWERS: dict[str, Callable[[_Following], Any]] = {
    "shape": _shape,
    "size": _size,
    "stride": _stride,
    "numel": _numel,
    "nelement": _numel,
    "nbytes": _nbytes,
    "storage_offset": _storage_offset,
}


class _Follower(Recorder):
    """Records a call in which sizes are followed."""

    def __init__(self, model: nn.Module, fake_mode: Any, plan: Plan, following: _Following) -> None:
        super().__init__(model, fake_mode, plan)
        self._following = following

    @contextlib.contextmanager
    def _read_state(self, arguments: Any) -> Iterator[None]:
        with super()._read_state(arguments), self._following.answering():
            yield

    def _dispatched(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._following.plainly():
            return super()._dispatched(op, args, kwargs)


class _TrainedFollower(_Follower, JointRecorder):
    """The same where gradients are recorded."""
