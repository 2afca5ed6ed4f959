"""Small loops in plain Python whose steps call operators of a library, eager and fused, in one process.

    python -m benchmarks.library_loops             all, half a minute
    python -m benchmarks.library_loops sorted qr   some

Eight steps on a few hundred elements: what is measured is what a call costs beside the operators' own work. Processor
time of interleaved calls, medians; above 1, fuse is faster.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse

STEPS = 8
SECONDS = 0.5
Step = Callable[[Tensor, Tensor, Tensor], Tensor]

WHERE, GROUPS = torch.arange(24) % 10, torch.arange(32).repeat(10, 1) % 8


def best_of_pairs(h: Tensor, x: Tensor) -> Tensor:
    return torch.topk((h[:, :4, None] + x[:, None, :]).flatten(1), 4).values


def filtered(p: Tensor, w: Tensor) -> Tensor:
    """The covariance of a Kalman filter."""
    p = w @ p @ w.mT + torch.eye(len(p))
    gain = torch.linalg.solve(p + torch.eye(len(p)), p).mT
    return p - gain @ p


def spread(h: Tensor, w: Tensor) -> Tensor:
    """Messages along the edges of a graph."""
    return h + torch.zeros_like(h).index_add(0, WHERE, torch.tanh(h[WHERE] @ w)) * 0.1


# a step gives the next state of the state, its input and a weight, all of them [10, 32] or square
CASES: dict[str, tuple[Step, tuple[int, int]]] = {
    "sorted": (lambda h, x, w: torch.sort(torch.cumsum(x + 0.1 * h, -1), -1).values, (10, 32)),
    "topk": (lambda h, x, w: torch.tanh(h - torch.topk(h + x, 4).values.sum(-1, keepdim=True)), (10, 32)),
    "beam": (lambda h, x, w: best_of_pairs(h, x), (10, 4)),
    "index_add": (lambda h, x, w: spread(h, w), (10, 32)),
    "gather": (lambda h, x, w: torch.tanh(x.gather(-1, h.argsort(-1)) + h), (10, 32)),
    "scatter_add": (lambda h, x, w: h.scatter_add(-1, h.argmax(-1, keepdim=True), x[:, :1]), (10, 32)),
    "scatter_reduce": (
        lambda h, x, w: torch.zeros(10, 8).scatter_reduce(
            -1, GROUPS, torch.tanh(h.repeat(1, 4) + x.repeat(1, 4)), "amax"
        ),
        (10, 8),
    ),
    "median": (lambda h, x, w: torch.tanh(h - h.median(-1, keepdim=True).values + x), (10, 32)),
    "logcumsumexp": (lambda h, x, w: torch.logcumsumexp(h + x, -1) - 1, (10, 32)),
    "fft": (lambda h, x, w: F.pad(torch.fft.rfft(h).abs(), (0, 15)) + x, (10, 32)),
    "conv1d": (lambda h, x, w: torch.tanh(F.conv1d(h, w[:10, :10, None]) + x), (10, 32)),
    "conv_transpose1d": (lambda h, x, w: torch.tanh(F.conv_transpose1d(h, w[:10, :10, None]) + x), (10, 32)),
    "einsum": (lambda h, x, w: torch.tanh(torch.einsum("ij,kj,kl->il", h, x, w[:10])), (10, 32)),
    "cdist": (lambda h, x, w: h + torch.softmax(-torch.cdist(h, x), -1) @ x, (10, 32)),
    "solve": (lambda h, x, w: torch.tanh(torch.linalg.solve(x + 3 * torch.eye(6), h)), (6, 6)),
    "kalman": (lambda h, x, w: filtered(h, w), (4, 4)),
    "cholesky": (lambda h, x, w: torch.linalg.cholesky(h @ h.mT + torch.eye(6)) + x, (6, 6)),
    "qr": (lambda h, x, w: torch.linalg.qr(h + x).Q, (6, 6)),
    "inverse": (lambda h, x, w: torch.linalg.inv(h * 0.1 + 3 * torch.eye(4)) + x, (4, 4)),
}


class Loop(nn.Module):
    """A state that ``step`` makes anew, ``STEPS`` times."""

    def __init__(self, step: Step, shape: tuple[int, int]) -> None:
        super().__init__()
        self.step = (step,)
        self.weight = nn.Parameter(torch.randn(shape[1], shape[1]) * 0.2)

    def forward(self, xs: Tensor) -> Tensor:
        h = xs[0]
        for x in xs[1:]:
            h = self.step[0](h, x, self.weight)
        return h


def measured(name: str) -> tuple[float, float, int]:
    """Microseconds of a call, eager and fused, and the launches of the latter."""
    torch.manual_seed(0)
    step, shape = CASES[name]
    model, xs = Loop(step, shape), torch.randn(STEPS + 1, *shape)
    fused = fuse.compile(model)
    taken: dict[nn.Module, list[float]] = {model: [], fused: []}
    torch.testing.assert_close(fused(xs), model(xs), atol=1e-4, rtol=1e-3)
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        for one in (model, fused, fused, model):
            started = time.process_time()
            one(xs)
            taken[one].append(time.process_time() - started)
    eager, own = (1e6 * statistics.median(times[4:]) for times in taken.values())
    return eager, own, fused.last_run.launches


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in CASES]:
        sys.exit(f"no loop {unknown[0]!r}; there are {', '.join(CASES)}")
    ratios = []
    with torch.no_grad():
        for name in names or list(CASES):
            eager, own, launches = measured(name)
            ratios.append(eager / own)
            print(
                f"{name:18} eager {eager:6.0f} us   fuse {own:6.0f} us   ratio {ratios[-1]:5.2f}   {launches} launches"
            )
    print(f"geometric mean {statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
