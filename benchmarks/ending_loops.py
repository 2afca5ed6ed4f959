"""Eight loops in plain Python that end when a condition on tensors says so, eager and fused.

    python -m benchmarks.ending_loops              all, about a minute
    python -m benchmarks.ending_loops greedy       some

Two rounds of calls with another number of steps in each: what ran eager, how many programs are kept, what was launched
(by calls of four steps and more, and by others). Then the times of calls that take as many steps as the one before
(``same``), and of those that never do (``mixed``): processor time of interleaved calls, medians; above 1, fuse is
faster.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse

MOST = 24
"""Steps that any of these loops takes at most."""


class Greedy(nn.Module):
    """A decoder that takes the likeliest token until all sequences have ended; the tokens side by side."""

    def __init__(self, tokens: int = 96, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(tokens, width), nn.GRUCell(width, width)
        self.places, self.out = nn.Embedding(MOST, width), nn.Linear(width, tokens)

    def forward(self, h: Tensor, token: Tensor, end: Tensor) -> Tensor:
        done, tokens = torch.zeros_like(token, dtype=torch.bool), []
        for t in range(MOST):
            h = self.cell(self.embedding(token) + self.places.weight[t], h)
            token = self.out(h).argmax(-1)
            tokens.append(token)
            done = done | (token == end)
            if done.all():
                break
        return torch.stack(tokens, 1)


class FixedPoint(nn.Module):
    """A state that a layer leaves as it is, to a tolerance."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.inner.weight.data *= 0.8 / torch.linalg.matrix_norm(self.inner.weight.data, 2)

    def forward(self, x: Tensor, tolerance: Tensor) -> Tensor:
        outside = self.outer(x)
        z = torch.tanh(outside)
        change = (z - x).norm()
        while change > tolerance:
            following = torch.tanh(self.inner(z) + outside)
            change = (following - z).norm()
            z = following
        return z


class PowerIteration(nn.Module):
    """The largest eigenvalue of a matrix, and its vector."""

    def forward(self, matrix: Tensor, v: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(MOST):
            following = matrix @ v
            following = following / following.norm()
            change = (following - v).abs().max()
            v = following
            if change < tolerance:
                break
        return v @ (matrix @ v), v


class Newton(nn.Module):
    """Cube roots by Newton's method, as long as one of them is not exact enough."""

    def forward(self, x: Tensor, tolerance: Tensor) -> Tensor:
        y = x.abs().clamp(min=1.0)
        while ((y * y * y / x - 1).abs() > tolerance).any():
            y = y - (y * y * y - x) / (3 * y * y)
        return y


class AdaptiveTime(nn.Module):
    """Adaptive computation time (Graves, 2016): each row ponders until its probabilities of halting add up to one."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.cell, self.halting = nn.GRUCell(width, width), nn.Linear(width, 1)

    def forward(self, x: Tensor, h: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        total, mean = torch.zeros_like(x[:, :1]), torch.zeros_like(h)
        steps = torch.zeros_like(total)
        for _ in range(MOST):
            h = self.cell(x, h)
            p = torch.sigmoid(self.halting(h)) * 0.3
            p = torch.where(total + p > bound, 1 - total, p) * (total < bound)
            mean, total, steps = mean + p * h, total + p, steps + (p > 0)
            if not (total < bound).any():
                break
        return mean, steps


class Frames(nn.Module):
    """A decoder of frames (such as of speech) that says itself when it has ended: the frames, and how many."""

    def __init__(self, width: int = 32, frame: int = 20) -> None:
        super().__init__()
        self.frame = frame
        self.cell, self.out, self.stop = nn.LSTMCell(frame, width), nn.Linear(width, frame), nn.Linear(width, 1)

    def forward(self, h: Tensor, c: Tensor, bound: Tensor) -> tuple[Tensor, int]:
        frame, frames = torch.zeros_like(h[:, : self.frame]), []
        while len(frames) < MOST:
            h, c = self.cell(frame, (h, c))
            frame = self.out(h)
            frames.append(frame)
            if torch.sigmoid(self.stop(c)).min() > bound:
                break
        return torch.stack(frames, 1), len(frames)


class Active(nn.Module):
    """A recurrent network over sequences of several lengths, until none has a step left."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(len(x)):
            active = lengths > t
            if not active.any():
                break
            h = torch.where(active[:, None], self.cell(x[t], h), h)
        return h


class Settling(nn.Module):
    """A recurrent cell that runs on until its state stops moving: the state, and after how many steps."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor, h: Tensor, tolerance: Tensor) -> tuple[Tensor, int]:
        steps = 0
        for _ in range(MOST):
            steps += 1
            following = self.cell(x, h)
            moved = (following - h).abs().max()
            h = following
            if moved < tolerance:
                break
        return h, steps


@dataclass(frozen=True)
class Case:
    """A loop; ``bound`` is the argument (the last) that decides how many steps it takes: ``candidates`` are tried, of a
    call with ``arguments`` before it. ``fewest``: 1 where a step always runs."""

    make: Callable[[], nn.Module]
    arguments: Callable[[int], tuple[Tensor, ...]]
    candidates: Callable[[], Iterable[Tensor]]
    fewest: int


def _powers(first: float, last: float, count: int) -> Sequence[Tensor]:
    return list(torch.logspace(first, last, count))


def _two_states(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 32), torch.randn(batch, 32)


CASES: dict[str, Case] = {
    "greedy": Case(
        Greedy,
        lambda batch: (torch.randn(batch, 32), torch.arange(batch) % 7),
        lambda: torch.arange(96),
        1,
    ),
    "fixed_point": Case(FixedPoint, lambda batch: (torch.randn(batch, 32),), lambda: _powers(2, -4, 120), 0),
    "power": Case(
        PowerIteration,
        lambda batch: (torch.randn(24, 24).abs() + 8 * torch.eye(24), F.normalize(torch.rand(24), dim=0)),
        lambda: _powers(1, -5, 120),
        1,
    ),
    "newton": Case(Newton, lambda batch: (torch.rand(batch, 64) * 1e5 + 10,), lambda: _powers(11, -3, 120), 0),
    "adaptive": Case(
        AdaptiveTime,
        _two_states,
        lambda: torch.linspace(0.02, 2.6, 100),
        1,
    ),
    "frames": Case(Frames, _two_states, lambda: torch.linspace(0.2, 0.8, 200), 1),
    "active": Case(
        Active,
        lambda batch: (torch.randn(MOST, batch, 32),),
        lambda: torch.arange(MOST)[:, None],
        0,
    ),
    "settling": Case(Settling, _two_states, lambda: _powers(1, -4, 120), 1),
}


@contextlib.contextmanager
def _truths() -> Iterator[list[Tensor]]:
    """The tensors whose truth is asked: one in each step, and one more where that is before the step."""
    asked, original = [], Tensor.__bool__

    def noted(tensor: Tensor) -> bool:
        asked.append(tensor)
        return original(tensor)

    Tensor.__bool__ = noted  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        Tensor.__bool__ = original  # type: ignore[method-assign]


def calls(case: Case, model: nn.Module, batch: int = 1, seeds: int = 4) -> dict[int, tuple[Any, ...]]:
    """Arguments of calls by the steps that they take; of the numbers from the fewest on as many as are found."""
    found: dict[int, tuple[Any, ...]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        arguments = case.arguments(batch)
        for bound in case.candidates():
            with torch.no_grad(), _truths() as asked:
                model(*arguments, bound)
            found.setdefault(len(asked) - (1 - case.fewest), (*arguments, bound))
    return dict(sorted(found.items()))


def main(names: Sequence[str]) -> None:
    print(
        f"{'loop':<12} {'steps':>18} {'eager':>6} {'programs':>9} "
        f"{'launches':>9} {'below 4':>8} {'same':>6} {'mixed':>6}"
    )
    for name in names or CASES:
        case = CASES[name]
        torch.manual_seed(0)
        model = case.make().eval()
        made = calls(case, model)
        print(f"{name:<12} {_short(made):>18} {_measured(model, made)}", flush=True)


def _short(numbers: Iterable[int]) -> str:
    """Numbers, with those between left out."""
    given = sorted(numbers)
    gaps = [n for n in range(given[0], given[-1]) if n not in given]
    return f"{given[0]} to {given[-1]}" + (f" but for {len(gaps)}" if gaps else "")


def _between(counts: Iterable[int]) -> str:
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least} to {most}"


def _measured(model: nn.Module, made: dict[int, tuple[Any, ...]]) -> str:
    fused = fuse.compile(model)
    eager, launches = 0, dict[int, int]()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            for number, args in made.items():
                torch.testing.assert_close(fused(*args), model(*args), rtol=1e-3, atol=1e-3)
                eager += bool(fused.last_run.fallbacks)
                launches[number] = fused.last_run.launches
        same = statistics.median(_ratio(model, fused, [args]) for number, args in made.items() if number >= 4)
        mixed = _ratio(model, fused, [*made.values()][::2] + [*made.values()][1::2])
    programs = sum(len(state.variants) for state in fused._own()._known.states)
    many, few = ({launches[n] for n in made if (n >= 4) is wanted} for wanted in (True, False))
    counts = f"{_between(many):>9} {_between(few):>8}"
    return f"{eager:>6} {programs:>9} {counts} {same:>6.2f} {mixed:>6.2f}"


def _ratio(model: nn.Module, fused: nn.Module, series: Sequence[tuple[Any, ...]]) -> float:
    """How many times as fast fused calls are as eager ones; both make the same calls in turn."""
    ratios = []
    for _ in range(max(3, 40 // len(series))):
        times = []
        for one in (model, fused):
            began = time.process_time()
            for args in series:
                one(*args)
            times.append(time.process_time() - began)
        ratios.append(times[0] / times[1])
    return statistics.median(ratios)


if __name__ == "__main__":
    main(sys.argv[1:])
