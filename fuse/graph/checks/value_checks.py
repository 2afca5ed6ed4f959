"""Record checks of values that ATen leaves out for fake tensors.

    one_hot(x, 4)      eager raises for -1 and 4, a fake tensor never does
                       ->  _assert_async(((x >= 0) & (x < 4)).all()), then one_hot

These functions are composites, which reach a dispatch mode only after they are decomposed. So during a recording they
have a kernel of ours at the autograd key, where they are still whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

Check = Callable[..., Tensor | None]
_Record = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], None]


def _is_class(index: Tensor, num_classes: int = -1) -> Tensor | None:
    below = index >= 0
    return below if num_classes < 0 else below & (index < num_classes)


def _is_share(_: Tensor, q: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    return (q >= 0) & (q <= 1) if isinstance(q, Tensor) else None


_CHECKS: dict[OpOverload, Check] = {
    aten.one_hot.default: _is_class,
    aten.quantile.default: _is_share,
    aten.nanquantile.default: _is_share,
}


def check_values(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Record the check of values for ``op``, if it has one.

    >>> check_values(aten.relu.default, (torch.ones(2),), {})
    """
    check = _CHECKS.get(op)
    if check is not None and isinstance(args[0], FakeTensor) and (good := check(*args, **kwargs)) is not None:
        torch._assert_async(good.all(), f"{op} is given a value that is out of range")


_RECORDING: list[_Record] = []
"""The recorders of checks, the innermost last: a loop's step is recorded within another recording. One thread captures
at a time."""


@contextlib.contextmanager
def values_checked(record: _Record) -> Iterator[None]:
    """A context that calls ``record`` before each function that does not check the values of fake tensors."""
    _RECORDING.append(record)
    try:
        with contextlib.ExitStack() as layers:
            if len(_RECORDING) == 1:  # torch warns about a kernel that replaces another
                kernels = layers.enter_context(torch.library._scoped_library("aten", "IMPL"))
                for op in _CHECKS:
                    kernels.impl(op, functools.partial(_checked, op), "AutogradCPU")
            yield
    finally:
        _RECORDING.pop()


def _checked(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    if isinstance(args[0], FakeTensor):  # other threads use these functions meanwhile, with real tensors
        _RECORDING[-1](op, args, kwargs)
        if op is aten.one_hot.default and len(args) > 1 and args[1] > 0 and args[0].dtype == torch.int64:
            return _one_hot(*args)
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _one_hot(index: Tensor, num_classes: int) -> Tensor:
    """``one_hot`` as ATen computes it for fake tensors, but contiguous like eager's."""
    classes = torch.arange(num_classes, device=index.device)
    return (index.unsqueeze(-1) == classes).to(torch.int64, memory_format=torch.contiguous_format)
