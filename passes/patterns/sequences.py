"""Steps of sequence models other than recurrent cells: chains, state-space models and decays."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.rewrite.patterns.registry import pattern


@pattern(enabled=False)
class CrfStep:
    """One step of a CRF's forward algorithm, with a mask.

    Source: kmkurn/pytorch-crf, torchcrf/__init__.py.
    """

    def pattern(self, score: Tensor, transitions: Tensor, emission: Tensor, mask: Tensor) -> Any:
        new = torch.logsumexp(score[:, :, None] + transitions + emission[:, None, :], 1)
        return torch.where(mask[:, None], new, score)

    def examples(self) -> Any:
        return torch.randn(3, 5), torch.randn(5, 5), torch.randn(3, 5), torch.rand(3) > 0.5


@pattern(enabled=False)
class ViterbiStep:
    """One step of the Viterbi algorithm: the best score of each tag, and its predecessor.

    Source: kmkurn/pytorch-crf, torchcrf/__init__.py.
    """

    def pattern(self, score: Tensor, transitions: Tensor, emission: Tensor) -> Any:
        best, before = (score[:, :, None] + transitions + emission[:, None, :]).max(1)
        return best, before

    def examples(self) -> Any:
        return torch.randn(3, 5), torch.randn(5, 5), torch.randn(3, 5)


@pattern(enabled=False)
class SelectiveScanStep:
    """One step of Mamba's state, and its output.

    Source: state-spaces/mamba, mamba_ssm/ops/selective_scan_interface.py.
    """

    def pattern(self, h: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Any:
        h = torch.exp(dt[:, :, None] * a) * h + (dt * x)[:, :, None] * b[:, None, :]
        return (h * c[:, None, :]).sum(-1), h

    def examples(self) -> Any:
        dt, b = torch.rand(3, 5), torch.randn(3, 4)
        return torch.randn(3, 5, 4), dt, -torch.rand(5, 4), b, torch.randn(3, 4), torch.randn(3, 5)


@pattern(enabled=False)
class DecayGate:
    """The decay of a gated delta rule: -exp(a) softplus(x + b).

    Source: NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/auto_deploy/transform/library/fuse_gdn_gating.py.
    """

    def pattern(self, a: Tensor, x: Tensor, bias: Tensor) -> Any:
        return -torch.exp(a) * F.softplus(x + bias)

    def examples(self) -> Any:
        return torch.randn(4), torch.randn(2, 3, 4), torch.randn(4)
