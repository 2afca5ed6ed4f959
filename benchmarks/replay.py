"""Hold recorded rewrites to what fuel does: deltas 1..k replayed are the graph that ``--fuel k`` gives.

    python -m benchmarks.replay              every model and every loop cell, all k up to 200 and 50 random ones above
    python -m benchmarks.replay models/lstm_loop.py

Exit status 1 where one differs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.fx import GraphModule

from benchmarks.common import ROOT
from fuse.graph.capture import capture
from fuse.graph.loading.load import load
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.recording import PassRecorder
from tests.passes.cells import bodies, results, states
from tests.passes.cells.table import BATCH, CELLS, LENGTHS, WIDTH, Model

ALL_UP_TO, ABOVE = 200, 50
CELLS_OF = (states, results, bodies)
"""Where the cells are: importing these files fills the table."""


def fuels(rewrites: int, all_up_to: int = ALL_UP_TO, above: int = ABOVE, seed: int = 0) -> list[int]:
    """The numbers of rewrites to try: all small ones, and a few of the others.

    >>> fuels(3), len(fuels(1000, all_up_to=10, above=5))
    ([0, 1, 2, 3], 16)
    """
    others = range(all_up_to + 1, rewrites + 1)
    return [*range(min(rewrites, all_up_to) + 1), *sorted(random.Random(seed).sample(others, min(above, len(others))))]


def differing(make: Callable[[], GraphModule], chosen: Callable[[int], Iterable[int]]) -> tuple[int, list[int]]:
    """How many rewrites are made of the graphs of ``make``, and after which of the ``chosen`` a replay differs."""
    graph = make()
    recording = run_passes(graph, record=True).recording
    assert recording is not None
    rewrites = max((delta.number for delta in recording.deltas), default=0)
    wrong = [] if recording.after().text() == PassRecorder(graph).state.text() else [rewrites]
    for fuel in chosen(rewrites):
        stopped = make()
        run_passes(stopped, fuel=fuel)
        if recording.after(fuel).text() != PassRecorder(stopped).state.text():
            wrong.append(fuel)
    return rewrites, wrong


def graphs(targets: Iterable[str]) -> Iterator[tuple[str, Callable[[], GraphModule]]]:
    """Functions that capture each of the models, and with no ``targets`` also each of the cells."""
    named = list(targets)
    for target in named or sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("models/*.py")):
        loaded = load(target, real=False)
        yield target, lambda loaded=loaded: capture(loaded.model, loaded.args, loaded.kwargs)  # type: ignore[misc]
    for cell in [] if named else CELLS:
        model, x = Model(cell).eval(), torch.randn(LENGTHS[0], BATCH, WIDTH)
        yield cell.name, lambda model=model, x=x: capture(model, (x,))  # type: ignore[misc]


def main() -> None:
    failed = False
    for name, make in graphs(sys.argv[1:]):
        rewrites, wrong = differing(make, fuels)
        failed = failed or bool(wrong)
        print(f"{name:32} {rewrites:6,} rewrites, {len(fuels(rewrites)):4} tried: {wrong or 'all equal'}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
