"""The blocks of ``benchmarks/blocks.py``: right, captured whole, and no more launches than are written down here."""

from __future__ import annotations

import pytest
import torch

from benchmarks.blocks import CASES
from fuse.check.oracle import check

MORE = {
    "linear_max_centre_gelu": 3,  # a mean over rows follows a maximum of rows
    "linear_swiglu": 3,
    "mlp": 3,
    "attention": 1,
    "causal_attention": 1,
    "conv_instance_norm_divide": 3,
    "conv_relu_max_pool": 3,
    "conv_avg_pool_sigmoid_sum": 3,
    "conv_global_pool_linear": 3,
    "depthwise_bn_relu6_pointwise": 3,
    "conv_squeeze_excite": 7,
}
"""Blocks of several products, or with an operator that is a kernel of its own; others are a product and a kernel."""


@pytest.mark.sampled
@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize("name", CASES)
def test_a_block_is_right_in_few_launches(name: str) -> None:
    block, inputs = CASES[name]()
    with torch.no_grad():
        report = check(block.eval(), inputs)
    assert report.passed, str(report)
    assert report.fallbacks == ()
    assert report.observed[1] <= MORE.get(name, 2)
