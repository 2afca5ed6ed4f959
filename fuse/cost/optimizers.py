"""Launches of a step of torch's optimizers, for each of their implementations.

    loop      a few operators for each parameter         the default on a processor
    foreach   an operator for a list of parameters       _foreach_mul_(gradients, 0.9)
    fused     one operator for the whole step            _fused_adamw_(...)

The count depends on the number of parameters and on their dtypes, not on their sizes. So the optimizer really runs, on
parameters of one element each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fuse.cost.observe import CountingMode

OPTIMIZERS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {}),
}
"""The constructors of the counted optimizers, by name."""

WAYS: Mapping[str, Mapping[str, bool]] = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def optimizer_launches(dtypes: Sequence[torch.dtype]) -> dict[str, dict[str, int]]:
    """The launches of a step for parameters of these dtypes, by optimizer and implementation; empty without parameters.

    >>> optimizer_launches([torch.float32] * 3)
    {'SGD': {'loop': 9, 'foreach': 3, 'fused': 1}, 'AdamW': {'loop': 27, 'foreach': 9, 'fused': 2}}
    >>> optimizer_launches([])
    {}
    """
    if not dtypes:
        return {}
    return {
        name: {way: _step(make, {**options, **how}, dtypes) for way, how in WAYS.items()}
        for name, (make, options) in OPTIMIZERS.items()
    }


def _step(make: Any, options: Mapping[str, Any], dtypes: Sequence[torch.dtype]) -> int:
    """The launches of the second step: the first one also creates the optimizer's state."""
    parameters = [torch.ones(1, dtype=dtype, requires_grad=True) for dtype in dtypes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters, lr=1e-3, **options)
    optimizer.step()
    with CountingMode() as counting:
        optimizer.step()
    return int(counting.launches)
