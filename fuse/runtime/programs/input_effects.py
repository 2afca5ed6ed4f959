"""Effects of a call on its inputs besides the values that it writes: versions that rise, shapes that change in place.

self.mean.mul_(0.9)             version + 1: autograd raises, if it saved the mean before
self.mean.data.mul_(0.9)        version + 0: autograd must not see this write
x.unsqueeze_(-1)                the same operator, on the caller's tensor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fuse.graph.signature import Signature
from fuse.runtime.guards.call_guards import picker

Effects = Callable[[Sequence[Tensor]], None]
"""Changes the tensors of a call's placeholders, once the program has written their values."""


def effects_on_inputs(signature: Signature) -> Effects | None:
    """The function that raises versions of inputs as often as eager does, and reshapes them; None if it has nothing to
    do."""
    positions = [position for position, times in signature.raised for _ in range(times)]
    written, raised, reshaped = picker(positions), torch.autograd.graph.increment_version, signature.reshaped

    def effects(tensors: Sequence[Tensor]) -> None:
        raised(tuple(one for one in written(tensors) if not one.is_inference()))  # these have no versions
        for one in reshaped:
            one.op(tensors[one.input_index], *one.args)

    return effects if positions or reshaped else None
