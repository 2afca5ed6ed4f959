"""Tables: values whose elements a size may choose without a record, since indexing them reads the number in C.

factors = [1.0, 2.0, 2.0]        a list of numbers, of functions, of texts: a table
states = [h0, h1, h2]            results of steps: none, since the graph shows the index
weights = [a, a, b]              tensors that recur, or constants, which may be equal: a table
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def is_table(value: Any) -> bool:
    """Whether indexing a value reads the index in Python or C: lists of numbers or functions, strings, arrays, and
    lists in which tensors recur or are constants, but not other lists of tensors, whose graph shows the index, nor
    modules, whose lists read it by themselves."""
    if isinstance(value, (list, tuple, deque)):
        return len(value) > 1 and (any(_is_entry(one) or is_table(one) for one in value) or _is_of_few(value))
    is_array = type(value).__module__.partition(".")[0] in ("numpy", "array") and hasattr(value, "__getitem__")
    return is_array or isinstance(value, (str, bytes))


def _is_of_few(values: Iterable[Any]) -> bool:
    """Whether two of these values are the same tensor, or constants, which may be equal."""
    tensors = [one for one in values if isinstance(one, torch.Tensor)]
    constants = sum(not isinstance(one, FakeTensor) for one in tensors)
    return constants > 1 or len(set(map(id, tensors))) < len(tensors)


def _is_entry(one: Any) -> bool:
    return isinstance(one, (int, float, str, bytes)) or (callable(one) and not isinstance(one, torch.nn.Module))
