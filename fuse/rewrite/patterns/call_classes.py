"""Classes of calls for which a pattern was tested, with the results.

    float32[n, n], float32[n]                  right
    float64[n, n], float32[n]                  raised    replace raises RuntimeError: mixed dtype (CPU)
    float32[n, 1] transposed, float32[n]       wrong     result 0: error 0.5 at (0, 0), allowed 1.2e-06

A class contains dtypes, ranks, which sizes are 0 or 1 (1 is broadcast), layouts, and the pattern's own numbers; it does
not contain other sizes. A pattern is used only for classes with the result ``right``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from fuse.graph.describing import dtype_name

_NONE: Mapping[str, Any] = MappingProxyType({})

TrialOutcome = Literal["right", "raised", "wrong", "not tried"]


@dataclass(frozen=True)
class Trial:
    """The result of testing one class of calls; ``reason`` is empty if it is ``right``."""

    outcome: TrialOutcome
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}" if self.reason else self.outcome


RIGHT = Trial("right")


def class_of(arguments: Sequence[Any], choices: Mapping[str, int], constants: Mapping[str, Any] = _NONE) -> str:
    """The class of a call. ``arguments``: tensors, lists of tensors, and None for one that is not read. ``choices``:
    the alternatives taken.

    >>> import torch
    >>> class_of([torch.ones(2, 3), torch.ones(1, 3).half(), [torch.ones(3, 2).t()]], {"bias": 1}, {"eps": 0.1})
    'float32[n, n], float16[1, n], [float32[n, n] transposed]; bias=1, eps=0.1'
    """
    taken = ", ".join(f"{name}={value!r}" for name, value in [*choices.items(), *constants.items()])
    tensors = ", ".join(map(_text_of, arguments))
    return f"{tensors}; {taken}" if taken else tensors


def _text_of(argument: Any) -> str:
    if argument is None:
        return "none"
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_text_of, argument))}]"
    sizes = ", ".join(str(int(size)) if int(size) in (0, 1) else "n" for size in argument.shape)
    layout = layout_of(argument)
    return f"{dtype_name(argument.dtype)}[{sizes}]" + ("" if layout == "contiguous" else f" {layout}")


def layout_of(tensor: Tensor) -> str:
    """The memory layout of a tensor in a word, ignoring dimensions of one element.

    >>> import torch
    >>> [layout_of(one) for one in (torch.ones(4, 6), torch.ones(4, 6).t(), torch.ones(4, 6)[:, ::2])]
    ['contiguous', 'transposed', 'strided']
    >>> layout_of(torch.ones(1, 6).expand(4, 6)), layout_of(torch.ones(2, 3, 4, 4, 2).movedim(1, 3))
    ('expanded', 'permuted 0, 3, 1, 2, 4')
    """
    strides = tensor.stride()
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != 1]
    if not tensor.numel():
        return "contiguous"
    if any(int(strides[dim]) == 0 for dim in dims):
        return "expanded"
    order = sorted(dims, key=lambda dim: -int(strides[dim]))
    expected = 1
    for dim in reversed(order):
        if int(strides[dim]) != expected:
            return "strided"
        expected *= int(tensor.shape[dim])
    if order == dims:
        return "contiguous"
    if order == [*dims[:-2], dims[-1], dims[-2]]:
        return "transposed"
    if tensor.dim() == 4 and order == [dim for dim in (0, 2, 3, 1) if dim in dims]:
        return "channels_last"
    return f"permuted {', '.join(map(str, order))}"
