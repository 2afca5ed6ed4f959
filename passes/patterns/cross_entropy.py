"""Cross entropy from logits, without storing the log-probabilities of all classes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.rewrite.patterns.definition import Failure, Match
from fuse.rewrite.patterns.language import const, either, tensor
from fuse.rewrite.patterns.registry import pattern

aten = torch.ops.aten

NONE, MEAN = 0, 1
"""``reduction`` as ATen has it; 2 is the sum."""


@pattern
class CrossEntropy:
    """Softmax with cross entropy: the negative log-likelihood of a log-softmax, as ``F.cross_entropy`` computes it.

    PyTorch writes the log-probabilities of all classes and reads one of each row. Here one kernel reads the logits and
    writes one loss a row, or their mean or sum with that ``reduction``; more than 4,096 rows take a second kernel. If
    the classes are a vocabulary, most of the traffic is the matrix that is not written. ``ignore_index``, ``weight=``
    and dimensions behind the classes (segmentation) are supported.

    A class that does not exist is an error, as in PyTorch. Declined as *used outside* in training, where the backward
    pass reads the log-probabilities, and with ``label_smoothing=``, whose sum reads them. Declined where it was
    measured to be slower: in half precision, where elements would be converted several times, and where the classes
    are the second dimension but the last in memory.

    Source: linkedin/Liger-Kernel, src/liger_kernel/ops/cross_entropy.py.
    """

    def pattern(
        self,
        logits: Tensor = tensor(dtype=(torch.float32, torch.float64)),
        target: Tensor = tensor(dtype=torch.int64),
        weight: Tensor = tensor(None),
    ) -> Any:
        logs = F.log_softmax(logits, dim=1)
        reduction, ignored = const("reduction", MEAN), const("ignored", -100)
        return either(
            lambda: aten.nll_loss_nd(logs, target, None, reduction, ignored),
            lambda: aten.nll_loss_nd(logs, target, weight, reduction, ignored),
            name="weights",
        )

    def check(self, m: Match) -> Failure | None:
        logits = m["logits"].meta["val"]
        if logits.dim() > 2 and logits.stride(1) == 1:
            return m.fail("the classes are the second dimension and lie last in memory", m["logits"])
        return None

    def replace(self, logits: Tensor, target: Tensor, weight: Tensor) -> Any:
        reduction = const("reduction")
        kept = target != const("ignored")
        classes = torch.where(kept, target, 0)
        largest = logits.amax(1)
        chosen = logits.gather(1, classes.unsqueeze(1)).squeeze(1)
        whole = (logits - largest.unsqueeze(1)).exp().sum(1)
        losses = whole.log() - (chosen - largest)
        weights = either(lambda: kept, lambda: torch.where(kept, weight[classes], 0), name="weights")
        losses = torch.where(kept, either(lambda: losses, lambda: losses * weights, name="weights"), 0)
        if reduction == NONE:
            return losses
        return losses.sum() / weights.sum() if reduction == MEAN else losses.sum()

    def examples(self) -> Any:
        return [
            (torch.randn(4, 8), torch.randint(8, (4,)), torch.rand(8)),
            (torch.randn(2, 8, 3, 4), torch.randint(8, (2, 3, 4)), torch.rand(8)),
        ]
