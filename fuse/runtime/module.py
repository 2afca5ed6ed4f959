"""``fuse.compile``: a module that runs another module fused.

It shares parameters, buffers, children, ``training``, attributes and methods with the model, in which it looks them up.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from fuse.errors import FuseError
from fuse.graph.precision import Precision, in_precision
from fuse.graph.submodule_calls import HOOKS
from fuse.rewrite import registry
from fuse.runtime.engine import Engine
from fuse.runtime.programs.refusals import is_traced
from fuse.runtime.variants.compiled import Compiled
from fuse.runtime.variants.last_run import LastRun

_SHARED = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
_OF_THE_MODEL = (
    "training",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes that ``nn.Module`` gives each module, and that are the model's own here, found by ``__getattr__``."""
_SPECIAL = (
    "__bool__",
    "__contains__",
    "__delitem__",
    "__enter__",
    "__exit__",
    "__getitem__",
    "__iter__",
    "__len__",
    "__reversed__",
    "__setitem__",
)
"""Methods that Python looks up in the class: those of a model that is a container (``nn.Sequential``) or a context."""


def compile(
    model: nn.Module,
    freeze: bool = False,
    passes: Sequence[str] | None = None,
    dynamic_shapes: Any = "auto",
    precision: Precision | str | None = None,
) -> Fused:
    """Run ``model`` fused.

    The first call of each input signature (structure, shapes, strides, dtypes and plain values of the arguments)
    captures and compiles; later ones run native code. A change of the model (weights by any means, attributes, hooks,
    ``train()``) takes effect at the next call. What cannot be fused runs as eager would, with one warning. Calls that
    need gradients run a forward and, later, a backward program.

    Args:
        model: the module; it stays usable, and shares everything with the result.
        freeze: for inference: fold and pack the weights as they are at the first call. Announce later
            changes by ``refresh()``.
        passes: names of the passes to run; None for all that are enabled.
        dynamic_shapes: which sizes vary. ``"auto"``: sizes that differ between calls; from the second such call on,
            kernels take them as arguments. A declaration in the notation of ``torch.export``, like
            ``{"x": {0: torch.export.Dim("time"), 1: torch.export.Dim("batch")}}``, declares them before the first call,
            so that its kernels serve other sizes at once. None: all sizes are constants in kernels, which may be faster
            if there are few.
        precision: the dtype to run in, ``"bf16"``, ``"f16"`` or ``"autocast"``, or a :class:`fuse.Precision` that also
            names the operators that stay in float32, as recommended by ``fuse precision``. Weights and gradients are
            float32. ``"relaxed"`` keeps the dtypes, and leaves out roundings that a later cast undoes.

    Raises:
        FuseError: ``model`` is not a module, a pass or precision does not exist, or ``forward`` has no such argument.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    >>> fused = compile(model)
    >>> with torch.no_grad():
    ...     torch.allclose(fused(torch.ones(2, 4)), model(torch.ones(2, 4)))
    True
    >>> fused.last_run.launches, fused.last_run.fallbacks
    (2, ())
    """
    if isinstance(model, Fused):
        return model
    if not isinstance(model, nn.Module):
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise FuseError(f"fuse.compile takes a module, not its class; give {model.__name__}(...)")
        kind = type(model).__name__
        raise FuseError(f"fuse.compile takes an nn.Module, not one of type {kind}; wrap a function in a module")
    registry.select(passes)  # an unknown name is an error now, not at the first call
    if precision == "relaxed" or (isinstance(precision, Precision) and precision.relaxed):
        passes = [info.name for info in registry.select(passes, extend_select=["drop_roundings"])]
    if precision is not None and precision != "relaxed":
        model = in_precision(model, Precision(precision) if isinstance(precision, str) else precision)
    return _fused(Engine(model, freeze, passes, dynamic_shapes=dynamic_shapes))


_OF_CALLS = ("_call_impl", "_slow_forward", "_wrapped_call_impl")
"""Methods that lead from a call to ``forward``, here to the engine."""


class Fused(nn.Module):
    """A model that runs fused; made by :func:`compile`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.__dict__["_engine"] = engine
        for name in _OF_THE_MODEL:
            self.__dict__.pop(name, None)
        for name in _SHARED:
            self.__dict__[name] = getattr(engine.model, name)
        self.__dict__["_hooks"] = [self.__dict__[name] for name in HOOKS]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or any(self.__dict__["_hooks"]) or is_traced():
            return super().__call__(*args, **kwargs)
        engine: Engine = self.__dict__["_engine"]
        return engine.call(args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of ``model(*args, **kwargs)``: the same values, structure and aliases as in eager mode."""
        engine: Engine = self.__dict__["_engine"]
        if is_compiling() or is_traced():  # torch.compile and torch.jit.trace record the model's own operators
            return engine.model(*args, **kwargs)
        return engine.call(args, kwargs)

    @property
    def last_run(self) -> LastRun | None:
        """Launches of the last call, and the operators that ran eager with reasons; None before the first call."""
        return self._own().last_run()

    @property
    def compiled(self) -> Compiled | None:
        """The graph and program that served the last call; None if it ran eager."""
        return self._own().latest()

    def refresh(self) -> None:
        """Use weights that were changed since they were frozen; the next calls are captured and compiled again."""
        self._own().forget()

    def _own(self) -> Engine:
        engine: Engine = self.__dict__["_engine"]
        return engine

    # ---- everything else is the model's ----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        engine: Engine = self.__dict__["_engine"]
        return engine.method(getattr(engine.model, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise FuseError(
                "a compiled model cannot be given another class, as fully_shard does: compile its blocks before "
                "sharding the model around them"
            )
        if name in self.__dict__:  # of hooks that are registered here: nn.Module notes what kind they are
            self.__dict__[name] = value
        else:
            setattr(self._own().model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._own().model, name)

    def train(self, mode: bool = True) -> Fused:
        self._own().model.train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Fused:
        self._own().model._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._own().model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return self._own().model.load_state_dict(state_dict, *args, **kwargs)

    def extra_repr(self) -> str:
        return self._own().model.extra_repr()

    def _get_name(self) -> str:
        return f"Fused[{self._own().model._get_name()}]"

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused:
        made, (model, *settings) = self.__reduce__()
        return made(copy.deepcopy(model, memo), *settings)

    def __reduce__(self) -> tuple[Callable[..., Fused], tuple[Any, ...]]:
        """Copies and unpickled modules are compiled at their own first call."""
        engine = self._own()
        return _made_of, (engine.model, engine.freeze, engine.passes, engine.fuel, engine.dynamic_shapes)


def _made_of(model: nn.Module, freeze: bool, passes: Any, fuel: int | None, dynamic_shapes: Any) -> Fused:
    return _fused(Engine(model, freeze, passes, fuel, dynamic_shapes))


def _fused(engine: Engine) -> Fused:
    cls = type(engine.model)
    special = [name for name in _SPECIAL if hasattr(cls, name)]
    return _with_methods((*special, *(name for name in _OVERRIDABLE if _overrides(cls, name))))(engine)


def _overrides(cls: type[nn.Module], name: str) -> bool:
    own = getattr(cls, name)
    return own is not getattr(nn.Module, name) and callable(own)


_OVERRIDABLE = tuple(
    name
    for name in sorted(vars(nn.Module).keys() - vars(Fused).keys())
    if isinstance(vars(nn.Module)[name], FunctionType) and not name.startswith("__") and name not in _OF_CALLS
)
"""Methods of ``nn.Module`` that are the model's where its class has its own."""


@functools.cache
def _with_methods(names: tuple[str, ...]) -> type[Fused]:
    """The class of compiled models with these methods of the model's class."""
    return type(Fused.__name__, (Fused,), {name: _of_the_model(name) for name in names}) if names else Fused


def _of_the_model(name: str) -> Callable[..., Any]:
    def method(self: Fused, *args: Any, **kwargs: Any) -> Any:
        model = self._own().model
        result = getattr(model, name)(*args, **kwargs)
        return self if result is model else result

    return method
