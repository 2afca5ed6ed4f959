"""Nets of random layers that make sizes of their own, at many random sizes: right? ``python -m tests.fuzz.layers``.

    convolutions with strides, paddings and dilations, transposed ones, pools, windows, every other element, halves,
    images twice or half as high, paddings to whole windows, chunks, U-Nets, attention, loops over what is left

Each net is called with 30 random sizes, every new one captured at once. Results, layouts and gradients are held to
eager. One net: ``python -m tests.fuzz.layers --first 17 --nets 1``.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.runtime.sizes import patience

CHANNELS = 6
CALLS = 30
Layer = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]


def _convolution(draw: random.Random, dimensions: int) -> Layer:
    taps = draw.choice((1, 2, 3, 5))
    padding = draw.choice((0, 1, 2)) if taps > 2 else 0
    of = (nn.Conv1d, nn.Conv2d)[dimensions - 1]
    made = of(CHANNELS, CHANNELS, taps, stride=draw.choice((1, 2, 3)), padding=padding, dilation=draw.choice((1, 2)))
    return made, lambda m, x: m(x)


def _transposed(draw: random.Random, dimensions: int) -> Layer:
    of = (nn.ConvTranspose1d, nn.ConvTranspose2d)[dimensions - 1]
    made = of(CHANNELS, CHANNELS, draw.choice((2, 3, 4)), stride=draw.choice((1, 2)), padding=draw.choice((0, 1)))
    return made, lambda m, x: m(x)


def _skip(draw: random.Random, dimensions: int) -> Layer:
    made = (nn.Conv1d, nn.Conv2d)[dimensions - 1](CHANNELS, CHANNELS, 3, stride=2, padding=1)
    return made, lambda m, x: x + F.interpolate(m(x), size=x.shape[2:])


class _Unet(nn.Module):
    """Half as many positions and back, cut to the size that there was."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        down, up = ((nn.Conv1d, nn.ConvTranspose1d), (nn.Conv2d, nn.ConvTranspose2d))[dimensions - 1]
        self.down, self.up = down(CHANNELS, CHANNELS, 3, 2, 1), up(CHANNELS, CHANNELS, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.up(torch.relu(self.down(x)))
        return x + found[(..., *(slice(size) for size in x.shape[2:]))]


def _unet(draw: random.Random, dimensions: int) -> Layer:
    return _Unet(dimensions), lambda m, x: m(x)


def _cut(draw: random.Random, dimensions: int) -> Layer:
    made = (nn.Conv1d, nn.Conv2d)[dimensions - 1](CHANNELS, CHANNELS, draw.choice((2, 3)), stride=draw.choice((2, 3)))
    return made, lambda m, x: x[..., : m(x).shape[-1]] * 2


def _chunk(draw: random.Random, dimensions: int) -> Layer:
    count, place = draw.choice((2, 3, 4)), draw.choice((0, -1))
    return nn.Identity(), lambda m, x: x.chunk(count, -1)[place] * 2


def _swin(draw: random.Random, dimensions: int) -> Layer:
    size = draw.choice((3, 4, 5))

    def windows(m: nn.Module, x: Tensor) -> Tensor:
        steps = x.shape[-1]
        padded = F.pad(x, (0, (size - steps % size) % size))
        parts = padded.unflatten(-1, (padded.shape[-1] // size, size)).softmax(-1)
        return parts.flatten(-2)[..., :steps]

    return nn.Identity(), windows


def _max_pool(draw: random.Random, dimensions: int) -> Layer:
    taps, stride, padding = draw.choice((2, 3)), draw.choice((None, 1, 2)), draw.choice((0, 1))
    pool = (F.max_pool1d, F.max_pool2d)[dimensions - 1]
    return nn.Identity(), lambda m, x: pool(x, taps, stride, padding)


def _pool_rounding_up(draw: random.Random, dimensions: int) -> Layer:
    pool = (F.max_pool1d, F.max_pool2d)[dimensions - 1]
    return nn.Identity(), lambda m, x: pool(x, 2, 2, ceil_mode=True)


def _mean_pool(draw: random.Random, dimensions: int) -> Layer:
    pool, taps = (F.avg_pool1d, F.avg_pool2d)[dimensions - 1], draw.choice((2, 3))
    return nn.Identity(), lambda m, x: pool(x, taps, 2)


def _slice(draw: random.Random, dimensions: int) -> Layer:
    start, step = draw.choice((0, 1)), draw.choice((1, 2, 3))
    return nn.Identity(), lambda m, x: x[..., start::step]


def _windows(draw: random.Random, dimensions: int) -> Layer:
    size, step = draw.choice(((4, 2), (3, 1), (4, 4), (5, 3)))
    return nn.Identity(), lambda m, x: x.unfold(-1, size, step).mean(-1)


def _padded_windows(m: nn.Module, x: Tensor) -> Tensor:
    steps = x.shape[-1]
    parts = F.pad(x, (0, -steps % 4)).unflatten(-1, (-1, 4))
    return (parts - parts.mean(-1, keepdim=True)).flatten(-2)[..., :steps]


def _attention(m: nn.Module, x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    return (torch.softmax(tokens @ tokens.transpose(1, 2), -1) @ tokens).transpose(1, 2).reshape(x.shape)


def _loop(m: nn.Module, x: Tensor) -> Tensor:
    state, states = x.new_zeros(x.shape[:-1]), []
    for step in range(x.shape[-1]):
        state = torch.tanh(x[..., step] + 0.5 * state)
        states.append(state)
    return torch.stack(states, -1)


_PLAIN: tuple[Callable[[nn.Module, Tensor], Tensor], ...] = (
    _padded_windows,
    _attention,
    _loop,
    lambda m, x: F.gelu(x),
    lambda m, x: F.group_norm(x, 3),
    lambda m, x: x - x.mean(-1, keepdim=True),
    lambda m, x: x * torch.arange(x.shape[-1], dtype=x.dtype),
    lambda m, x: torch.cat([x, x[..., ::2]], -1),
    lambda m, x: x.chunk(2, -1)[0] * 2,
    lambda m, x: x[..., : x.shape[-1] // 2 + 1],
    lambda m, x: x[..., : (x.shape[-1] + 1) // 2] + x[..., x.shape[-1] // 2 :],
    lambda m, x: F.pad(x, (1, 2)),
    lambda m, x: F.interpolate(x, scale_factor=2),
    lambda m, x: F.interpolate(x, scale_factor=0.5),
)
_DRAWN = (_convolution, _transposed, _skip, _max_pool, _pool_rounding_up, _mean_pool, _slice, _windows)
_DRAWN += (_unet, _cut, _chunk, _swin)


class Net(nn.Module):
    """Two to five layers for an input [batch, 6, length] or [batch, 6, height, width]."""

    def __init__(self, draw: random.Random, dimensions: int) -> None:
        super().__init__()
        layers = [
            draw.choice(_DRAWN)(draw, dimensions) if draw.random() < 0.55 else (nn.Identity(), draw.choice(_PLAIN))
            for _ in range(draw.randint(2, 5))
        ]
        self.modules_of_layers = nn.ModuleList(module for module, _ in layers)
        self.functions = [function for _, function in layers]

    def forward(self, x: Tensor) -> Tensor:
        for module, function in zip(self.modules_of_layers, self.functions, strict=True):
            x = function(module, x)
        return x


def _gradients(result: Tensor, x: Tensor, net: nn.Module) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(result.square().sum(), [x, *net.parameters()], allow_unused=True)


def first_wrong(seed: int, calls: int = CALLS) -> str | None:
    """The first call of the net with this seed that differs from eager; None if there is none."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dimensions, training = draw.choice((1, 1, 2)), draw.random() < 0.3
    net = Net(draw, dimensions).train(training)
    fused = fuse.compile(net)
    for call in range(calls):
        space = [draw.randint(*((8, 70) if dimensions == 1 else (6, 36))) for _ in range(dimensions)]
        x = torch.randn(draw.choice((1, 2, 3, 4, 5, 7, 8)), CHANNELS, *space, requires_grad=training)
        with torch.set_grad_enabled(training):
            try:
                eager = net(x)
            except RuntimeError:  # a window is larger than what is left
                continue
            result = fused(x)
            name = f"net {seed}, call {call} of {list(x.shape)}"
            if result.stride() != eager.stride() or not torch.allclose(result, eager, rtol=1e-3, atol=2e-4):
                return f"{name}: another result"
            for mine, own in (
                zip(_gradients(result, x, net), _gradients(eager, x, net), strict=True) if training else ()
            ):
                close = (
                    mine is None or own is None or torch.allclose(mine, own, 1e-2, 1e-2 * (1 + float(own.abs().max())))
                )
                if (mine is None) != (own is None) or not close:
                    return f"{name}: another gradient"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.layers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="seed of the first net")
    parser.add_argument("--nets", type=int, default=50)
    chosen = parser.parse_args(arguments)
    for several in ("SETTLED", "SETTLED_UNLIKE", "AT_ONCE"):
        setattr(patience, several, 1_000_000)
    warnings.simplefilter("ignore")
    wrong = [found for seed in range(chosen.first, chosen.first + chosen.nets) if (found := first_wrong(seed))]
    print("\n".join(wrong) or f"{chosen.nets} nets right")
    return len(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
