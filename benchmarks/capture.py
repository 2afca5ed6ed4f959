"""How long capture and all passes take on loops of 2,000 to 20,000 operators.

    an LSTM loop of n steps  ->  seconds to capture it with real and with fake tensors, seconds of all passes

As in a first call, most steps are left out of the graph: capture grows as the number of operators does, and passes do
not grow. The last column is the seconds for 1,000 operators. Seconds are of this process on the processor (neither
capture nor the passes use a second thread), so that other programs disturb them less.
"""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

import fuse
from benchmarks.common import save
from fuse.graph.capture import capture_short

OPERATORS = (2_000, 5_000, 10_000, 20_000)
OPERATORS_PER_STEP = 16
BATCH, FEATURES, REPEATS = 4, 64, 2


class Loop(nn.Module):
    """An LSTM written as a Python loop over ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.inputs = nn.Linear(FEATURES, 4 * FEATURES)
        self.state = nn.Linear(FEATURES, 4 * FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], FEATURES)
        c = h
        outputs = []
        for step in range(self.steps):
            gates = self.inputs(x[:, step]) + self.state(h)
            i, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)


def captured(steps: int, fake: bool) -> tuple[float, GraphModule]:
    """The least of several times to capture, in seconds, and the last graph."""
    seconds = []
    for _ in range(REPEATS):
        with FakeTensorMode() if fake else contextlib.nullcontext():
            model, x = Loop(steps), torch.zeros(BATCH, steps, FEATURES)
        gc.collect()
        started = time.process_time()
        graph = capture_short(model, (x,), {})
        seconds.append(time.process_time() - started)
    return min(seconds), graph


def case(operators: int) -> dict[str, Any]:
    steps = operators // OPERATORS_PER_STEP
    fake_seconds, _ = captured(steps, fake=True)
    real_seconds, graph = captured(steps, fake=False)
    dispatched, nodes = len(graph.meta["signature"].dispatches), len(graph.graph.nodes)
    started = time.process_time()
    fuse.run_passes(graph)
    passes_seconds = time.process_time() - started
    return {
        "what": f"an LSTM loop of {steps} steps",
        "operators": dispatched,
        "nodes": nodes,
        "nodes_after": len(graph.graph.nodes),
        "capture_seconds_real": real_seconds,
        "capture_seconds_fake": fake_seconds,
        "passes_seconds": passes_seconds,
        "seconds_per_1000_operators": 1000 * (real_seconds + passes_seconds) / dispatched,
    }


def line(row: dict[str, Any]) -> str:
    """One case as a line of the table."""
    numbers = [value for value in row.values() if not isinstance(value, str)]
    return "".join(f"{value:10.3f}" if isinstance(value, float) else f"{value:10}" for value in numbers)


if __name__ == "__main__":
    fuse.run_passes(fuse.capture(Loop(3), (torch.zeros(BATCH, 3, FEATURES),)))  # imports are not measured
    cases = [case(operators) for operators in OPERATORS]
    print(*map(line, cases), sep="\n")
    save("capture", cases)
