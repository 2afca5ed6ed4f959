"""How many times a call a training step takes: all loops of ``models/`` and the loops that the tests are a table of.

    python -m benchmarks.training_steps                      all
    python -m benchmarks.training_steps crf wkv nested       some models or cells

``call`` is inference: nothing records gradients. ``step`` is forward and backward of the sum of all results, no
optimizer. One thread, processor time, a call and a step in turns; eager's own ratio stands beside fuse's. Models run at
the sizes of their files, cells for 64 steps.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fuse
from benchmarks.common import RESULTS, ROOT, save
from fuse.graph.capture import capture
from fuse.graph.loading.load import load
from fuse.rewrite.pipeline import run_passes
from tests.passes.cells import bodies, results, states
from tests.passes.cells.table import BATCH, CELLS, WIDTH, Model

CELLS_OF = (states, results, bodies)
"""Where the cells are: importing these files fills the table."""
STEPS = 64
SECONDS = 1.0
LEAST_ROUNDS = 10

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def targets() -> Iterator[tuple[str, Callable[[], Made]]]:
    """The loops, by name."""
    for path in sorted((ROOT / "models").glob("*.py")):
        yield f"models/{path.name}", lambda path=path: of_file(str(path))
    for cell in CELLS:
        yield f"cell {cell.name}", lambda cell=cell: (Model(cell), (torch.randn(STEPS, BATCH, WIDTH),), {})


def of_file(path: str) -> Made:
    loaded = load(path, real=True, train=True)
    return loaded.model, loaded.args, loaded.kwargs


def rolls(made: Made) -> bool:
    """Whether the call holds loops that are rolled."""
    ledger = run_passes(capture(*made))
    return any(one.pass_name.startswith("roll_") for one in ledger.fired)


def call_of(model: nn.Module, made: Made) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            model(*made[1], **made[2])

    return call


def step_of(model: nn.Module, made: Made) -> Callable[[], None] | None:
    """A training step, or None where no result has gradients."""

    def step() -> None:
        leaves = pytree.tree_leaves(model(*made[1], **made[2]))
        torch.autograd.backward([leaf.sum() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad])
        for parameter in made[0].parameters():
            parameter.grad = None

    leaves = pytree.tree_leaves(made[0](*made[1], **made[2]))
    trained = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    return step if trained and any(p.requires_grad for p in made[0].parameters()) else None


def alternated(call: Callable[[], None], step: Callable[[], None]) -> dict[str, Any]:
    """Microseconds of the processor for a call and for a step, and their ratio.

    ``quiet`` is the tenth part of the samples that were least disturbed: what shares a core with this process slows
    a step, which runs more and other code, more than a call.
    """
    functions = {"call": call, "step": step}
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(3):
        call()
        step()
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until or len(taken["step"]) < LEAST_ROUNDS:
        for name, function in functions.items():
            started = time.process_time()
            function()
            taken[name].append(1e6 * (time.process_time() - started))
    quiet = {name: statistics.quantiles(times, n=10)[0] for name, times in taken.items()}
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return {
        "quiet": quiet,
        "median": medians,
        "ratio": {"quiet": quiet["step"] / quiet["call"], "median": medians["step"] / medians["call"]},
    }


def measured(name: str, make: Callable[[], Made]) -> dict[str, Any] | None:
    """What one target takes fused and eager; None where it has no loop that is rolled, or nothing to train."""
    torch.manual_seed(0)
    made = make()
    step = step_of(made[0], made)
    if step is None or not rolls(made):
        return None
    fused = fuse.compile(made[0])
    trained = step_of(fused, made)
    assert trained is not None
    times = alternated(call_of(fused, made), trained)
    trained()
    run = fused.last_run
    assert run is not None
    return {
        "target": name,
        "fuse": times,
        "eager": alternated(call_of(made[0], made), step),
        "launches": [run.launches, run.backward.launches if run.backward else 0],
        "fallbacks": len(run.fallbacks),
    }


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = RESULTS / "training_steps.json"
    found = {case["target"]: case for case in json.loads(path.read_text())["cases"]} if path.exists() and names else {}
    known = dict(targets())
    wanted = [
        target for target in known if not names or any(f"/{n}.py" in target or target == f"cell {n}" for n in names)
    ]
    for target in wanted:
        case = measured(target, known[target])
        if case is None:
            continue
        found[target] = case
        told = [
            f"{who} {case[who]['ratio']['quiet']:5.2f} ({case[who]['ratio']['median']:.2f})"
            for who in ("fuse", "eager")
        ]
        spent = ", ".join(f"{n} {spent:.0f}" for n, spent in case["fuse"]["quiet"].items())
        print(f"{target:40} step / call: {', '.join(told)}   us: {spent}   launches {case['launches']}", flush=True)
    save("training_steps", [found[target] for target in known if target in found])


if __name__ == "__main__":
    main(sys.argv[1:])
