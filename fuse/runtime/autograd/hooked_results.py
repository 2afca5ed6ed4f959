"""Find hooks that would get another gradient than in eager mode: those on a result through which gradients of other
results flow (:mod:`fuse.graph.backward.later_results`).

    y, h = fused(x)
    h.register_hook(print)      (y.sum() + h.sum()).backward() raises; later calls run eager
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import ref

from torch import Tensor

HOOKED = "a hook (or retain_grad) reads the gradient of a result from which another result is computed"


def is_read(
    results: Sequence[tuple[int, ref[Tensor]]],
    later: Mapping[int, int],
    places: Mapping[int, int],
    tangents: Sequence[Tensor | None],
) -> bool:
    """Whether a hook reads one of ``results``, and gradients of later results flow through it.

    ``later`` is as :func:`~fuse.graph.backward.later_results.later_results` gives it; ``places`` are the positions of
    results among ``tangents``.
    """
    for position, result in results:
        tensor = result()
        if tensor is None or not (tensor._backward_hooks or tensor.retains_grad):
            continue
        if any(later[position] >> i & 1 and tangents[place] is not None for i, place in places.items()):
            return True
    return False
