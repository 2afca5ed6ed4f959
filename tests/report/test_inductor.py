"""The launches of ``torch.compile`` are counted in code that its compiler really generates."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile

from fuse.report.timing.inductor import generated_code, launches_in


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.gelu(self.layer(x))  # addmm, a kernel
        return torch.sort(y)[0], torch.linalg.solve(y @ y.t() + torch.eye(4), y)  # sort, a kernel, mm, solve


def test_kernels_libraries_and_operators_count_and_views_do_not() -> None:
    torch._dynamo.reset()
    quick = mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *_: None)
    with torch.no_grad(), quick, torch._inductor.config.patch(force_disable_caches=True), generated_code() as wrappers:
        torch.compile(Model())(torch.randn(4, 8))
    assert len(wrappers) == 1
    assert launches_in(wrappers) in (5, 6)  # Inductor may add the unit matrix in the library's call
    assert launches_in(wrappers * 2) == 2 * launches_in(wrappers)
