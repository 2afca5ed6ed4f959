"""Where to cut a call that cannot be captured whole: around the smallest submodule that holds the Python.

    CaptureError in encoder.layers.3.odd   ->  candidates   encoder.layers.3.odd, encoder.layers.3, ..., encoder
    the call runs eager, watched           ->  Watched      what odd was given and gave, each time (cuts.py)
    the next call is captured              ->  CutCall      in the place of odd.forward, which is not run

What could make the program and eager differ is looked for before, while watching, and in each call: memory and Python
state that the submodule shares with the rest, arguments that it writes to, results that are not its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from fuse.errors import CaptureError
from fuse.graph.contents import attributes_of, class_dict, mro
from fuse.graph.cut_reading import Setting, settings_of
from fuse.graph.cuts import (
    Journal,
    Keeping,
    Unsuitable,
    Watched,
    fault_of_result,
    layout_of,
    modes,
    oddity,
    run,
    taken_apart,
)
from fuse.graph.locks import ForkedLock
from fuse.graph.outside import Outside, reached_by
from fuse.graph.signature import Dispatch

Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Makes a call of a submodule: told its path, its ``forward``, and what that is given."""

Recording = Callable[[], contextlib.AbstractContextManager[list[Dispatch]]]
"""Records operators as long as it lasts."""

LARGEST_CALLS = 256
"""Calls of submodules that stay Python, in one call of the model."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Cuts:
    """Submodules that stay Python in calls of one kind, why, and how each of their calls was, in order. ``steady``:
    settings of theirs that no call changed."""

    reasons: Mapping[str, str]
    calls: tuple[Watched, ...]
    steady: tuple[Setting, ...] = ()


def candidates(error: BaseException, model: nn.Module) -> list[str]:
    """The submodules around what ``error`` was raised for, the smallest first; none where that is the model itself.

    >>> class Odd(nn.Module):
    ...     def forward(self, x):
    ...         return x.data_ptr()
    >>> model = nn.Sequential(nn.Sequential(Odd()))
    >>> try:
    ...     model(3)
    ... except AttributeError as error:
    ...     candidates(error, model)
    ['0.0', '0']
    """
    path = error.module if isinstance(error, CaptureError) and error.module is not None else _running(error, model)
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _running(error: BaseException, model: nn.Module) -> str:
    """The submodule that ran innermost when ``error``, or what it was raised from, came up."""
    paths = {id(module): path for path, module in model.named_modules()}
    found, cause = "", error
    while True:
        trace = cause.__traceback__
        while trace is not None:
            found = paths.get(id(trace.tb_frame.f_locals.get("self"))) or found
            trace = trace.tb_next
        if cause.__cause__ is None:
            return found
        cause = cause.__cause__


def changer(model: nn.Module, arguments: Any, record: Callable[[], object]) -> str:
    """The innermost submodule that changes something outside of modules while ``record`` captures a call; empty where
    it is none.
    """
    finding = _Finding(model)
    hooks = (
        register_module_forward_pre_hook(finding.enter),
        register_module_forward_hook(finding.leave, always_call=True),
    )
    try:
        finding.begin(arguments)
        with contextlib.suppress(CaptureError):
            record()
    finally:
        for hook in hooks:
            hook.remove()
    return finding.found or ""


class _Finding:
    """Looks, whenever a submodule is entered or left, for what was changed outside of modules. An object of ours, so
    that what it finds is no change that a capture would put back."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: str | None = None
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._running = [""]
        self._thread = threading.get_ident()  # hooks are called in all threads

    def begin(self, arguments: Any) -> None:
        own = {id(attributes_of(module)) for module in self.model.modules()}
        reached = reached_by(self.model, arguments)
        self._before = replace(reached, held=[one for one in reached.held if id(one.live) not in own])

    def enter(self, module: nn.Module, _args: Any) -> None:
        if self._asks(module):
            self._look()
            self._running.append(self._paths[id(module)])

    def leave(self, module: nn.Module, _args: Any, _result: Any) -> None:
        if self._asks(module):
            self._look()
            self._running.pop()

    def _asks(self, module: nn.Module) -> bool:
        return threading.get_ident() == self._thread and id(module) in self._paths

    def _look(self) -> None:
        if self.found is None and self._before.changed():
            self.found = self._running[-1]


def obstacle(model: nn.Module, path: str) -> str:
    """Why the submodule at ``path`` cannot be cut out of the model; empty where it can, as far as can be seen."""
    module = model.get_submodule(path)
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule) or cls.forward is nn.Module.forward or "forward" in module.__dict__:
        return "it has no forward of its class"
    own_call = any("__call__" in class_dict(one) for one in mro(cls) if one not in (nn.Module, object))
    if own_call or module._compiled_call_impl is not None:
        return "it is not called by its forward"
    if any(getattr(module, hooks, None) for hooks in HOOKS):
        return "it has hooks"
    inside = {id(one) for one in module.modules()}
    others = [one for one in model.modules() if id(one) not in inside]
    if any(one is not module and id(one) in inside for other in others for one in other._modules.values()):
        return "the rest of the model holds a part of it"
    own = {tensor.untyped_storage()._cdata for tensor in _held(module)}
    if any(tensor.untyped_storage()._cdata in own for other in others for tensor in _own(other)):
        return "the rest of the model holds a parameter or buffer of it"
    reached = {id(one.live) for one in reached_by(module).held}
    if any(id(held) in reached for other in others for held in (other, attributes_of(other))):
        return "it reaches modules around it"
    return ""


def _own(module: nn.Module) -> Iterator[Tensor]:
    return (tensor for held in (module._parameters, module._buffers) for tensor in held.values() if tensor is not None)


def _held(module: nn.Module) -> Iterator[Tensor]:
    return (tensor for one in module.modules() for tensor in _own(one))


def shared_with_rest(model: nn.Module, path: str) -> Outside:
    """What both the submodule at ``path`` and the rest of the model reach, as it is now."""
    module = model.get_submodule(path)
    return reached_by(module).common(reached_by(model, (), [module]))


# ---- taking the place of forward ------------------------------------------------------------------------------------


@contextlib.contextmanager
def diverted(model: nn.Module, paths: Sequence[str], handler: Handler) -> Iterator[None]:
    """Let ``handler`` make, in this thread, the calls of ``forward`` of submodules.

    >>> model = nn.Sequential(nn.Tanh(), nn.ReLU())
    >>> with diverted(model, ["0"], lambda path, forward, args, kwargs: 7):
    ...     model[0](torch.ones(2))
    7
    """
    modules = [(path, model.get_submodule(path)) for path in paths]
    before = dict(_handlers.by_module)
    with contextlib.ExitStack() as stack:
        for path, module in modules:
            stack.enter_context(_replaced(module))
            _handlers.by_module[id(module)] = partial(handler, path)
        try:
            yield
        finally:
            _handlers.by_module = before


class _Handlers(threading.local):
    def __init__(self) -> None:
        self.by_module: dict[int, Callable[..., Any]] = {}


_handlers = _Handlers()
_lock = ForkedLock()
_replacements: dict[int, int] = {}  # id of a module whose forward is replaced -> by how many


@contextlib.contextmanager
def _replaced(module: nn.Module) -> Iterator[None]:
    """As long as anybody wants it, ``module.forward`` asks for a handler of the thread that calls it."""
    with _lock:
        _replacements[id(module)] = _replacements.get(id(module), 0) + 1
        module.__dict__["forward"] = ReplacedForward(module)
    try:
        yield
    finally:
        with _lock:
            _replacements[id(module)] -= 1
            if not _replacements[id(module)]:
                del _replacements[id(module)]
                module.__dict__.pop("forward", None)


class ReplacedForward:
    """In the place of the method ``module.forward``, and like it for whoever looks at it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # by Dynamo, which cannot look into handlers
            return type(self._module).forward(self._module, *args, **kwargs)
        return _forward(self._module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # while it is made by copy
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    @property
    def __wrapped__(self) -> Any:
        return MethodType(type(self._module).forward, self._module)


@contextlib.contextmanager
def own_forward(module: nn.Module) -> Iterator[bool]:
    """Within a handler for ``module``, let its ``forward`` be that of its class again. Whether it is: not where another
    thread has replaced it, too."""
    handlers = _handlers.by_module
    with _lock:
        alone = _replacements.get(id(module)) == 1
        replacement = module.__dict__.pop("forward") if alone else None
    _handlers.by_module = {key: handler for key, handler in handlers.items() if key != id(module)}
    try:
        yield alone
    finally:
        _handlers.by_module = handlers
        with _lock:
            if alone and id(module) in _replacements:
                module.__dict__["forward"] = replacement


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(module).forward, module)
    handler = _handlers.by_module.get(id(module))
    return forward(*args, **kwargs) if handler is None else handler(forward, args, kwargs)


def rerun(journal: Journal, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of a model run eager, of which some calls of submodules ran already: these are answered."""
    with torch.no_grad():
        for noted in reversed(journal.noted):
            noted.undo()
    journal.begin()

    def answered(path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        noted = journal.next(path)
        return forward(*args, **kwargs) if noted is None else noted.answer(args, kwargs)

    with diverted(model, list(dict.fromkeys(noted.path for noted in journal.noted)), answered):
        return model(*args, **kwargs)


# ---- watching -------------------------------------------------------------------------------------------------------


class Watching:
    """Watches the calls of submodules while a call of their model runs eager. ``unsuitable``: the first of them that
    turned out not to be one that can stay Python in a program. ``recording`` records what a submodule launches.
    ``steady``: settings of the submodules that no call changed so far."""

    def __init__(self, model: nn.Module, paths: Sequence[str], recording: Recording | None = None) -> None:
        self.model = model
        self.paths = paths
        self.recording = recording
        self.calls: list[Watched] = []
        self.unsuitable: Unsuitable | None = None
        self.steady: list[Setting] = []
        self._journal = Journal()
        self._modes = modes()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the model."""
        self._shared = {path: shared_with_rest(self.model, path) for path in self.paths}
        rest = reached_by(self.model, (args, kwargs), [self.model.get_submodule(path) for path in self.paths])
        leaves = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self._rest = [*rest.tensors(), *leaves]
        self._keeping = Keeping()
        self.steady = [one for path in self.paths for one in settings_of(self.model.get_submodule(path), path)]
        with diverted(self.model, self.paths, self._watch):
            result = self.model(*args, **kwargs)
        if len(self._journal.noted) > 1 and not self._keeping.is_unchanged():
            self._refuse(self._journal.noted[-1].path, "it changes what an earlier call was given or gave")
        if self.unsuitable is None and not self.calls:
            self._refuse(self.paths[-1], "it did not run in the call")
        return result

    def _refuse(self, path: str, reason: str) -> None:
        self.unsuitable = self.unsuitable or Unsuitable(path, reason)

    def _watch(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        try:
            given = taken_apart((args, tuple(kwargs.items())), tensors)
        except ValueError as what:
            self._refuse(path, f"it is given {what}")
        if self.unsuitable is None and (odd := next(filter(None, map(oddity, _without_gradients(tensors))), "")):
            self._refuse(path, f"it is given {odd}")
        if self.unsuitable is None and modes() != self._modes:
            self._refuse(path, "it is called in other modes of torch than the model")
        if self.unsuitable is None and len(self.calls) == LARGEST_CALLS:
            self._refuse(path, f"it is called more than {LARGEST_CALLS} times")
        if self.unsuitable is not None:
            return forward(*args, **kwargs)
        dispatches: list[Dispatch] = []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self.recording is None:
                return forward(*args, **kwargs)
            with self.recording() as launched:
                result = forward(*args, **kwargs)
            dispatches.extend(launched)
            return result

        noted = run(path, recorded, (args, kwargs), self._shared[path], self._rest)
        self.steady = [one for one in self.steady if one.holds()]
        if noted.error is not None:
            self._refuse(path, "it raises")
            raise noted.error
        problem, returned = fault_of_result(noted, self._journal.noted)
        if noted.problem or problem:
            self._refuse(path, f"it {noted.problem or problem}")
            return noted.result
        layouts = tuple(map(layout_of, tensors))
        made, launched = tuple(map(layout_of, noted.made)), tuple(dispatches)
        self.calls.append(Watched(path, given, layouts, returned, made, torch.is_grad_enabled(), launched))
        self._journal.noted.append(noted)
        self._keeping.add(noted)
        return noted.result


def _without_gradients(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Parameters that need gradients may be given where none are recorded."""
    for tensor in tensors:
        yield tensor if torch.is_grad_enabled() or type(tensor) is not nn.Parameter else tensor.detach()
