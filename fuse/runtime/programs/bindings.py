"""PyTorch's Python bindings of operators, which are faster than calls of operator overloads.

    aten.topk.default(x, 4, -1)      ->      torch.topk(x, 4, -1)

``torch.ops`` matches arguments against a schema in each call; a binding was compiled for its schema, which saves about
half a microsecond a call. A binding chooses the overload by the types of its arguments. So it is tried once, without
computing, and used only if it calls this one overload with these arguments and returns its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fuse.graph.fakes.fake_mode import WithoutSwitch

_C: Any = torch._C
_NAMESPACES = tuple(getattr(_C, name) for name in ("_VariableFunctions", "_nn", "_linalg", "_fft", "_special"))
_known: dict[object, Callable[..., Any]] = {}


def fastest(function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The fastest function that calls an overload with arguments of these types; ``args`` may be fake tensors.

    >>> fastest(torch.ops.aten.topk.default, (torch.empty(8, device="meta"), 2), {}) is torch.topk
    True
    >>> slice = torch.ops.aten.slice.Tensor  # torch has no function of this name
    >>> fastest(slice, (torch.empty(8, device="meta"), 0, 1), {}) is slice._op
    True
    """
    key = function, _types(args), _types(dict(kwargs))
    if key not in _known:
        _known[key] = _found(function, args, kwargs) or function._op
    return _known[key]


def _found(function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    binding = _namesake(function._schema.name)
    if binding is None or not any(isinstance(one, Tensor) for one in _leaves(args)):
        return None
    if not all(str(returned.type) == "Tensor" for returned in function._schema.returns):
        return None
    wanted, actual = _RecordedCalls(), _RecordedCalls()
    try:
        with _disable_current_modes(), torch.no_grad():
            with wanted:
                function._op(*args, **kwargs)
            with actual:
                result = binding(*args, **kwargs)
    except Exception:  # of any kind: a binding that cannot be tried is not used
        return None
    made = wanted.made
    same = len(made) == len(actual.made) == 1 and made[0][0] is function and _same(made[0], actual.made[0])
    return binding if same and _same(_leaves(result), actual.given) else None


@cache
def _namesake(name: str) -> Callable[..., Any] | None:
    namespace, _, own = name.partition("::")
    return next((getattr(p, own) for p in _NAMESPACES if hasattr(p, own)), None) if namespace == "aten" else None


class _RecordedCalls(WithoutSwitch, TorchDispatchMode):
    """A mode that records operators with their arguments, computes none, and returns empty tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.made: list[list[Any]] = []
        self.given: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append([func, *_leaves((args, kwargs or {})), pytree.tree_structure((args, kwargs or {}))])
        self.given = [torch.empty(0) for _ in func._schema.returns]
        return tuple(self.given) if len(self.given) > 1 else self.given[0]


def _leaves(given: Any) -> list[Any]:
    return pytree.tree_leaves(given)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists have the same tensors, and equal other values of the same types."""
    return len(some) == len(others) and all(
        a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(some, others, strict=True)
    )


def _types(argument: Any) -> object:
    if isinstance(argument, dict):
        return tuple((name, _types(item)) for name, item in argument.items())
    if isinstance(argument, (tuple, list)):
        return (list, *map(_types, argument))
    return Tensor if isinstance(argument, Tensor) else type(argument)
