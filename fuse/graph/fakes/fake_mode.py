"""Fake tensors without ``torch._dynamo``, whose import takes longer than a capture.

A ``FakeTensorMode`` reads two flags of ``torch._dynamo.config``, and wraps its dispatch in a switch for
``torch.compile``. Both import all of ``torch._dynamo``, which takes a second on top of torch's own second. Here

- the attribute ``torch._dynamo`` first resolves to a light module that knows ``config``; any other request imports the
  package;
- :class:`FakeMode` dispatches without the switch, and computes the layouts of the commonest operators itself
  (:mod:`fuse.graph.fakes.known_layouts`), so that most models do not need symbolic arithmetic either;
- torch's own rules for other operators (``cat``, ``where``, ``pow``, ``clamp``) have the same switch, and run without
  it as long as the package is not imported.

``sys.modules`` never contains the light module: ``import torch._dynamo`` imports the package, with the same ``config``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fuse.devices import is_host
from fuse.graph.fakes.known_layouts import known
from fuse.graph.locks import ForkedLock
from fuse.graph.strides import is_dense

_PACKAGE, _CONFIG = "torch._dynamo", "torch._dynamo.config"
_ONCE = ForkedLock()


_SWITCH = _disable_dynamo(lambda: None).__code__
_RULES = ("torch._refs", "torch._decomp", "torch._meta_registrations")
"""Prefixes of the modules with torch's rules for fake tensors."""
_KEPT = "__dynamo_disable"
"""The attribute in which torch's switch keeps the function that it calls from its second call on."""


def _without_switch(dispatch: Any) -> Any:
    """The method inside torch's switch for ``torch.compile``; the method itself if it has no switch."""
    return dispatch.__wrapped__ if getattr(dispatch, "__code__", None) is _SWITCH else dispatch


_torch_dispatch = _without_switch(FakeTensorMode.__torch_dispatch__)


@functools.cache
def _defer_switches() -> None:
    """Let torch's rules call what is inside their switch until ``torch._dynamo`` is imported: then nothing can be
    switched off."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_RULES)]
    waiting = [value for module in modules for value in vars(module).values() if isinstance(value, FunctionType)]
    seen: set[FunctionType] = set()
    while waiting:
        function = waiting.pop()
        if function in seen or not function.__module__.startswith("torch."):
            continue
        seen.add(function)
        around = _variables_around(function)
        waiting += [value for value in around.values() if isinstance(value, FunctionType)]
        if function.__code__ is _SWITCH and isinstance(rule := around.get("fn"), FunctionType):
            vars(rule).setdefault(_KEPT, _deferred_switch(function, rule))


def _variables_around(function: FunctionType) -> dict[str, Any]:
    """The variables that ``function`` takes from the functions around it, such as the function that it wraps."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell may be empty
            found[name] = cell.cell_contents
    return found


def _deferred_switch(switch: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """``rule`` as long as ``torch._dynamo`` is not imported; from then on ``switch`` around it, as torch made it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if _PACKAGE not in sys.modules:
            return rule(*args, **kwargs)
        vars(rule).pop(_KEPT, None)
        return switch(*args, **kwargs)

    return run


class WithoutSwitch:
    """Base of a dispatch mode without torch's switch for ``torch.compile``, which imports ``torch._dynamo`` and takes a
    tenth of the mode's time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class FakeMode(WithoutSwitch, FakeTensorMode):
    """A ``FakeTensorMode`` that does not import ``torch._dynamo``.

    >>> with FakeMode() as mode:
    ...     torch.ones(2, 3).sum(0).shape
    torch.Size([3])
    """

    def __init__(self, **options: Any) -> None:
        with _ONCE:
            _defer_dynamo()
            _defer_switches()
        super().__init__(**options)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = known(self, op, tuple(args), kwargs or {})
        return _torch_dispatch(self, op, types, args, kwargs) if result is NotImplemented else result

    def from_tensor(self, tensor: Tensor, **options: Any) -> FakeTensor:
        """The fake tensor of a real tensor, the same one each time."""
        converter = self.fake_tensor_converter
        if options or not _stands_alone(tensor) or converter._get_memo(tensor) is not None:
            return super().from_tensor(tensor, **options)
        memo = converter.meta_converter.storage_memo
        storage = converter.meta_converter.describer.get_storage_id(tensor.untyped_storage())
        if storage in memo:  # another tensor shares the memory
            return super().from_tensor(tensor, **options)
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            fake = FakeTensor(self, meta, tensor.device)
        fake.requires_grad = tensor.requires_grad
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True
        memo[storage] = fake.untyped_storage()
        converter.set_tensor_memo(tensor, fake)
        return fake


def _stands_alone(tensor: Any) -> bool:
    """Whether dtype, shape and strides describe a real tensor completely, except for its values."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and is_host(tensor)
        and tensor.layout is torch.strided
        and tensor.is_leaf
        and tensor.grad is None
        and tensor._base is None
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        and is_dense(tensor)
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and not vars(tensor)
    )


class _Deferred(ModuleType):
    """The attribute ``torch._dynamo`` until anything but ``config`` is requested."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_PACKAGE), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(_PACKAGE), name, value)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(_PACKAGE))


def _defer_dynamo() -> None:
    """Make ``torch._dynamo.config`` readable without importing the package around it."""
    if _PACKAGE in sys.modules or "_dynamo" in vars(torch):
        return
    spec = PathFinder.find_spec(_CONFIG, [os.path.join(folder, "_dynamo") for folder in torch.__path__])
    if spec is None or spec.loader is None:  # an unknown version of torch: leave its import unchanged
        return
    config = sys.modules[_CONFIG] = module_from_spec(spec)
    try:
        spec.loader.exec_module(config)
    except Exception:
        del sys.modules[_CONFIG]
        return
    deferred = _Deferred(_PACKAGE)
    vars(deferred)["config"] = config
    if _PACKAGE not in sys.modules:  # another thread may have imported it meanwhile
        torch._dynamo = deferred
