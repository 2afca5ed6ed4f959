"""One step of recurrent cells, behind its products: a part of a loop's kernel, or a kernel of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.rewrite.patterns.language import const
from fuse.rewrite.patterns.registry import pattern


@pattern(enabled=False)
class LstmCell:
    """The gates of an LSTM.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/lstm_cell_fusion.cpp.
    """

    def pattern(self, gates: Tensor, c: Tensor) -> Any:
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def examples(self) -> Any:
        return torch.randn(3, 32), torch.randn(3, 8)


@pattern(enabled=False)
class GruCell:
    """The gates of a GRU, with the reset applied after the product.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/gru_cell_fusion.cpp.
    """

    def pattern(self, x: Tensor, h: Tensor, state: Tensor) -> Any:
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
        z = torch.sigmoid(xz + hz)
        return (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * state

    def examples(self) -> Any:
        return torch.randn(3, 24), torch.randn(3, 24), torch.randn(3, 8)


@pattern(enabled=False)
class AttentionGruCell:
    """A GRU whose update is weighted by attention.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/augru_cell_fusion.cpp.
    """

    def pattern(self, z: Tensor, candidate: Tensor, attention: Tensor, state: Tensor) -> Any:
        z = (1 - attention) * torch.sigmoid(z)
        return z * state + (1 - z) * torch.tanh(candidate)

    def examples(self) -> Any:
        return torch.randn(3, 8), torch.randn(3, 8), torch.rand(3, 1), torch.randn(3, 8)


@pattern(enabled=False)
class PeepholeCell:
    """An LSTM whose gates read the cell's state.

    Source: PaddlePaddle/Paddle, paddle/fluid/framework/ir/fc_lstm_fuse_pass.cc.
    """

    def pattern(self, gates: Tensor, c: Tensor, pi: Tensor, pf: Tensor, po: Tensor) -> Any:
        i, f, g, o = gates.chunk(4, 1)
        new = torch.sigmoid(f + pf * c) * c + torch.sigmoid(i + pi * c) * torch.tanh(g)
        return torch.sigmoid(o + po * new) * torch.tanh(new), new

    def examples(self) -> Any:
        return torch.randn(3, 32), torch.randn(3, 8), torch.randn(8), torch.randn(8), torch.randn(8)


@pattern(enabled=False)
class LayerNormCell:
    """An LSTM with a layer norm of its new cell state.

    Source: lmnt-com/haste, frameworks/pytorch/layer_norm_lstm.py.
    """

    def pattern(self, gates: Tensor, c: Tensor, weight: Tensor, bias: Tensor) -> Any:
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(F.layer_norm(c, weight.shape, weight, bias, const("eps", 1e-5))), c

    def examples(self) -> Any:
        return torch.randn(3, 32), torch.randn(3, 8), torch.randn(8), torch.randn(8)


@pattern(enabled=False)
class LightGruCell:
    """A GRU without a reset and with a ReLU.

    Source: lmnt-com/haste, frameworks/pytorch/vanilla_ligru.py.
    """

    def pattern(self, gates: Tensor, h: Tensor) -> Any:
        candidate, z = gates.chunk(2, 1)
        z = torch.sigmoid(z)
        return z * h + (1 - z) * torch.relu(candidate)

    def examples(self) -> Any:
        return torch.randn(3, 16), torch.randn(3, 8)


@pattern(enabled=False)
class IndependentCell:
    """A cell whose units read only their own state (IndRNN).

    Source: lmnt-com/haste, frameworks/pytorch/indrnn.py.
    """

    def pattern(self, x: Tensor, u: Tensor, h: Tensor) -> Any:
        return torch.tanh(x + u * h)

    def examples(self) -> Any:
        return torch.randn(3, 8), torch.randn(8), torch.randn(3, 8)
