"""What a table of loops is made of: cells, the model that runs them, and what makes near misses of them.

A *cell* is one step of a loop, named with the clauses that it stands for. ``odd`` changes one step of each of its
loops, or makes something of all steps that no loop could be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuse.graph.capture import capture
from fuse.rewrite import registry
from fuse.rewrite.pipeline import run_passes

BATCH, WIDTH = 3, 20
LENGTHS = (9, 19)
SHORT = 6  # one step in the middle that differs leaves no four equal ones on either side
States = tuple[Tensor, ...]
Step = Callable[..., States]

CLAUSES = (
    "several states", "lag of several steps", "swapped states", "states that are results",
    "input at t", "input at t - 1", "input reversed", "input strided", "input by unbind", "input by split",
    "input by chunk", "input by indexing", "input by iteration",
    "affine constants", "looked-up constants", "no input",
    "kept by stack", "kept by cat", "kept in a list", "kept in place", "summed", "only the last",
    "first step peeled", "last step peeled", "period of two",
    "layers in a step", "bidirectional", "stacked", "one after another", "nested",
    "mask by where", "mask by product",
    "argmax fed back", "Viterbi back-pointers", "backward trace by gather",
    "matrix states", "image states", "convolution", "attention", "linalg.solve", "shared weights",
)  # fmt: skip
"""What the prover understands: each has a cell of its own."""


@dataclass(frozen=True)
class Odd:
    """What the step in the middle makes of its states after and before (``once``), or every step of its states.

    ``twice``: the loop runs two copies of itself, side by side, so that any of its states can be swapped.
    """

    once: Callable[[States, States], States] = lambda after, before: after
    always: Callable[[States, int], States] = lambda states, t: states
    twice: bool = False


def _flipped(state: Tensor, shift: int = 0) -> Tensor:
    return state.flatten().roll(shift).flip(0).view_as(state)


def _changed(after: States, before: States) -> States:
    return tuple(torch.sin(s) if s.is_floating_point() else _flipped(s) for s in after)


def _read_again(after: States, before: States) -> States:
    return after[0] + before[0], *after[1:]


def _swapped(after: States, before: States) -> States:
    half = len(after) // 2
    return *after[half:], *after[:half]


def _not_affine(states: States, t: int) -> States:
    return tuple(F.leaky_relu(s, 0.01 * t * t) if s.is_floating_point() else _flipped(s, t * t) for s in states)


ODD = {
    "a body that changes once": Odd(once=_changed),
    "a state read again in one step": Odd(once=_read_again),
    "states swapped at one step": Odd(once=_swapped, twice=True),
    "a constant that is not affine": Odd(always=_not_affine),  # and that no tensor can stand for
}


@dataclass(frozen=True)
class Loops:
    """Runs loops, with what is odd of them."""

    odd: Odd | None = None

    def __call__(self, step: Step, states: States, times: Iterable[int]) -> list[States]:
        """The states after each step; ``step(t, *states)``."""
        order, odd, kept = list(times), self.odd or Odd(), []
        width = len(states)
        if odd.twice:
            states = (*states, *(s + s.new_ones(()) if s.is_floating_point() else _flipped(s) for s in states))
        for number, t in enumerate(order):
            before = states
            states = step(t, *states[:width])
            if odd.twice:  # swapped, two copies that are alike would be two loops still
                states = (
                    *states,
                    *(0.5 * s if s.is_floating_point() else _flipped(s) for s in step(t, *before[width:])),
                )
            if number == len(order) // 2 - 1:
                states = odd.once(states, before)
            states = odd.always(states, t)
            kept.append(states)
        return kept


def stacked(kept: list[States]) -> object:
    return torch.stack([states[0] for states in kept]), *kept[-1]


@dataclass(frozen=True)
class Cell:
    """``step(model, x, t, *states)`` with ``states`` of zeros at first; ``finish`` makes the result of all states.

    ``launches`` are those of a call at any length, with ``each`` of them for every step. ``run(model, x, loops)``,
    where given, calls the loops itself.
    """

    name: str
    clauses: tuple[str, ...]
    launches: int
    step: Step | None = None
    run: Callable[[Model, Tensor, Loops], object] | None = None
    states: int = 1
    finish: Callable[[list[States]], object] = stacked
    times: Callable[[int], Iterable[int]] = range
    prepare: Callable[[Tensor], object] = lambda x: x
    start: Callable[[Tensor], States] | None = None
    each: int = 0
    loops: int = 1


class Model(nn.Module):
    """Runs a cell, with what is odd of it, on ``[time, batch, width]``."""

    def __init__(self, cell: Cell, odd: Odd | None = None) -> None:
        super().__init__()
        self.cell, self.loops = cell, Loops(odd)
        self.inputs = nn.Linear(WIDTH, 4 * WIDTH)
        self.hidden = nn.Linear(WIDTH, 4 * WIDTH)
        self.square, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(2 * WIDTH, WIDTH)
        self.image = nn.Conv2d(2, 2, 3, padding=1)
        self.tokens = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> object:
        if self.cell.run:
            return self.cell.run(self, x, self.loops)
        step, given = self.cell.step, self.cell.prepare(x)
        assert step is not None
        states = self.cell.start(x) if self.cell.start else (zeros(x),) * self.cell.states
        kept = self.loops(lambda t, *s: step(self, given, t, *s), states, self.cell.times(x.shape[0]))
        return self.cell.finish(kept)


CELLS: list[Cell] = []


def cell(launches: int, *clauses: str, **options: object) -> Callable[[Step], Step]:
    """Registers a step."""

    def register(step: Step) -> Step:
        CELLS.append(Cell(step.__name__, clauses, launches, step, **options))
        return step

    return register


def whole(launches: int, *clauses: str, **options: object) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Registers a function of a model, its input, and what runs loops."""

    def register(run: Callable[..., object]) -> Callable[..., object]:
        CELLS.append(Cell(run.__name__, clauses, launches, run=run, **options))
        return run

    return register


def zeros(x: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape or (BATCH, WIDTH), dtype=x.dtype)


def rolled(model: nn.Module, x: Tensor) -> int:
    """How many loops roll."""
    ledger = run_passes(capture(model, (x,)), registry.earlier_than("unused_steps"))
    return sum(one.count for one in ledger.fired if one.pass_name.startswith("roll_"))
