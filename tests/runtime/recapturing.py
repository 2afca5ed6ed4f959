"""Calls of one model at several lengths, for tests of which graphs these share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

import fuse


def recaptured(model: nn.Module, lengths: Iterable[int], *sizes: int) -> int:
    """How many calls of a model at these lengths, and ``sizes`` besides, are captured again. Each has eager's
    result."""
    fused, captured = fuse.compile(model), 0
    with torch.no_grad():
        for length in lengths:
            x = torch.randn(length, *sizes)
            torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
            captured += bool(fused.last_run.recaptured)
    return captured
