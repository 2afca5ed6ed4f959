"""Cross entropy from logits without the log-probabilities of the other classes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.rewrite.patterns.language import const, either, tensor
from fuse.rewrite.patterns.registry import pattern


@pattern
class CrossEntropy:
    """Softmax with cross entropy: the negative log-likelihood of a log-softmax, as ``F.cross_entropy`` computes it.

    PyTorch writes the log-probabilities of all classes and reads one of each row. Here one kernel reads the logits and
    writes one loss a row; with ``reduction="mean"`` or ``"sum"`` a second one reduces those. With a vocabulary of
    classes the matrix that is not written is most of the traffic.

    A class that does not exist is an error, as in PyTorch. In training the backward pass reads the log-probabilities,
    and the pattern declines: *used outside*. Declined in half precision, which PyTorch computes in float32 inside.
    """

    def pattern(
        self, logits: Tensor = tensor(None, None, dtype=(torch.float32, torch.float64)), target: Tensor = tensor(None)
    ) -> Any:
        logs = F.log_softmax(logits, dim=1)
        return either(
            lambda: F.nll_loss(logs, target, ignore_index=const("ignored", -100), reduction="none"),
            lambda: F.nll_loss(logs, target, ignore_index=const("ignored", -100), reduction="sum"),
            lambda: F.nll_loss(logs, target, ignore_index=const("ignored", -100), reduction="mean"),
            name="reduction",
        )

    def replace(self, logits: Tensor, target: Tensor) -> Any:
        kept = target != const("ignored")
        largest = logits.amax(1)
        chosen = logits.gather(1, torch.where(kept, target, 0)[:, None])[:, 0]
        whole = (logits - largest[:, None]).exp().sum(1)
        losses = torch.where(kept, whole.log() - (chosen - largest), 0)
        return either(lambda: losses, lambda: losses.sum(), lambda: losses.sum() / kept.sum(), name="reduction")

    def examples(self) -> Any:
        return torch.randn(4, 8), torch.randint(8, (4,))
