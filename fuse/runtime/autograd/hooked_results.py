"""Find hooks that would get another gradient than in eager mode: those on a result through which gradients of other
results flow (:mod:`fuse.graph.backward.later_results`).

    y, h = fused(x)
    h.register_hook(print)      (y.sum() + h.sum()).backward() raises; later calls run eager
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor

HOOKED = "a hook (or retain_grad) reads the gradient of a result from which another result is computed"

Results = Sequence[tuple[int, ref[Tensor]]]
"""Results with their positions."""
Hooks = Sequence[tuple[int, Mapping[int, Any]]]
"""The hooks of results, each with the place of its result among the tangents."""


def retaining(results: Results) -> list[int]:
    """The positions of the results that keep their gradients (``retain_grad``)."""
    tensors = ((position, result()) for position, result in results)
    return [position for position, tensor in tensors if tensor is not None and tensor.retains_grad]


def is_read(
    read: Iterable[int], later: Mapping[int, int], places: Mapping[int, int], tangents: Sequence[Tensor | None]
) -> bool:
    """Whether gradients of later results flow through one of the results ``read``.

    ``later`` is as :func:`~fuse.graph.backward.later_results.later_results` gives it; ``places`` are the positions of
    results among ``tangents``.
    """
    through = functools.reduce(operator.or_, (later.get(position, 0) for position in read), 0)
    return any(through >> i & 1 and tangents[place] is not None for i, place in places.items())
