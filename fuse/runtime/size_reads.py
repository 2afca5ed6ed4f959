"""Record the comparisons of sizes in ``forward``, by running it with symbolic sizes (extents).

    if x.shape[0] > 100:               recorded:  not n0 > 100
        x = x[:100]
    for t in range(len(x)):            nothing is recorded: the loop has as many steps as the size
        h = cell(x[t], h)
    return h / math.sqrt(x.shape[0])   recorded: n0 == 37, so that other sizes are captured

Sizes are symbolic in the Python code of the model and its libraries, and plain within operators. ``counting.py``
replaces Python's counting functions, and ``unrecorded_uses.py`` refuses uses of sizes that cannot be recorded. Where an
integer argument varies, it and all sizes are watched (``watched_integers.py``). The captured graph is discarded.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fuse.graph.capture import prepared
from fuse.graph.joint import JointRecorder
from fuse.graph.mutated_attributes import Plan, settled
from fuse.graph.patched import in_this_thread, patched
from fuse.graph.recorder import Recorder
from fuse.kernel.extents import Conditions, Extent
from fuse.runtime.counting import counting
from fuse.runtime.unrecorded_uses import recording_uses
from fuse.runtime.watched_integers import WatchedInteger, passed, watched

UNKNOWN = "unknown"
"""Prefix of the names of sizes for which no formula is known."""


class Unfollowed(Exception):
    """Sizes were used in a way that cannot be recorded."""


Formulas = Mapping[int, Any]
"""By the value of a size in the current call: an extent if it has a formula, or a number if it is constant."""


def size_conditions(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    formulas: Formulas,
    integers: Sequence[Any],
    conditions: Conditions,
    gradients: bool,
) -> None:
    """Run ``forward`` on fake tensors with symbolic sizes; comparisons are recorded in ``conditions``.

    ``integers`` are the integer arguments, extents where they vary. With ``gradients``, the call is captured with its
    gradients, on which ``forward`` may depend.

    Raises:
        Unfollowed: a size without a formula was compared, or a use cannot be recorded.
        CaptureError: the call cannot be captured.
    """
    following = _Following(formulas, integers, conditions)

    def record(plan: Plan) -> Any:
        with prepared(model, args, kwargs) as fake_mode:
            follower = _TrainedFollower if gradients else _Follower
            return follower(model, fake_mode, plan, following).run(args, dict(kwargs))

    settled(record, ())
    following.check()


class _Following:
    """Source of the sizes that fake tensors return in one thread: symbolic in user code, plain in operators."""

    def __init__(self, formulas: Formulas, integers: Sequence[Any], conditions: Conditions) -> None:
        self._formulas = formulas
        self.watches = any(isinstance(one, Extent) for one in integers)
        self._integers = iter(integers)
        self._running: dict[FrameType, Any] = {}  # the function of C that each frame calls now
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
            return self._seen(self._formulas[number])
        if number not in self._unknown:
            self._unknown[number] = self._conditions.size(f"{UNKNOWN}{len(self._unknown)}", number)
        return self._seen(self._unknown[number])

    def integer(self) -> Any:
        """The next integer argument as ``forward`` sees it."""
        return self._seen(next(self._integers))

    def _seen(self, number: Any) -> Any:
        return watched(number, self._running.get) if self.watches else number

    def known(self, number: int) -> Any:
        """The length of a list as ``forward`` sees it: a size, if one has this value."""
        return self.number(number) if number in self._formulas else number

    def check(self) -> None:
        """Raise ``Unfollowed`` if a use of a size was not recorded."""
        if self._refused:
            raise Unfollowed(self._refused[0])
        if sum(UNKNOWN in text for text in self._conditions.noted) > len(
            self._unknown
        ):  # one condition each is expected
            raise Unfollowed("a size without a formula is compared")

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """A context in which fake tensors return symbolic sizes."""
        names = counting(self.number, self.known)
        indexing = _indexing() if self.watches else contextlib.nullcontext()
        with patched(FakeTensor, _answers(self.number)), indexing:
            self._plain -= 1
            running = self._running if self.watches else None
            try:
                with recording_uses(self._refused.append, lambda: self._plain > 0, names, running):
                    yield
            finally:
                self._plain += 1

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """A context in which sizes are plain numbers."""
        self._plain += 1
        try:
            yield
        finally:
            self._plain -= 1


class _Size(tuple[int, ...]):
    """A shape of symbolic sizes with a symbolic ``numel``; ``torch.Size`` cannot be subclassed."""

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


def _answers(number: Callable[[int], Any]) -> dict[str, Any]:
    """Attributes of fake tensors with sizes as ``number`` gives them, by name."""

    def shape(tensor: Tensor) -> _Size:
        return _Size(map(number, Tensor.size(tensor)))

    def size(tensor: Tensor, dim: int | None = None) -> Any:
        return shape(tensor) if dim is None else number(Tensor.size(tensor, int(dim)))

    def stride(tensor: Tensor, dim: int | None = None) -> Any:
        return tuple(map(number, Tensor.stride(tensor))) if dim is None else number(Tensor.stride(tensor, int(dim)))

    def numel(tensor: Tensor) -> Any:
        return shape(tensor).numel()

    return {
        "shape": property(shape),
        "size": size,
        "stride": stride,
        "numel": numel,
        "nelement": numel,
        "nbytes": property(lambda tensor: numel(tensor) * tensor.itemsize),
        "storage_offset": lambda tensor: number(int(Tensor.storage_offset(tensor))),
    }


@contextlib.contextmanager
def _indexing() -> Iterator[None]:
    """A context in which tensors take watched integers in indices; those of the model's attributes may be no fakes."""
    with contextlib.ExitStack() as layers:
        for owner in (Tensor, FakeTensor):
            layers.enter_context(patched(owner, _indexed(owner.__getitem__, owner.__setitem__)))
        yield


def _indexed(get: Callable[..., Any], put: Callable[..., Any]) -> dict[str, Any]:
    """Methods of tensors for indices with watched integers, by name."""
    return {
        "__getitem__": in_this_thread(lambda tensor, index: get(tensor, passed(index)), get),
        "__setitem__": in_this_thread(lambda tensor, index, value: put(tensor, passed(index), passed(value)), put),
    }


class _Follower(Recorder):
    """Recorder of a call with symbolic sizes."""

    def __init__(self, model: nn.Module, fake_mode: Any, plan: Plan, following: _Following) -> None:
        super().__init__(model, fake_mode, plan)
        self._following = following

    def _argument(self, name: str, index: int, leaf: Any) -> Any:
        return self._following.integer() if type(leaf) is int else super()._argument(name, index, leaf)

    @contextlib.contextmanager
    def _read_state(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        held = {name: value for name, value in arguments.items() if type(value) is not WatchedInteger}
        with super()._read_state(held), self._following.answering():
            yield

    def _finish(self, result: Any) -> GraphModule:
        return super()._finish(pytree.tree_map_only(WatchedInteger, passed, result))

    def _dispatched(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._following.plainly():
            return super()._dispatched(op, args, kwargs)


class _TrainedFollower(_Follower, JointRecorder):
    """Recorder of a call with symbolic sizes and gradients."""
