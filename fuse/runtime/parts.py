"""Submodules that run fused one by one, where a call cannot be captured as a whole.

    model       its Python runs eager, in each call
      before    an engine of its own: a program, and a backward program where gradients are needed
      odd       holds the Python: eager, its submodules likewise
      after     an engine of its own

Nothing is recorded of what lies between: autograd links the parts with eager's operators, and every effect happens
once. The first call of a kind runs eager and is watched. A part runs eager from then on where it gains less than its
calls cost, and where the rest of the model writes to what it was given or gave: programs save other tensors for the
backward pass than eager does. There are no parts where the model takes gradients itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.utils import _pytree as pytree

from fuse.cost import profiles
from fuse.cost.count import CountedCall, calls_of_dispatches, calls_of_graph
from fuse.devices import device_of
from fuse.graph.learned import same_bits
from fuse.graph.locks import ForkedLock
from fuse.graph.submodule_calls import diverted, is_plainly_called, own_forward, runs_by_itself
from fuse.runtime.training import Training
from fuse.runtime.variants import Compiled, LastRun

Told = Callable[[], LastRun]
"""Launches and fallbacks of one call, including its backward pass once that has run."""

SECONDS_OF_CALL = 30e-6
"""Cost of a call of a part, as the cost model counts time: guards, Python."""

SECONDS_OF_STEP = 60e-6
"""The same of a forward and a backward call, which autograd links."""

LARGEST_EAGER = 8
"""Calls in a row of a part that ran eager, after which it is left alone."""


class Serving(Protocol):
    """The engine of a part: :class:`fuse.runtime.engine.Engine`."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def observed(self) -> Told: ...
    def latest(self) -> Compiled | None: ...


@dataclass(eq=False)
class _Part:
    module: nn.Module
    engine: Serving
    eager: int = 0  # calls in a row
    judged: bool = False


class Parts:
    """The parts of one model; ``engine`` makes what runs one. ``lock`` is held while the model is captured."""

    def __init__(self, model: nn.Module, engine: Callable[[nn.Module], Serving], lock: ForkedLock) -> None:
        self.model = model
        self._engine = engine
        self._parts: dict[str, _Part] | None = None
        self._watched: WeakSet[object] = WeakSet()
        self._lock = lock

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: object) -> tuple[Any, tuple[Told, ...]]:
        """The result of a call of the model, and what tells of each call of a part what it launched. Calls that may
        differ in what they do are of another ``kind``. While one thread makes such a call, those of others are eager.
        """
        with self._lock.without_waiting() as free:
            if free:
                return self._run(args, kwargs, kind)
        return self.model(*args, **kwargs), ()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: object) -> tuple[Any, tuple[Told, ...]]:
        if self._parts is None:
            self._parts = {
                path: self._part(path) for path in paths_of_parts(self.model) if runs_by_itself(self.model, path)
            }
        for path, part in list(self._parts.items()):
            if _submodule(self.model, path) is not part.module:
                del self._parts[path]
        usable = [path for path, part in self._parts.items() if is_plainly_called(part.module)]
        if not usable or _has_global_hooks():
            return self.model(*args, **kwargs), ()
        launched: list[Told] = []
        with _Seeing(copies=kind not in self._watched) as seeing:
            called = partial(self._call, kind, seeing, launched)
            with diverted(self.model, usable, called):
                result = self.model(*args, **kwargs)
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
        launched: list[Told],
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
    """Sees which tensors that parts are given and give are written afterwards, with ``copies`` also past autograd's
    notice, and whether gradients are taken of them, while the call of the model lasts."""

    def __init__(self, copies: bool) -> None:
        self.copies = copies
        self.differentiated = False
        self._seen: list[tuple[str, Tensor, int, Tensor | None]] = []
        self._hooks: list[Any] = []

    def add(self, path: str, given: Any, result: Any) -> None:
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for leaf in (*made, *(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))):
            if not leaf.is_inference():
                copy = leaf.detach().clone() if self.copies and leaf.layout is torch.strided else None
                self._seen.append((path, leaf, leaf._version, copy))
        self._hooks += [leaf.register_hook(self._note) for leaf in made if self.copies and leaf.requires_grad]

    def _note(self, _gradient: Tensor) -> None:
        self.differentiated = True

    def changed(self) -> list[str]:
        """The parts whose tensors were written."""
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


def _has_global_hooks() -> bool:
    """Whether hooks are registered for all modules, which a part would call twice."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def _pays(part: _Part) -> bool:
    """Whether a part is worth its calls, after one of them."""
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
    """The seconds that a program gains over eager, its backward half included, as the cost model has it."""
    training: Training | None = compiled.training
    graphs = [compiled.graph] if training is None else [training.joint.forward, training.graphs()[1]]
    return sum(
        _modelled_seconds(calls_of_dispatches(graph.meta["signature"].dispatches), device_of(graph))
        - _modelled_seconds(calls_of_graph(graph), device_of(graph))
        for graph in graphs
        if graph is not None
    )


def _modelled_seconds(calls: Iterable[CountedCall], device: str) -> float:
    """Predicted time of calls on this kind of device, by the cost model."""
    profile = profiles.of_device(device)
    return sum(
        call.repeats
        * (call.launches * profile.launch_seconds + profile.seconds(call.work.flops, call.work.bytes, call.work.dtype))
        for call in calls
    )
