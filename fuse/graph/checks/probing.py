"""Find operators that eager does not implement, by calling them on tensors of one element.

    gelu(int8[3, 4])      fake tensors give int8[3, 4]; eager raises "GeluKernelImpl" not implemented for 'Char'

Whether eager has code depends on dtypes, and on whether there are elements at all; fake tensors check this only in
part. Each operator is tried once in this process for each combination of dtypes and ranks.

A variance is asked for without correction: with one element and one degree of freedom less, eager would warn.

Backward operators that index by integers (``nll_loss_backward``, ``_ctc_loss_backward``) are not tried. They rely on
checks of the forward operator, and made-up integers would read outside of the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fuse import ops
from fuse.devices import is_host

_answers: dict[tuple[Any, ...], str | None] = {}
_FOREIGN = ("implemented", "only support", "not support", "different dtypes", "reduction dim")
"""Phrases in eager's errors about an unsupported dtype or an empty reduction."""


def obstacle(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why eager does not implement this call, or None.

    >>> print(obstacle(torch.ops.aten.gelu.default, (torch.zeros(2, dtype=torch.int8),), {}))
    has no code in eager: "GeluKernelImpl" not implemented for 'Char'
    >>> print(obstacle(torch.ops.aten.gelu.default, (torch.zeros(2),), {}))
    None
    """
    if ops.kind(op) not in ("pointwise", "reduction") or op.namespace != "aten" or ops.is_random(op):
        return None
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if any(not is_host(t) or t.layout is not torch.strided for t in tensors) or _reads_unchecked_places(op, tensors):
        return None
    try:
        key = op, *map(_key_of, args), *((name, _key_of(value)) for name, value in kwargs.items())
        if key not in _answers:
            _answers[key] = _asked(op, args, kwargs)
        return _answers[key]
    except TypeError:  # an argument that cannot be hashed
        return None


def _reads_unchecked_places(op: OpOverload, tensors: Sequence[Tensor]) -> bool:
    return op._schema.name.endswith("_backward") and any(t.dtype in (torch.int32, torch.int64) for t in tensors)


def _key_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, _least(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key_of, value))
    return type(value)


def _least(tensor: Tensor) -> tuple[int, ...]:
    """The smallest shape with the same rank; a dimension without elements stays empty."""
    return tuple([n if n < 1 else 1 for n in tensor.shape])


def _asked(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    with unset_fake_temporarily(), torch.no_grad():
        try:
            named = {name: 0 if name == "correction" else _of_one_element(value) for name, value in kwargs.items()}
            op(*map(_of_one_element, args), **named)
        except (
            NotImplementedError,
            RuntimeError,
            IndexError,
        ) as error:  # the errors of operators that eager does not implement
            text = str(error).splitlines()[0]
            if any(words in text for words in _FOREIGN):
                return f"has no code in eager: {text}"
        except Exception:  # about shapes and values, which differ from the call's
            return None
    return None


def _of_one_element(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.ones(_least(value), dtype=value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_of_one_element, value))
    return value
