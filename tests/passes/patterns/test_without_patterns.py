"""What the generic passes make of well-known structures by themselves: the library needs no pattern for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.graph.function import Function
from fuse.testing import assert_fuses

_GENERATOR = torch.Generator().manual_seed(0)


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_GENERATOR)


def lstm(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru(x: Tensor, h: Tensor, state: Tensor) -> Tensor:
    xr, xz, xn, hr, hz, hn = *x.chunk(3, 1), *h.chunk(3, 1)
    z = torch.sigmoid(xz + hz)
    return (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * state


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def layer_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return F.layer_norm(x + y, (16,), w, b), x + y


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin


def rotary_in_pairs(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)


def crf(a: Tensor, transitions: Tensor, emission: Tensor, mask: Tensor) -> Tensor:
    new = torch.logsumexp(a[:, :, None] + transitions + emission[:, None, :], 1)
    return torch.where(mask[:, None], new, a)


def gated_graph(a: Tensor, h: Tensor, z: Tensor, r: Tensor, hr: Tensor) -> Tensor:
    z = torch.sigmoid(z)
    return torch.tanh(a + torch.sigmoid(r) * hr) * z + h * (1 - z)


def conv_norm(x: Tensor, w: Tensor, m: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return torch.relu(F.batch_norm(F.conv2d(x, w, padding=1), m, v, g, b))


IMAGE, KERNEL = r(2, 16, 8, 8), r(16, 16, 3, 3)
HEADS = (r(2, 4, 8, 16), r(2, 4, 8, 16), r(2, 4, 8, 16))
LAYER = (r(4, 16), r(32, 16), r(32))

ONE_KERNEL: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "LSTM gates": (lstm, (r(4, 64), r(4, 16))),
    "GRU gates": (gru, (r(4, 48), r(4, 48), r(4, 16))),
    "RMS norm": (rms_norm, (r(4, 16), r(16))),
    "layer norm with residual": (layer_norm, (r(4, 16), r(4, 16), r(16), r(16))),
    "scaled and masked softmax": (lambda x, m: torch.softmax(x / 8 + m, -1), (r(2, 4, 8, 8), r(2, 1, 1, 8))),
    "filled softmax": (lambda x, m: (x / 8).masked_fill(m > 0, -1e9).softmax(-1), (r(2, 4, 8, 8), r(2, 1, 1, 8))),
    "attention": (lambda q, k, v, m: torch.softmax(q @ k.mT / 8 + m, -1) @ v, (*HEADS, r(2, 1, 1, 8))),
    "rotary embedding": (rotary, (r(2, 4, 5, 16), r(5, 16), r(5, 16))),
    "rotary embedding in pairs": (rotary_in_pairs, (r(2, 4, 5, 16), r(5, 8), r(5, 8))),
    "CRF step": (crf, (r(4, 9), r(9, 9), r(4, 9), r(4) > 0)),
    "gated-graph step": (gated_graph, tuple(r(5, 16) for _ in range(5))),
    "gated linear unit": (lambda x: torch.tanh(F.glu(x)) + 1, (r(4, 16),)),
    "gated linear unit of channels": (lambda x, y: F.glu(x, 1) + y, (IMAGE, r(2, 8, 8, 8))),
    "gated linear unit in halves": (lambda x: F.glu(x * 2), (r(4, 16).bfloat16(),)),
    "linear, relu": (lambda x, w, b: torch.relu(F.linear(x, w, b)), LAYER),
    "linear, gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), LAYER),
    "linear, gelu by tanh": (lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), LAYER),
    "linear, silu": (lambda x, w, b: F.silu(x @ w.t() + b), LAYER),
    "linear, tanh": (lambda x, w, b: torch.tanh(F.linear(x, w, b)), LAYER),
    "residual tail": (lambda x, w, s: torch.relu(F.conv2d(x, w, padding=1) + s), (IMAGE, KERNEL, r(2, 16, 8, 8))),
    "convolution, batch norm, relu": (conv_norm, (IMAGE, KERNEL, r(16), r(16).abs(), r(16), r(16))),
}

LIBRARY_CALL_AND_ONE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "linear, gated": (lambda x, w, b: F.glu(F.linear(x, w, b)), LAYER),
}


@pytest.mark.parametrize("structure", ONE_KERNEL)
def test_it_is_one_kernel(structure):
    function, arguments = ONE_KERNEL[structure]
    assert_fuses(Function(function), *arguments, launches=1)


@pytest.mark.parametrize("structure", LIBRARY_CALL_AND_ONE)
def test_it_is_a_library_call_and_one_kernel_at_most(structure):
    function, arguments = LIBRARY_CALL_AND_ONE[structure]
    assert assert_fuses(Function(function), *arguments).after.launches <= 2  # one where a kernel takes the product in
