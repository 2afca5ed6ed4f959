"""Parts: submodules that are compiled separately, because a call cannot be captured as a whole.

    model       its Python code runs eager, in each call
      before    has its own engine: a program, and a backward program if gradients are needed
      odd       contains the code that cannot be captured: runs eager, with its submodules
      after     has its own engine

The code between parts is not recorded: autograd links parts with eager operators, and every side effect happens once.
The first call of a kind runs eager and is watched. From then on a part runs eager if it gains less than its calls cost,
or if the rest of the model writes to its arguments or results, because programs save other tensors for the backward
pass than eager does. A model that computes gradients in ``forward`` has no parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.cost import profiles
from fuse.cost.count import CountedCall, calls_of_dispatches, calls_of_graph
from fuse.devices import device_of
from fuse.graph.locks import ForkedLock
from fuse.graph.numbers.learned import same_bits
from fuse.graph.state.reachable_state import GLOBAL_HOOKS
from fuse.graph.submodule_calls import diverted, is_plainly_called, own_forward, runs_by_itself
from fuse.runtime.autograd.training import Training
from fuse.runtime.variants.compiled import Compiled
from fuse.runtime.variants.last_run import LazyRun

"""A function that returns the launches and fallbacks of one call, its backward pass included once that has run."""

SECONDS_OF_CALL = 30e-6
"""Time that a call of a part costs besides its kernels: guards, Python."""

SECONDS_OF_STEP = 60e-6
"""Time that a forward and a backward call of a part cost besides their kernels: guards, Python, autograd."""

LARGEST_EAGER = 8
"""Consecutive eager calls after which a part is given up."""


class Serving(Protocol):
    """The engine of a part: :class:`fuse.runtime.engine.Engine`."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def observed(self) -> LazyRun: ...
    def latest(self) -> Compiled | None: ...


@dataclass(eq=False)
class _Part:
    module: nn.Module
    engine: Serving
    eager: int = 0  # calls in a row
    judged: bool = False


class Parts:
    """The parts of one model; ``engine`` makes the engine of a part. ``lock`` is held while the model is captured."""

    def __init__(self, model: nn.Module, engine: Callable[[nn.Module], Serving], lock: ForkedLock) -> None:
        self.model = model
        self._engine = engine
        self._parts: dict[str, _Part] | None = None
        self._watched: WeakSet[object] = WeakSet()
        self._lock = lock

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kind: object
    ) -> tuple[Any, tuple[LazyRun, ...]]:
        """The result of ``function``, the model or a method of it, and for each call of a part a function that returns
        its launches.

        ``kind`` is equal for calls that do the same. While one thread makes such a call, calls of other threads run
        eager.
        """
        with self._lock.without_waiting() as free:
            if free:
                return self._run(function, args, kwargs, kind)
        return function(*args, **kwargs), ()

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kind: object
    ) -> tuple[Any, tuple[LazyRun, ...]]:
        if self._parts is None:
            self._parts = {
                path: self._part(path) for path in paths_of_parts(self.model) if runs_by_itself(self.model, path)
            }
        for path, part in list(self._parts.items()):
            if _submodule(self.model, path) is not part.module:
                del self._parts[path]
        usable = [path for path, part in self._parts.items() if is_plainly_called(part.module)]
        if not usable or any(GLOBAL_HOOKS):  # a part would call these hooks twice
            return function(*args, **kwargs), ()
        launched: list[LazyRun] = []
        with _Seeing(copies=kind not in self._watched) as seeing:
            called = partial(self._call, kind, seeing, launched)
            with diverted(self.model, usable, called):
                result = function(*args, **kwargs)
        for path in list(self._parts) if seeing.differentiated else seeing.changed():
            self._parts.pop(path, None)
        self._watched.add(kind)
        return result, tuple(launched)

    def _part(self, path: str) -> _Part:
        module = self.model.get_submodule(path)
        return _Part(module, self._engine(module))

    def _call(
        self,
        kind: object,
        seeing: _Seeing,
        launched: list[LazyRun],
        path: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        part = (self._parts or {}).get(path)
        if part is None:
            return forward(*args, **kwargs)
        with own_forward(part.module) as is_own:
            fused = is_own and kind in self._watched
            result = part.engine.call(args, kwargs) if fused else forward(*args, **kwargs)
        seeing.add(path, (args, kwargs), result)
        if fused:
            launched.append(part.engine.observed())
            if not _pays(part) and self._parts:
                self._parts.pop(path, None)
        return result


class _Seeing:
    """Watcher of the arguments and results of parts during a call: which are written later, and are they
    differentiated?

    With ``copies``, it compares contents too, to find writes that bump no version counter.
    """

    def __init__(self, copies: bool) -> None:
        self.copies = copies
        self.differentiated = False
        self._seen: list[tuple[str, Tensor, int, Tensor | None]] = []
        self._hooks: list[Any] = []

    def add(self, path: str, given: Any, result: Any) -> None:
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for leaf in (*made, *(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))):
            if not leaf.is_inference():
                plain = leaf.layout is torch.strided and not leaf.is_nested
                copy = leaf.detach().clone() if self.copies and plain else None
                self._seen.append((path, leaf, leaf._version, copy))
        self._hooks += [leaf.register_hook(self._note) for leaf in made if self.copies and leaf.requires_grad]

    def _note(self, _gradient: Tensor) -> None:
        self.differentiated = True

    def changed(self) -> list[str]:
        """The parts whose arguments or results were written."""
        return [
            path
            for path, tensor, version, copy in self._seen
            if tensor._version != version or (copy is not None and not same_bits(tensor.detach(), copy))
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        for hook in self._hooks:
            hook.remove()


def paths_of_parts(model: nn.Module) -> Iterator[str]:
    """The outermost submodules that have a ``forward`` in Python.

    >>> blocks = nn.ModuleList([nn.Sequential(nn.ReLU()), nn.ReLU()])
    >>> list(paths_of_parts(nn.ModuleDict({"blocks": blocks, "head": nn.Linear(2, 2)})))
    ['blocks.0', 'blocks.1', 'head']
    """
    for name, child in model.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            continue
        if type(child).forward is not nn.Module.forward:
            yield name
        elif type(child) in (nn.ModuleList, nn.ModuleDict):
            yield from (f"{name}.{inner}" for inner in paths_of_parts(child))


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _pays(part: _Part) -> bool:
    """Whether to go on compiling a part, judged after one of its calls."""
    compiled = part.engine.latest()
    if compiled is None:
        part.eager = part.eager + 1 if not part.engine.observed()().launches else 0
        return part.eager < LARGEST_EAGER
    part.eager = 0
    if part.judged:
        return True
    part.judged = True
    return _gained(compiled) >= (SECONDS_OF_CALL if compiled.training is None else SECONDS_OF_STEP)


def _gained(compiled: Compiled) -> float:
    """Predicted seconds that a call gains over eager, its backward pass included."""
    training: Training | None = compiled.training
    graphs = [compiled.graph] if training is None else [training.joint.forward, training.graphs()[1]]
    return sum(
        _modelled_seconds(calls_of_dispatches(graph.meta["signature"].dispatches), device_of(graph))
        - _modelled_seconds(calls_of_graph(graph), device_of(graph))
        for graph in graphs
        if graph is not None
    )


def _modelled_seconds(calls: Iterable[CountedCall], device: str) -> float:
    """Predicted seconds of calls on this kind of device."""
    profile = profiles.of_device(device)
    return sum(
        call.repeats
        * (call.launches * profile.launch_seconds + profile.seconds(call.work.flops, call.work.bytes, call.work.dtype))
        for call in calls
    )
