"""Let a handler make the calls of some submodules, in this thread, while their model runs eager.

    model(x)          ->      before.forward(x)        ->  handler("before", forward, (x,), {})
                              odd(h)                       runs as it is
                              after.forward(h)         ->  handler("after", forward, (h,), {})

The submodule's ``forward`` is replaced as long as any thread has a handler for it. The replacement asks for the handler
of the calling thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from fuse.graph.functional.aliases import storage_of
from fuse.graph.locks import ForkedLock
from fuse.graph.state.object_contents import attributes_of, class_dict, mro
from fuse.graph.state.reachable_state import reached_by

Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""``handler(path, forward, args, kwargs)`` makes a call of the submodule at ``path``."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def runs_by_itself(model: nn.Module, path: str) -> bool:
    """Whether the submodule at ``path`` is reached only by calls of its class's ``forward``, as far as can be seen.

    It then has no hooks, and shares no module, parameter or buffer with the rest of the model.
    """
    module = model.get_submodule(path)
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule) or cls.forward is nn.Module.forward or not is_plainly_called(module):
        return False
    if has_own_call(module):
        return False
    inside = {id(one) for one in module.modules()}
    others = [one for one in model.modules() if id(one) not in inside]
    if any(one is not module and id(one) in inside for other in others for one in other._modules.values()):
        return False
    own = {memory for one in module.modules() for memory in _memory(one)}
    if any(memory in own for other in others for memory in _memory(other)):
        return False
    reached = {id(one.live) for one in reached_by(module).held}
    return not any(id(held) in reached for other in others for held in (other, attributes_of(other)))


def is_plainly_called(module: nn.Module) -> bool:
    """Whether calling ``module`` runs the ``forward`` of its class and nothing else."""
    hooked = any(getattr(module, hooks) for hooks in HOOKS)
    return not hooked and "forward" not in module.__dict__ and module._compiled_call_impl is None


def has_own_call(module: nn.Module) -> bool:
    """Whether the class of ``module`` has a ``__call__`` of its own."""
    return any("__call__" in class_dict(one) for one in mro(type(module)) if one not in (nn.Module, object))


def _memory(module: nn.Module) -> Iterator[int]:
    """The storages of the parameters and buffers of ``module``, which others may share; sparse tensors stand for
    themselves."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield storage_of(tensor) if tensor.layout is torch.strided else id(tensor)


@contextlib.contextmanager
def diverted(model: nn.Module, paths: Sequence[str], handler: Handler) -> Iterator[None]:
    """A context in which ``handler`` makes the calls of the submodules at ``paths``, in this thread.

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
_replacements: dict[int, int] = {}  # id of a module whose forward is replaced -> the number of users


@contextlib.contextmanager
def _replaced(module: nn.Module) -> Iterator[None]:
    """A context in which ``module.forward`` asks for the handler of the calling thread."""
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
    """The replacement of the method ``module.forward``; it has the method's attributes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # Dynamo cannot trace handlers
            return type(self._module).forward(self._module, *args, **kwargs)
        return _forward(self._module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # during a copy
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    @property
    def __wrapped__(self) -> Any:
        return MethodType(type(self._module).forward, self._module)


@contextlib.contextmanager
def undiverted(module: nn.Module) -> Iterator[None]:
    """A context within a handler in which this thread's calls of ``module`` run the ``forward`` of its class."""
    handlers = _handlers.by_module
    _handlers.by_module = {key: handler for key, handler in handlers.items() if key != id(module)}
    try:
        yield
    finally:
        _handlers.by_module = handlers


@contextlib.contextmanager
def own_forward(module: nn.Module) -> Iterator[bool]:
    """A context within a handler in which ``module.forward`` is the class's again.

    Yields whether it is: not if another thread has replaced it, too.
    """
    with _lock:
        alone = _replacements.get(id(module)) == 1
        replacement = module.__dict__.pop("forward") if alone else None
    try:
        with undiverted(module):
            yield alone
    finally:
        with _lock:
            if alone and id(module) in _replacements:
                module.__dict__["forward"] = replacement


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(module).forward, module)
    handler = _handlers.by_module.get(id(module))
    return forward(*args, **kwargs) if handler is None else handler(forward, args, kwargs)
