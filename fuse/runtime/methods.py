"""Methods of a compiled model besides ``forward``: the modules that they call run fused.

    fused.generate(x)    ->   model.generate(x), in which    self(x)            is a call of the compiled model
    fused.encode(x)      ->   model.encode(x), in which      self.encoder(x)    is a part with its own engine

The first call of a method shows which of the two it needs. Methods that call no module are the model's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any, Literal

from torch import nn
from torch.compiler import is_compiling

from fuse.graph.locks import ForkedLock
from fuse.graph.state.reachable_state import GLOBAL_HOOKS
from fuse.graph.submodule_calls import diverted, has_own_call, is_plainly_called, undiverted
from fuse.runtime.parts import Parts
from fuse.runtime.programs.refusals import dispatch_modes, is_traced
from fuse.runtime.variants.last_run import LazyRun
from fuse.runtime.variants.states import LARGEST_VARIANTS

LARGEST_IDLE = 4
"""Calls of a method in which no module ran fused, after which it is the model's own."""


class Methods:
    """The methods of one model.

    Args:
        model: the model.
        call: calls the compiled model.
        parts: the model's parts; None if no submodule may run by itself.
        observe: takes the name of a method whose parts ran, and functions that return their launches.
        lock: held while the model is captured.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        parts: Parts | None,
        observe: Callable[[str, tuple[LazyRun, ...]], None],
        lock: ForkedLock,
    ) -> None:
        self._model = model
        self._call_model = call
        self._parts = parts
        self._lock = lock
        self._observe = observe
        self._kinds: dict[str, Literal["whole", "parts"]] = {}
        self._idle: dict[str, int] = {}
        self._calls: dict[Hashable, _Kind] = {}

    def serves(self, value: object) -> bool:
        """Whether an attribute of the model is a method of it that may call modules."""
        if not isinstance(value, MethodType) or value.__self__ is not self._model or is_compiling():
            return False
        return self._idle.get(value.__name__, 0) < LARGEST_IDLE

    def call(self, method: MethodType, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Hashable) -> Any:
        """The result of a call; ``kind`` is equal for calls that do the same."""
        name = method.__name__
        if any(GLOBAL_HOOKS) or is_traced() or dispatch_modes():
            return method(*args, **kwargs)
        if self._kinds.get(name) == "parts" and self._parts is not None:
            result, runs = self._parts.run(method, args, kwargs, self._kind((name, kind)))
            self._idle[name] = 0 if runs else self._idle.get(name, 0) + 1
            if runs:
                self._observe(name, runs)
            return result
        return self._whole(method, args, kwargs)

    def _whole(self, method: MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call in which ``self(...)`` is a call of the engine."""
        model, name = self._model, method.__name__
        if has_own_call(model) or not is_plainly_called(model):
            return method(*args, **kwargs)
        called = False

        def handler(_: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal called
            called = True
            with undiverted(model):
                return self._call_model(args, kwargs)

        with self._between_captures(diverted(model, [""], handler)):
            result = method(*args, **kwargs)
        self._idle[name] = 0 if called else self._idle.get(name, 0) + 1
        self._kinds.setdefault(name, "whole" if called else "parts")
        return result

    @contextmanager
    def _between_captures(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """``context``, entered and left while no thread captures the model, which it changes."""
        with ExitStack() as stack:
            with self._lock:
                stack.enter_context(context)
            try:
                yield
            finally:
                with self._lock:
                    stack.close()

    def _kind(self, key: Hashable) -> _Kind:
        found = self._calls.pop(key, None) or _Kind()
        self._calls[key] = found
        if len(self._calls) > LARGEST_VARIANTS:
            del self._calls[next(iter(self._calls))]
        return found


class _Kind:
    """Stands for the calls of a method that do the same."""


class Method:
    """A method of the model as an attribute of the compiled model; it has the method's attributes."""

    def __init__(self, method: MethodType, call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._method, self._call = method, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._method, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def __eq__(self, other: object) -> bool:
        return self._method == (other._method if isinstance(other, Method) else other)

    def __hash__(self) -> int:
        return hash(self._method)

    def __reduce__(self) -> Any:
        return self._method.__reduce__()
