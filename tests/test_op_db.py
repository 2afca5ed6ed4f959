"""A few dozen operators of PyTorch's own list through ``fuse.compile``; ``benchmarks/op_db.py`` runs all of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import op_db

KERNELS = (
    "add abs argmax cat clamp div exp expand flip lerp log_softmax logsumexp masked_fill maximum mean mul "
    "nn.functional.gelu nn.functional.layer_norm nn.functional.leaky_relu nn.functional.group_norm nn.functional.pad "
    "permute pow repeat reshape rsub softmax stack std sub sum tanh tril unsqueeze var where"
)
OTHERS = "bmm matmul addmm linalg.svd nn.functional.conv2d nn.functional.dropout sort topk cumsum unique"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*KERNELS.split(), *OTHERS.split()])
def test_an_operator_gives_what_eager_gives(name: str) -> None:
    for op in op_db.operators([name]):
        outcome = op_db.sweep(op, samples=3)
        assert not outcome.wrong
        if name in KERNELS.split() and not op.variant_test_name:
            assert outcome.place == "kernel", outcome.fallbacks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "dtype"), [("mul", "float32"), ("softmax", "bfloat16"), ("linalg.norm", "float32")])
def test_an_operator_is_trained_as_in_eager(name: str, dtype: str) -> None:
    for op in op_db.operators([name], getattr(torch, dtype), gradients=True):
        outcome = op_db.sweep(op, samples=30, dtype=getattr(torch, dtype), gradients=True)
        assert outcome.samples > 1
        assert not outcome.wrong
        assert not outcome.declined
