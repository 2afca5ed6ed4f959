"""What fake tensors are told about norms in mixed precision is what real ones are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fuse
from fuse.testing import assert_fuses

NORMS = {
    "batch norm": lambda: (nn.BatchNorm1d(8), (6, 8)),
    "batch norm without weights": lambda: (nn.BatchNorm1d(8, affine=False), (6, 8)),
    "batch norm without statistics": lambda: (nn.BatchNorm1d(8, track_running_stats=False), (6, 8)),
    "layer norm": lambda: (nn.LayerNorm(8), (6, 8)),
    "group norm": lambda: (nn.GroupNorm(2, 8), (6, 8, 3)),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("train", [True, False])
def test_norms_of_half_precision_with_weights_in_float32_train(name: str, dtype: torch.dtype, train: bool) -> None:
    model, shape = NORMS[name]()
    model.train(train)
    x = torch.randn(shape).to(dtype)
    eager = copy.deepcopy(model)
    fused = fuse.compile(model)
    given = [x.clone().requires_grad_() for _ in range(2)]
    results = [run(a) for run, a in zip((fused, eager), given, strict=True)]
    for result in results:
        (result.float() ** 2 * torch.arange(1, 9).view(-1, *[1] * (x.dim() - 2))).sum().backward()
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=4e-2, atol=4e-2)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-2, atol=2e-2)
    assert fused.last_run.fallbacks == ()
    assert fused.last_run.backward.fallbacks == ()


def test_statistics_are_kept_in_float32() -> None:
    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found: tuple[torch.Tensor, ...] = torch.native_layer_norm(x, [8], self.weight, None, 1e-5)
            return found

    assert_fuses(Statistics(), torch.randn(6, 8).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_with_all_in_half_precision_trains(dtype: torch.dtype) -> None:
    model = nn.BatchNorm1d(8).to(dtype)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    eager = copy.deepcopy(model)
    given = [x.clone().requires_grad_() for _ in range(2)]
    for run, a in zip((fuse.compile(model), eager), given, strict=True):
        run(a).float().tanh()[:, ::2].sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=4e-2, atol=4e-2)
    for mine, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
