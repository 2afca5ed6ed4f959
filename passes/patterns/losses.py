"""Losses, and sums of exponentials."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.rewrite.patterns.definition import Failure, Match
from fuse.rewrite.patterns.language import const
from fuse.rewrite.patterns.registry import pattern


@pattern(enabled=False)
class LabelSmoothing:
    """Cross entropy of logits with smoothed labels.

    Source: NVIDIA/apex, apex/contrib/xentropy/softmax_xentropy.py.
    """

    def pattern(self, logits: Tensor, target: Tensor) -> Any:
        logs = F.log_softmax(logits, -1)
        loss = -logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return const("kept", 0.9) * loss + const("smoothing", 0.1) * -logs.mean(-1)

    def check(self, m: Match) -> Failure | None:
        rows = m["logits"].meta["val"].shape[:-1] == m["target"].meta["val"].shape
        return None if rows else m.fail("there is not one target for each row", m["target"])

    def replace(self, logits: Tensor, target: Tensor) -> Any:
        largest = logits.amax(-1)
        whole = (logits - largest.unsqueeze(-1)).exp().sum(-1).log() + largest
        chosen = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return const("kept") * (whole - chosen) + const("smoothing") * (whole - logits.mean(-1))

    def examples(self) -> Any:
        return torch.randn(4, 8), torch.randint(8, (4,))


@pattern
class FocalLoss:
    """Focal loss: a binary cross entropy that weights hard examples, written without PyTorch's function for it.

    Source: NVIDIA/apex, apex/contrib/focal_loss/focal_loss.py.
    """

    def pattern(self, logits: Tensor, target: Tensor) -> Any:
        p = torch.sigmoid(logits)
        loss = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return loss * (1 - (p * target + (1 - p) * (1 - target))) ** const("gamma", 2)

    def replace(self, logits: Tensor, target: Tensor) -> Any:
        p = torch.sigmoid(logits)
        loss = (1 - target) * logits - F.logsigmoid(logits)
        return loss * (1 - (p * target + (1 - p) * (1 - target))) ** const("gamma")

    def examples(self) -> Any:
        return torch.randn(4, 8), torch.rand(4, 8).round()


@pattern(enabled=False)
class KlDivergence:
    """target * (log(target) - input), summed by row.

    Source: linkedin/Liger-Kernel, src/liger_kernel/ops/kl_div.py.
    """

    def pattern(self, logs: Tensor, target: Tensor) -> Any:
        return (target * (torch.log(target) - logs)).sum(-1)

    def examples(self) -> Any:
        return torch.randn(4, 8), torch.rand(4, 8)


@pattern(enabled=False)
class JensenShannon:
    """The generalised Jensen-Shannon divergence of two rows of log-probabilities.

    Source: linkedin/Liger-Kernel, src/liger_kernel/ops/jsd.py.
    """

    def pattern(self, x: Tensor, y: Tensor) -> Any:
        p, q = torch.exp(x), torch.exp(y)
        m = torch.log(const("beta", 0.25) * q + const("rest", 0.75) * p)
        return (const("beta", 0.25) * (q * (y - m)) + const("rest", 0.75) * (p * (x - m))).sum(-1)

    def examples(self) -> Any:
        return torch.randn(4, 8).log_softmax(-1), torch.randn(4, 8).log_softmax(-1)


@pattern(enabled=False)
class TotalVariation:
    """Half the sum of the absolute differences of two rows of probabilities.

    Source: linkedin/Liger-Kernel, src/liger_kernel/ops/tvd.py.
    """

    def pattern(self, p: Tensor, q: Tensor) -> Any:
        return 0.5 * torch.abs(p - q).sum(-1)

    def examples(self) -> Any:
        return torch.rand(4, 8), torch.rand(4, 8)


@pattern(enabled=False, finite=True)
class ShiftedLogSumExp:
    """log(sum(exp(x - max(x)))) + max(x) of a row.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/mark_exp_reduceop_to_keep_in_mixed_precision.cpp.
    """

    def pattern(self, x: Tensor) -> Any:
        largest = x.amax(-1, keepdim=True)
        return (torch.log(torch.exp(x - largest).sum(-1, keepdim=True)) + largest).squeeze(-1)

    def replace(self, x: Tensor) -> Any:
        return torch.logsumexp(x, -1)


@pattern(enabled=False)
class GumbelMax:
    """A random draw: the argmax of probabilities divided by exponential noise. The noise is an argument.

    Source: pytorch/pytorch, torch/_inductor/fx_passes/apply_gumbel_max_trick.py.
    """

    def pattern(self, logits: Tensor, noise: Tensor) -> Any:
        return torch.argmax(torch.softmax(logits, -1) / noise, -1)

    def examples(self) -> Any:
        return torch.randn(4, 8), torch.rand(4, 8) + 0.1


@pattern(enabled=False)
class FactorizationMachine:
    """The sum of all products of two fields, as half of a squared sum minus a sum of squares.

    Source: PaddlePaddle/Paddle, paddle/fluid/framework/ir/squared_mat_sub_fuse_pass.cc.
    """

    def pattern(self, fields: Tensor) -> Any:
        return 0.5 * (fields.sum(1).pow(2) - fields.pow(2).sum(1))

    def check(self, m: Match) -> Failure | None:
        return None if m["fields"].meta["val"].dim() == 3 else m.fail("the fields are not [batch, field, factor]")

    def examples(self) -> Any:
        return (torch.randn(4, 5, 8),)
