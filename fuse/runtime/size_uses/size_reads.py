"""Record the comparisons of sizes in ``forward``, by running it with symbolic sizes (extents).

    if x.shape[0] > 100:               recorded:  not n0 > 100
        x = x[:100]
    for t in range(len(x)):            nothing is recorded: the loop has as many steps as the size
        h = cell(x[t], h)
    return h / math.sqrt(x.shape[0])   recorded: n0 == 37, so that other sizes are captured

Sizes are symbolic in the Python code of the model and its libraries, and plain within operators. ``counting.py``
replaces Python's counting functions, and ``unrecorded_uses.py`` refuses uses of sizes that cannot be recorded. Where an
integer argument varies, it and all sizes are watched (``watched_integers.py``).

Where numbers of the graph are what ``forward`` computes by divisions (:mod:`fuse.runtime.size_uses.forward_numbers`),
sizes are watched as well, and each tensor tells its own (``sizes_of_fakes.py``). The captured graph is discarded.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fuse.graph.backward.joint import JointRecorder
from fuse.graph.capture import prepared
from fuse.graph.patches.patched import in_this_thread, patched
from fuse.graph.recording.code_events import Events
from fuse.graph.recording.recorder import Recorder
from fuse.graph.recording.recording_plan import Plan, settled
from fuse.graph.structure.arguments import flatten_arguments
from fuse.graph.values.whole_slices import slices_of
from fuse.kernel.arithmetic.extents import LEAST_LOWERED, Conditions, Extent
from fuse.runtime.size_uses.counting import counting
from fuse.runtime.size_uses.forward_numbers import UNKNOWN
from fuse.runtime.size_uses.loop_conditions import LoopConditions
from fuse.runtime.size_uses.loop_steps import Place
from fuse.runtime.size_uses.sizes_of_fakes import CUTS, CUTTING, SizesOfFakes
from fuse.runtime.size_uses.unrecorded_uses import recording_uses
from fuse.runtime.size_uses.watched_integers import WatchedInteger, passed, symbolic, watched


class Unfollowed(Exception):
    """Sizes were used in a way that cannot be recorded."""


class NeedsWatching(Unfollowed):
    """Sizes may have been looked up in tables, which is recorded only where they are watched."""


@dataclass(frozen=True)
class Uses:
    """How ``forward`` used sizes, beside comparisons.

    Attributes:
        counted: the plain numbers that it counted, each once: lengths of lists, sums, and steps of loops.
        recorded: what differs between the steps of loops and is symbolic, or made of tensors: places and variables.
        told: whether the conditions have all numbers that it computes: no size that it read was told by its value, and
            none that an operator was told may be another one.
    """

    counted: tuple[Hashable, ...]
    recorded: frozenset[tuple[Place, str]]
    told: bool


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
    layouts: Sequence[Any] = (),
    watched: bool = False,
) -> Uses:
    """Run ``forward`` on fake tensors with symbolic sizes; comparisons are recorded in ``conditions``.

    ``integers`` are the integer arguments, extents where they vary. With ``gradients``, the call is captured with its
    gradients, on which ``forward`` may depend.

    Where ``conditions`` keep what is computed, sizes are watched, and ``layouts`` are those of the tensors, as extents.
    Sizes are watched as well if ``watched``.

    Raises:
        NeedsWatching: sizes were not watched, and may have been looked up in a table.
        Unfollowed: a size without a formula was compared, or a use cannot be recorded.
        CaptureError: the call cannot be captured.
    """
    following = _Following(formulas, integers, conditions, watched)
    loops = LoopConditions()
    conditions.told = loops.note
    if conditions.computed is not None:
        following.give((args, kwargs), layouts)

    def record(plan: Plan) -> Any:
        with prepared(model, args, kwargs) as fake_mode:
            follower = _TrainedFollower if gradients else _Follower
            return follower(model, fake_mode, plan, following).run(args, dict(kwargs))

    settled(record, ())
    following.check()
    loops.drop(conditions)
    return Uses(tuple(following.counted), frozenset(following.recorded), following.told)


class _Following:
    """Source of the sizes that fake tensors return in one thread: symbolic in user code, plain in operators."""

    def __init__(self, formulas: Formulas, integers: Sequence[Any], conditions: Conditions, watches: bool) -> None:
        self._formulas = formulas
        self.watches = watches or any(isinstance(one, Extent) for one in integers) or conditions.computed is not None
        self._integers = iter(integers)
        self._running: dict[FrameType, Any] = {}  # the function of C that each frame calls now
        self._conditions = conditions
        self._fakes = SizesOfFakes(conditions) if conditions.computed is not None else None
        self._given: dict[int, list[Any]] = {}  # by ``id`` of an argument: its sizes
        self._unknown: dict[int, Any] = {}
        self._thread = threading.get_ident()
        self._plain = 1
        self._events: Events | None = None
        self._refused: list[str] = []
        self._looks_up = False
        self.told = True
        self.counted: dict[Hashable, None] = {}
        self.recorded: set[tuple[Place, str]] = set()

    def give(self, arguments: Any, layouts: Sequence[Any]) -> None:
        """Note the sizes of the arguments, of which ``layouts`` has sizes and strides."""
        rest = iter(layouts)
        for leaf in flatten_arguments(*arguments)[0]:
            if isinstance(leaf, Tensor) and id(leaf) not in self._given:
                self._given[id(leaf)], _ = ([next(rest) for _ in range(leaf.dim())] for _ in range(2))

    def argument(self, leaf: Any, fake: Any) -> None:
        """Note that an argument has become this fake tensor."""
        if self._fakes is not None and id(leaf) in self._given:
            self._fakes.note(fake, self._given[id(leaf)])

    def made(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what an operator made."""
        if self._fakes is not None and threading.get_ident() == self._thread:
            cuts = op in CUTS and self._fakes.varies(op, args, kwargs)
            self.told = self.told and not (cuts and self._computes())
            self._fakes.made(op, args, kwargs, result)

    def _computes(self) -> bool:
        """Whether a function of C runs that may compute where a tensor is cut."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame not in self._running and _is_ours(frame):
            frame = frame.f_back
        called = self._running.get(frame) if frame is not None else None
        return called is not None and called.__name__ not in CUTTING

    def sizes(self, tensor: Tensor) -> tuple[Any, ...]:
        """The sizes of a tensor as ``forward`` sees them."""
        shape = tuple(Tensor.size(tensor))
        if self._plain or threading.get_ident() != self._thread:
            return shape
        told = (self._fakes.of(tensor) if self._fakes is not None else None) or (None,) * len(shape)
        return tuple(self.number(n) if own is None else self._seen(own) for n, own in zip(shape, told, strict=True))

    def number(self, number: int) -> Any:
        """A number of a layout as ``forward`` sees it, by its value."""
        if self._plain or threading.get_ident() != self._thread or number < LEAST_LOWERED:
            return number
        found = self._formulas.get(number)
        if found is None:
            if number not in self._unknown:
                self._unknown[number] = self._conditions.size(f"{UNKNOWN}{len(self._unknown)}", number)
            found = self._unknown[number]
        self._guess(isinstance(found, Extent), number)
        return self._seen(found)

    def _guess(self, varies: bool, number: int) -> None:
        """Note that a size is told by its value, which may be that of another one."""
        if varies or (self._fakes is not None and self._fakes.has(number)):
            self.told = False

    def integer(self) -> Any:
        """The next integer argument as ``forward`` sees it."""
        return self._seen(next(self._integers))

    def _seen(self, number: Any) -> Any:
        if isinstance(number, Extent) and self._fakes is not None:
            self._fakes.give(number)
        return watched(number, self._running.get) if self.watches else number

    def cut(self, tensor: Tensor, index: Any, get: Callable[..., Any]) -> Any:
        """``tensor[index]``; of several slices one by one, since the numbers of each are those that it is given."""
        parts = slices_of((index,) if type(index) is slice else index, tensor.dim())
        if self._fakes is None or not parts:
            return get(tensor, passed(index))
        for dim, part in parts.items():
            with self._fakes.given(symbolic(part.start), symbolic(part.stop)):
                tensor = get(tensor, (*[slice(None)] * dim, passed(part)))
        return tensor

    def known(self, number: int) -> Any:
        """The length of a list as ``forward`` sees it: a size, if one has this value."""
        if number in self._formulas:
            return self.number(number)
        self._guess(False, number)
        self.count(number)
        return number

    def _reaches(self, length: int, number: int) -> None:
        """Record whether a list of this length has so many elements."""
        if length in self._formulas:
            symbolic(self.number(length)) >= number  # noqa: B015 - the comparison is recorded
        elif number > 2:  # one step, and several: lengths on each side are next to each other
            self.count((length, number))

    def count(self, number: Hashable) -> None:
        """Note a plain number that ``forward`` counted, which may depend on sizes."""
        if not self._plain and threading.get_ident() == self._thread:
            self.counted[number] = None

    def _steps_differ(self, place: Place, what: str, count: int, recorded: bool) -> None:
        """Note that steps of a loop differ."""
        if recorded:
            self.recorded.add((place, what))
        else:
            self.count((*place, count))

    def _note_look_up(self) -> None:
        self._looks_up = True

    def check(self) -> None:
        """Raise ``Unfollowed`` if a use of a size was not recorded."""
        if self._refused:
            raise Unfollowed(self._refused[0])
        if self._looks_up:
            raise NeedsWatching
        if sum(UNKNOWN in text for text in self._conditions.noted) > len(
            self._unknown
        ):  # one condition each is expected
            raise Unfollowed("a size without a formula is compared")

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """A context in which fake tensors return symbolic sizes."""
        names = counting(lambda tensor: self.sizes(tensor)[0], self.known, self.count)
        indexing = _indexing(self.cut) if self.watches else contextlib.nullcontext()
        chunking = _chunking() if self._fakes is not None else contextlib.nullcontext()
        with patched(FakeTensor, _answers(self.sizes, self.number)), indexing, chunking:
            self._plain -= 1
            try:
                refuse, unwatched = self._refused.append, self._note_look_up
                noting = self.count, self._steps_differ, self._reaches
                uses = recording_uses(refuse, names, self._running, self.watches, unwatched, *noting)
                with uses as self._events:
                    yield
            finally:
                self._events = None
                self._plain += 1

    def plainly(self, run: Callable[..., Any], *args: Any) -> Any:
        """``run(*args)``, for which sizes are plain numbers; uses are not watched, which would take longer."""
        self._plain += 1
        try:
            return self._events.asleep(run, *args) if self._events is not None else run(*args)
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


@contextlib.contextmanager
def _chunking() -> Iterator[None]:
    """A context in which tensors compute the sizes of chunks in Python, as C++ does."""

    def chunk(tensor: Tensor, chunks: int, dim: int = 0) -> Any:
        size = tensor.shape[dim]
        return own(tensor, chunks, dim) if type(size) is int else tensor.split((size + chunks - 1) // chunks, dim)

    own = Tensor.chunk
    with patched(Tensor, {"chunk": in_this_thread(chunk, own)}), patched(torch, {"chunk": in_this_thread(chunk, own)}):
        yield


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(("fuse.", "torch.utils."))


def _answers(sizes: Callable[[Tensor], tuple[Any, ...]], number: Callable[[int], Any]) -> dict[str, Any]:
    """Attributes of fake tensors with sizes as ``sizes`` gives them, and other numbers as ``number`` does, by name."""

    def shape(tensor: Tensor) -> _Size:
        return _Size(sizes(tensor))

    def size(tensor: Tensor, dim: int | None = None) -> Any:
        return shape(tensor) if dim is None else sizes(tensor)[int(dim)]

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
def _indexing(cut: Callable[[Tensor, Any, Callable[..., Any]], Any]) -> Iterator[None]:
    """A context in which tensors take watched integers in indices; those of the model's attributes may be no fakes.
    ``cut`` makes a part of a tensor, with the tensor's own ``__getitem__``."""
    with contextlib.ExitStack() as layers:
        for owner in (Tensor, FakeTensor):
            layers.enter_context(patched(owner, _indexed(cut, owner.__getitem__, owner.__setitem__)))
        yield


def _indexed(cut: Callable[..., Any], get: Callable[..., Any], put: Callable[..., Any]) -> dict[str, Any]:
    """Methods of tensors for indices with watched integers, by name."""
    return {
        "__getitem__": in_this_thread(lambda tensor, index: cut(tensor, index, get), get),
        "__setitem__": in_this_thread(lambda tensor, index, value: put(tensor, passed(index), passed(value)), put),
    }


class _Follower(Recorder):
    """Recorder of a call with symbolic sizes."""

    def __init__(self, model: nn.Module, fake_mode: Any, plan: Plan, following: _Following) -> None:
        super().__init__(model, fake_mode, plan)
        self._following = following

    def _argument(self, name: str, index: int, leaf: Any) -> Any:
        if type(leaf) is int:
            return self._following.integer()
        found = super()._argument(name, index, leaf)
        self._following.argument(leaf, found)
        return found

    @contextlib.contextmanager
    def _read_state(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        held = {name: value for name, value in arguments.items() if type(value) is not WatchedInteger}
        with super()._read_state(held), self._following.answering():
            yield

    def _finish(self, result: Any) -> GraphModule:
        return super()._finish(pytree.tree_map_only(WatchedInteger, passed, result))

    def _dispatched(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._following.plainly(self._made, op, args, kwargs)

    def _made(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = super()._dispatched(op, args, kwargs)
        self._following.made(op, args, kwargs, result)
        return result


class _TrainedFollower(_Follower, JointRecorder):
    """Recorder of a call with symbolic sizes and gradients."""
