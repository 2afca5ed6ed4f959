"""``fuse.pipeline``: host work of the next batches in worker processes, while this process computes.

    this process     batch 1 -> | device 1   | batch 3 -> | device 2   | batch 4 -> | device 3   |     results in order
    worker a                    | host 2 ...              -> | host 4 ...
    worker b                                 | host 3 ...              -> | host 5 ...

A worker is a fork of this process, like a worker of ``torch.utils.data.DataLoader``. It has one batch at a time, so
that neither side blocks in ``send``, and there are as many batches in work as workers. The states of the random
generators are sent with a batch and returned with its result, so that a seed gives the same numbers as without workers.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.devices import is_host
from fuse.errors import FuseError
from fuse.graph.host_work import (
    DeviceStage,
    GeneratorStates,
    HostWork,
    NoHostWork,
    host_work,
    reached_by_host_work,
    set_states,
    states,
)
from fuse.runtime.module import Fused, compile

PATIENCE = 2.0
"""Seconds between a waiting worker's checks that its parent lives, and seconds that a terminated worker may take to
end."""


def pipeline(fused: Fused, loader: Iterable[Any], workers: int = 1) -> Iterator[Any]:
    """The results of ``fused`` for the batches of ``loader``, in order; host work runs ahead in worker processes.

    A batch is a tuple of arguments of ``fused``, a dictionary of keyword arguments, or a single argument. The first
    batch shows which statements of ``forward`` are host work (``fuse.show`` prints them); the rest is compiled like
    ``fused``. If host work cannot be split off, one warning says why, and each batch is a plain call.

    Args:
        fused: made by :func:`fuse.compile`; changes of weights between two results take effect.
        loader: any iterable; this process reads it, no more than ``workers`` batches ahead.
        workers: processes that do host work. With 0, this process does it before each result. Host work that draws
            random numbers is done by one worker, in order.

    Raises:
        FuseError: a worker died, or host work must not run ahead (the message says why).
        Exception: errors of ``loader``, the host work or the model, raised when it is that batch's turn. All workers
            end then, and when the iterator is closed.

    >>> class Lengths(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(2))
    ...     def forward(self, words):
    ...         counts = torch.tensor([[len(word), word.count("a")] for word in words]).float()
    ...         return (counts * self.weight).sum(1)
    >>> with torch.no_grad():
    ...     [scores.tolist() for scores in pipeline(compile(Lengths()), [["a", "bar"], ["fuse"]])]
    [[2.0, 4.0], [4.0]]
    """
    if not isinstance(fused, Fused):
        raise FuseError(f"fuse.pipeline takes a module made by fuse.compile, not a {type(fused).__name__}")
    if workers < 0:
        raise FuseError(f"workers is {workers}; give 0 or more")
    return _results(fused, loader, workers)


@dataclass
class _Handed:
    """The result of a batch's host work: values by name or an error, and the generators' states before and after it."""

    values: dict[str, Any]
    before: GeneratorStates
    after: GeneratorStates
    raised: BaseException | None = None

    @property
    def drawn(self) -> set[str]:
        """The generators that the host work drew from."""
        return {name for name, state in self.after.items() if self.before.get(name) != state}


def _results(fused: Fused, loader: Iterable[Any], workers: int) -> Iterator[Any]:
    batches = iter(loader)
    try:
        first = next(batches)
    except StopIteration:
        return
    args, kwargs = _arguments(first)
    engine = fused._own()
    model = engine.model
    try:
        if engine.dynamic_shapes not in (None, "auto"):
            raise NoHostWork("dynamic_shapes names arguments of the whole forward")
        work = host_work(model, args, kwargs)
    except NoHostWork as why:
        warnings.warn(f"fuse.pipeline runs each batch as a plain call: {why}", stacklevel=2)
        for batch in itertools.chain([first], batches):
            args, kwargs = _arguments(batch)
            yield fused(*args, **kwargs)
        return
    stage = device_stage(fused, work)
    handed = _host(model, work, first)
    if handed.raised is not None:
        raise handed.raised
    reason = f"it changes {work.changes}" if work.changes else _obstacle(handed.values)
    before, given = states(), [tensor.clone() for tensor in _tensors(handed.values)]
    result = stage(**handed.values)
    if not all(map(torch.equal, given, _tensors(handed.values))):
        reason = "the rest of forward writes to its arguments"
    both = handed.drawn & {name for name, state in states().items() if before.get(name) != state}
    if both:
        reason = f"host work and the rest both draw from the generator {min(both)}"
    yield result
    del result
    if reason and workers:
        warnings.warn(f"fuse.pipeline does host work between the batches: {reason}", stacklevel=2)
    if reason or not workers:
        for batch in batches:
            handed = _host(model, work, batch)
            if handed.raised is not None:
                raise handed.raised
            yield stage(**handed.values)
        return
    with _pool(model, work, 1 if handed.drawn else workers) as pool:
        for values in _ahead(pool, batches):
            yield stage(**values)
        for worker in pool:
            worker.end()


def _tensors(values: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(dict(values)) if isinstance(leaf, Tensor)]


_STAGES: weakref.WeakKeyDictionary[Fused, dict[Any, Fused]] = weakref.WeakKeyDictionary()
"""The compiled device stages of compiled models, by the line where they begin and their inputs."""


def device_stage(fused: Fused, work: HostWork) -> Fused:
    """The device stage, compiled like ``fused``; later pipelines reuse it, unless weights are frozen."""
    engine = fused._own()
    known = _STAGES.setdefault(fused, {})
    key = work.lines[1].path, work.lines[1].number, work.crossing
    if key not in known or engine.freeze:
        known[key] = compile(
            DeviceStage(engine.model, work),
            freeze=engine.freeze,
            passes=engine.passes,
            dynamic_shapes=engine.dynamic_shapes,
        )
    return known[key]


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch if type(batch) is tuple else (batch,)), {}


def _host(model: nn.Module, work: HostWork, batch: Any) -> _Handed:
    args, kwargs = _arguments(batch)
    before = states()
    try:
        values = work.run(model, args, kwargs)
    except Exception as error:  # whatever the user's code raises
        return _Handed({}, before, states(), error)
    return _Handed(values, before, states())


def _obstacle(values: Mapping[str, Any]) -> str | None:
    """The reason why values cannot be sent from another process, or None."""
    seen: dict[int, Tensor] = {}
    for leaf in pytree.tree_leaves(dict(values)):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.requires_grad:
            return "a tensor passed from host work to the rest needs gradients"
        if seen.setdefault(leaf.untyped_storage()._cdata, leaf) is not leaf:
            return "two tensors passed from host work to the rest share memory"
    return None


# ---- workers -------------------------------------------------------------------------------------------------------


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection

    def send(self, batch: Any) -> None:
        """Send a batch and the states of the random generators."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the worker died: receive raises
            self.connection.send_bytes(_pickled((batch, states())))

    def end(self) -> None:
        """Ask the worker whether host work changed anything besides its results.

        Raises:
            FuseError: it did; the change is not in this process.
        """
        self.connection.send_bytes(b"")
        if error := self.receive().raised:
            raise error

    def receive(self) -> _Handed:
        """The result of this worker's batch."""
        wait([self.connection, self.process.sentinel])
        try:
            handed: _Handed = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(PATIENCE)
            code = self.process.exitcode
            how = f"by signal {-code}" if code is not None and code < 0 else f"with exit status {code}"
            raise FuseError(f"a worker of fuse.pipeline ended {how} before its batch was done") from None
        return handed


def _ahead(pool: list[_Worker], batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """The values that host work computes for each batch, in order, with one batch in work per worker."""
    free, busy = deque(pool), deque[_Worker]()
    current = states()
    raised: BaseException | None = None

    def fill() -> None:
        nonlocal raised
        while free and raised is None:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:  # raised when it is this batch's turn
                raised = error
                return
            free[0].send(batch)
            busy.append(free.popleft())

    fill()
    while busy:
        worker = busy.popleft()
        handed = worker.receive()
        if handed.drawn:
            if len(pool) > 1:
                raise FuseError("host work draws random numbers, which it did not for earlier batches: use workers=1")
            current = states()
            if other := sorted(name for name in handed.drawn if current.get(name) != handed.before[name]):
                raise FuseError(
                    f"host work and the loop around fuse.pipeline both draw from the generator {other[0]}; "
                    "give one a generator of its own, or use workers=0"
                )
            set_states({name: handed.after[name] for name in handed.drawn})
        if handed.raised is not None:
            raise handed.raised
        free.append(worker)
        fill()
        yield handed.values
    if raised is not None:
        raise raised


@contextlib.contextmanager
def _pool(model: nn.Module, work: HostWork, count: int) -> Iterator[list[_Worker]]:
    """A context with ``count`` workers, all of which have ended when it is left."""
    context = multiprocessing.get_context("fork")
    pool: list[_Worker] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            others = [ours, *(worker.connection for worker in pool)]
            process = context.Process(target=_serve, args=(theirs, others, model, work, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            pool.append(_Worker(process, ours))
        yield pool
    finally:
        for worker in pool:
            worker.process.terminate()
        for worker in pool:
            worker.process.join(PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.connection.close()
            worker.process.close()


def _serve(connection: Connection, others: list[Connection], model: nn.Module, work: HostWork, parent: int) -> None:
    """The main loop of a worker: receives batches and sends the results of host work, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for one in others:
        one.close()
    torch.set_num_threads(1)  # a fork does not have the parent's threads
    before = reached_by_host_work(model)
    for number in itertools.count(1):
        while not connection.poll(PATIENCE):
            if os.getppid() != parent:
                return
        try:
            received = connection.recv_bytes()
            handed = _Handed({}, {}, {})
            if received:
                batch, given = pickle.loads(received)
                set_states(given)
                handed = _host(model, work, batch)
            often = number & (number - 1) == 0  # after 1, 2, 4, 8, ... batches, and at the end
            if (often or not received) and (changes := before.restore(lambda real, then: False)):
                message = f"host work changes {changes[0].name}, which was not so for the first batch: use workers=0"
                handed = replace(handed, raised=FuseError(message))
            connection.send_bytes(_sendable(handed))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _sendable(handed: _Handed) -> bytes:
    try:
        return _pickled(handed)
    except Exception as error:  # objects raise errors of any class when they cannot be pickled
        what = "its values" if handed.raised is None else f"{type(handed.raised).__name__}: {handed.raised}"
        return _pickled(_Handed({}, {}, {}, FuseError(f"host work's result cannot be pickled: {what} ({error})")))


class _Pickler(pickle.Pickler):
    """A pickler that sends tensors as bytes; torch's shares their memory through files that may outlive a process."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not is_host(value) or value.layout is not torch.strided:
            return NotImplemented
        if value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        order = sorted(range(value.dim()), key=value.stride, reverse=True)
        dense = value.permute(order)
        if not dense.is_contiguous():
            return NotImplemented
        held = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return _tensor, (held, value.dtype, tuple(value.shape), value.stride())


def _tensor(held: bytes, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    made = torch.empty_strided(shape, stride, dtype=dtype)
    if held:
        order = sorted(range(made.dim()), key=made.stride, reverse=True)
        flat = made.permute(order).reshape(-1).view(torch.uint8)
        flat.numpy()[:] = memoryview(held)
    return made


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
