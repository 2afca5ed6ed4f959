"""What operators are known to allocate inside themselves is what they do allocate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.cost.allocated import peak_allocated
from fuse.cost.inside import inside_bytes


class Called(nn.Module):
    """``inner`` between operators that are kernels."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.sin(x)))


def encoder(hidden: int, norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, hidden, batch_first=True, norm_first=norm_first)


CASES = {
    "an encoder layer": (encoder(128, False), (4, 48, 64)),
    "an encoder layer, the norm first": (encoder(128, True), (4, 48, 64)),
    "an encoder layer, much hidden": (encoder(1024, True), (4, 48, 64)),
    "a transposed convolution": (nn.ConvTranspose2d(32, 16, 2, stride=2), (1, 32, 40, 48)),
    "transposed convolutions of a batch": (nn.ConvTranspose2d(16, 8, 2, stride=2), (3, 16, 20, 24)),
}


@pytest.mark.parametrize(("inner", "shape"), CASES.values(), ids=CASES)
def test_what_a_call_allocates_is_predicted(inner: nn.Module, shape: tuple[int, ...]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, oneDNN holds scratch memory for each
    try:
        assert_predicted(Called(inner).eval(), torch.randn(shape))
    finally:
        torch.set_num_threads(before)


def assert_predicted(model: nn.Module, x: Tensor) -> None:
    predicted = fuse.show(model, (x,))
    fused = fuse.compile(model)
    inputs = sum(t.numel() * t.itemsize for t in (x, *model.parameters()))
    with torch.no_grad():
        model(x)
        fused(x)
        assert fused.compiled is not None
        fused.compiled.program.forget_workspaces()
        before, after = peak_allocated(lambda: model(x)), peak_allocated(lambda: fused(x))
    assert predicted.before.peak_bytes == pytest.approx(inputs + before, rel=0.05)
    assert predicted.after.peak_bytes == pytest.approx(inputs + after, rel=0.05)


def test_the_slow_way_of_small_images_is_not_taken_for_onednn() -> None:
    x, weight, result = torch.ones(1, 8, 5, 5), torch.ones(8, 3, 2, 2), torch.ones(1, 3, 10, 10)
    args = (x, weight, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    assert inside_bytes(torch.ops.aten.convolution.default, args, result) == 0
