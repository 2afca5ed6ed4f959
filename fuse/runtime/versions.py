"""The versions of inputs that a call writes, raised as often as eager raises them.

self.mean.mul_(0.9)             version + 1: autograd raises, if it saved the mean before
self.mean.data.mul_(0.9)        version + 0: autograd must not see this write
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fuse.graph.signature import Signature
from fuse.runtime.guards import picker

RaiseVersions = Callable[[Sequence[Tensor]], None]
"""Raises the versions of the written tensors among those of a call's placeholders."""


def raising(signature: Signature) -> RaiseVersions | None:
    """The function that raises the versions of written inputs; None if no version changes."""
    positions = [mutation.input_index for mutation in signature.mutations for _ in range(mutation.versions)]
    if not positions:
        return None
    written, raised = picker(positions), torch.autograd.graph.increment_version
    return lambda tensors: raised(written(tensors))
