"""Networks that shrink images of any height and width, and enlarge them again: captured and compiled at few sizes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.graph.capture import capture
from fuse.kernel.sizes.region_text import text_and_numbers
from fuse.runtime.sizes.other_remainders import other_remainders
from fuse.runtime.sizes.varying import VaryingSize
from tests.fuzz.sizes import infer
from tests.runtime.test_reaching import captures  # noqa: F401  (a fixture)

Joined = Callable[[Tensor, Tensor], Tensor]


class UNet(nn.Module):
    """Twice down by ``down``, twice up again; what comes up is ``fitted`` to what it is joined with."""

    def __init__(self, fitted: Joined, strided: bool = False, up: bool = True) -> None:
        super().__init__()
        self.fitted, self.up = fitted, up
        self.first, self.second, self.third = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 6), (6, 8)))
        self.ups = nn.ModuleList([nn.ConvTranspose2d(8, 6, 2, 2), nn.ConvTranspose2d(6, 4, 2, 2)])
        self.narrow = nn.Conv2d(8, 6, 1)
        self.joined = nn.ModuleList([nn.Conv2d(12, 6, 3, padding=1), nn.Conv2d(8 if up else 10, 4, 3, padding=1)])
        self.downs = nn.ModuleList([nn.Conv2d(n, n, 3, 2, 1) if strided else nn.MaxPool2d(2) for n in (4, 6)])

    def forward(self, x: Tensor) -> Tensor:
        one = torch.relu(self.first(x))
        two = torch.relu(self.second(self.downs[0](one)))
        y = torch.relu(self.third(self.downs[1](two)))
        y = self.ups[0](y) if self.up else self.narrow(y)
        y = torch.relu(self.joined[0](torch.cat([two, self.fitted(y, two)], 1)))
        y = self.ups[1](y) if self.up else y
        return torch.tanh(self.joined[1](torch.cat([one, self.fitted(y, one)], 1)))


def padded(x: Tensor, to: Tensor) -> Tensor:
    high, wide = to.size(2) - x.size(2), to.size(3) - x.size(3)
    return F.pad(x, [wide // 2, wide - wide // 2, high // 2, high - high // 2])


def cropped(x: Tensor, to: Tensor) -> Tensor:
    return x[:, :, : to.shape[2], : to.shape[3]]


def enlarged(x: Tensor, to: Tensor) -> Tensor:
    return F.interpolate(x, size=to.shape[-2:], mode="bilinear", align_corners=False)


@pytest.mark.parametrize(
    "model",
    [lambda: UNet(padded), lambda: UNet(cropped, strided=True), lambda: UNet(enlarged, up=False)],
    ids=["padded", "cropped", "enlarged"],
)
def test_a_u_net_is_captured_and_compiled_at_few_sizes(
    model: Callable[[], nn.Module],
    captures: list[tuple[int, ...]],  # noqa: F811
    empty_cache: Path,
    compiled_sources: list[str],
) -> None:
    torch.manual_seed(0)
    made, draw, compiled = model().eval(), random.Random(0), 0
    double, fused = copy.deepcopy(made).double(), fuse.compile(made)
    for _ in range(24):
        before = len(compiled_sources)
        infer(made, double, fused, torch.randn(2, 3, draw.randint(24, 96), draw.randint(24, 96)))
        compiled += len(compiled_sources) > before
        assert not fused.last_run.fallbacks
    assert compiled <= 4
    assert len(captures) <= 12  # with those of made-up calls


def test_a_width_of_zero_may_be_another_one_at_other_sizes() -> None:
    def spelled(width: int) -> tuple[str, tuple[int, ...]]:
        graph = capture(Padded(width), (torch.randn(5, 7),), {})
        return text_and_numbers(graph, lambda node: "")

    (text, zero), (other, two) = spelled(0), spelled(2)
    assert text == other
    assert min(b for a, b in zip(zero, two, strict=True) if a != b) >= 2


class Padded(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self.width))


def test_made_up_sizes_leave_other_remainders_at_each_halving() -> None:
    down, up = other_remainders([VaryingSize(29, (73,), ()), VaryingSize(57, (77,), ())])
    for made, size in zip(down, (29, 57), strict=True):
        assert all((made >> bit) % 2 != (size >> bit) % 2 for bit in range(5))
    for made, size in zip(up, (29, 57), strict=True):
        assert all(((made - 1) >> bit) % 2 != ((size - 1) >> bit) % 2 for bit in range(5))
