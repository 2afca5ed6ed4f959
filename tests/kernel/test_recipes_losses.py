"""``nll_loss`` in a kernel: every way to reduce, ignored targets, weights of classes, one row or many."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.testing import assert_fuses


class Loss(nn.Module):
    def __init__(self, reduction: str, ignored: int, weight: Tensor | None) -> None:
        super().__init__()
        self.reduction, self.ignored = reduction, ignored
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = F.nll_loss(x, target, self.weight, reduction=self.reduction, ignore_index=self.ignored)
        return torch.exp(-loss)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [None, 1, 7])
def test_a_loss_and_what_follows_are_one_kernel(reduction: str, ignored: int, weighted: bool, rows: int | None) -> None:
    torch.manual_seed(0)
    dtype = torch.float64 if ignored == 2 else torch.float32
    size = () if rows is None else (rows,)
    model = Loss(reduction, ignored, torch.rand(5, dtype=dtype) if weighted else None)
    assert_fuses(model, torch.randn(*size, 5, dtype=dtype), torch.randint(0, 5, size), launches=1)


def test_nothing_but_ignored_targets_gives_no_number() -> None:
    assert_fuses(Loss("mean", 2, None), torch.randn(3, 5), torch.full((3,), 2), launches=1)


def test_half_precision_is_left_to_the_library() -> None:
    assert_fuses(Loss("mean", -100, None), torch.randn(3, 5).bfloat16(), torch.tensor([0, 1, 4]), launches=2)


@pytest.mark.parametrize("target", [5, -1])
def test_a_target_that_is_no_class_raises_what_eager_raises(target: int) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        fuse.compile(Loss("mean", -100, None))(torch.randn(3, 5), torch.tensor([0, target, 4]))
