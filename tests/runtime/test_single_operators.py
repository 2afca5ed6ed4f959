"""Operators in no region: a kernel of their own where there is one, whatever number of results is read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fuse
from fuse.graph.function import Function
from fuse.testing import assert_fuses

X = torch.randn(4, 8, 12, 12, generator=torch.Generator().manual_seed(0))


KERNELS = {
    "one result": lambda x: x.sigmoid(),
    "both results": lambda x: x.max(-1),
    "both, the last first": lambda x: x.max(-1)[::-1],
    "the first of two": lambda x: F.max_pool2d(x, 2),
    "the second of two": lambda x: x.max(-1)[1],
    "the first of three": lambda x: F.layer_norm(x, (12,)),
    "the same one twice": lambda x: torch.var_mean(x, (0, 2))[:1] * 2,
}
LIBRARY = {
    "results without a kernel": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "an operator without a kernel": lambda x: x.topk(3),
}


@pytest.mark.parametrize("name", [*KERNELS, *LIBRARY])
def test_one_launch_runs_it(name: str) -> None:
    model = Function((KERNELS | LIBRARY)[name])
    with torch.no_grad():
        assert_fuses(model, X, launches=1)
        fused = fuse.compile(model)
        fused(X)
    assert fused.last_run.kernels == (name in KERNELS)
