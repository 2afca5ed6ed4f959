"""Batches of sequences whose lengths spread as those of sentences do: what padding, cutting, sorting and packing cost.

    padded     each batch as long as the longest sequence of all
    cut        each batch as long as its own longest sequence
    buckets    sequences sorted by length, batches as long as the next multiple of eight
    packed     pack_padded_sequence through nn.GRU, cut

The models are a GRU loop with a mask, ``models/rnnsearch.py`` (two lengths: source and target) and
``models/bert_crf.py``. Default settings, caches cold, a process for each model, way, contestant, and inference or
training step (forward and backward, no optimizer). Seconds are the processor's, compilers included: other programs
disturb them less. ``python -m benchmarks.lengths [BATCHES]``; ``python -m benchmarks.lengths MODEL [BATCHES]`` measures
one model and leaves the other rows of the file as they are.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch._dynamo  # what torch's own imports take is not measured
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fuse
from benchmarks.common import RESULTS, ROOT, compilations, processor_seconds, save
from fuse.graph.loading.load import load

BATCHES = 200
BATCH = 16
SHORTEST, LONGEST = 3, 64
MEDIAN, SPREAD = 18, 0.5
"""Of the log-normal distribution that the lengths of sequences follow."""
BUCKET = 8
WIDTH = 64

Length = tuple[int, int]
"""Of a sequence, and of the one that belongs to it (a translation), which is about as long."""


class Gru(nn.Module):
    """A GRU written as a loop; rows keep their state once they have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.state = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h, states = x.new_zeros(x.shape[1], WIDTH), []
        for t, step in enumerate(x):
            (a, b, c), (d, e, f) = self.given(step).chunk(3, -1), self.state(h).chunk(3, -1)
            reset, update = torch.sigmoid(a + d), torch.sigmoid(b + e)
            new = (1 - update) * torch.tanh(c + reset * f) + update * h
            h = torch.where((t < lengths)[:, None], new, h)
            states.append(h)
        return torch.stack(states)


class Packed(nn.Module):
    """``nn.GRU`` over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0])[0]


def sequences(lengths: list[Length], longest: Length) -> tuple[Tensor, ...]:
    """Arguments of the GRUs."""
    return torch.randn(longest[0], len(lengths), WIDTH), torch.tensor([length for length, _ in lengths])


def translations(lengths: list[Length], longest: Length) -> tuple[Tensor, ...]:
    """Arguments of RNNSearch."""
    mask = torch.arange(longest[0]) < torch.tensor([length for length, _ in lengths]).unsqueeze(1)
    source, target = (torch.randint(2, 500, (len(lengths), one)) for one in longest)
    return source * mask, mask, target


def tagged(lengths: list[Length], longest: Length) -> tuple[Tensor, ...]:
    """Arguments of BERT-CRF."""
    mask = torch.arange(longest[0]) < torch.tensor([length for length, _ in lengths]).unsqueeze(1)
    shape = len(lengths), longest[0]
    return torch.randint(1, 1000, shape) * mask, torch.randint(0, 9, shape), mask


@dataclass(frozen=True)
class Model:
    """How a model is made, its arguments, and how batches of them come."""

    make: Callable[[], nn.Module]
    arguments: Callable[[list[Length], Length], tuple[Tensor, ...]]
    ways: tuple[str, ...] = ("padded", "cut", "buckets")


def of_file(name: str) -> Callable[[], nn.Module]:
    return lambda: load(str(ROOT / "models" / f"{name}.py"), real=True).model


MODELS = {
    "GRU loop": Model(Gru, sequences),
    "nn.GRU": Model(Packed, sequences, ("packed",)),
    "rnnsearch": Model(of_file("rnnsearch"), translations),
    "bert_crf": Model(of_file("bert_crf"), tagged),
}
CONTESTANTS: dict[str, Callable[[nn.Module], nn.Module]] = {"eager": lambda model: model, "fuse": fuse.compile}
KINDS = ("inference", "training")


def drawn(batches: int, way: str) -> list[tuple[list[Length], Length]]:
    """The lengths in each batch, and how long the batch is; the same sequences for all ways."""
    numbers = random.Random(0)

    def length(of: float, spread: float) -> int:
        return min(max(round(of * math.exp(numbers.gauss(0, spread))), SHORTEST), LONGEST)

    firsts = [length(MEDIAN, SPREAD) for _ in range(batches * BATCH)]
    pairs = [(first, length(first, 0.2)) for first in firsts]
    if way == "buckets":
        pairs.sort()
    groups = [pairs[at : at + BATCH] for at in range(0, len(pairs), BATCH)]
    numbers.shuffle(groups)
    return [(group, longest(group, way)) for group in groups]


def longest(group: list[Length], way: str) -> Length:
    if way == "padded":
        return LONGEST, LONGEST
    step = BUCKET if way == "buckets" else 1
    first, second = (max(lengths) for lengths in zip(*group, strict=True))
    return -(-first // step) * step, -(-second // step) * step


def measured(name: str, way: str, kind: str, contestant: str, batches: int) -> dict[str, Any]:
    """Processor seconds of all calls, those of a later call, and what fuse did."""
    torch.manual_seed(0)
    model = MODELS[name].make().train(kind == "training")
    called = CONTESTANTS[contestant](model)
    seconds, compiled, ran_eager, launches = [], 0, 0, 0
    sizes: dict[tuple[torch.Size, ...], bool] = {}  # those that ran fused; whether with the graph of others
    with torch.set_grad_enabled(kind == "training"), compilations() as compiling:
        for lengths, size in drawn(batches, way):
            args = MODELS[name].arguments(lengths, size)
            before, started = len(compiling), processor_seconds()
            result = called(*args)
            if kind == "training":
                (result[0] if isinstance(result, tuple) else result).sum().backward()
            seconds.append(processor_seconds() - started)
            model.zero_grad()
            compiled += len(compiling) > before
            if contestant == "fuse":
                run = called.last_run
                ran_eager += bool(run.fallbacks)
                launches += run.launches + (run.backward.launches if run.backward else 0)
                if not run.fallbacks:
                    sizes.setdefault(tuple(arg.shape for arg in args), called.compiled.resized)
    found: dict[str, Any] = {"seconds": sum(seconds), "later": median(seconds[batches // 2 :])}
    if contestant == "fuse":
        fused = batches - ran_eager
        resized = sum(sizes.values())
        found |= {"compiled": compiled, "captured": len(sizes) - resized, "resized": resized, "ran_eager": ran_eager}
        found["launches"] = launches / fused if fused else 0.0
    return found


def case(name: str, way: str, kind: str, batches: int) -> dict[str, Any]:
    sizes = drawn(batches, way)
    words = sum(sum(length for length, _ in group) for group, _ in sizes)
    filled = words / sum(len(group) * size[0] for group, size in sizes)
    found: dict[str, Any] = {"model": name, "way": way, "kind": kind, "batches": batches, "filled": filled}
    for contestant in CONTESTANTS:
        with tempfile.TemporaryDirectory(prefix="fuse-bench-") as cache:
            os.chmod(cache, 0o700)
            ran = subprocess.run(
                [sys.executable, "-m", "benchmarks.lengths", name, way, kind, contestant, str(batches)],
                cwd=ROOT,
                env={**os.environ, "FUSE_CACHE_DIR": cache},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        found[contestant] = json.loads(ran.stdout.splitlines()[-1])
    return found


def with_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the file, those of one model replaced or added, in the order of the table."""
    path = RESULTS / "lengths.json"
    others = json.loads(path.read_text())["cases"] if path.exists() else []
    kept = [one for one in others if one["model"] != rows[0]["model"]]
    order = list(MODELS)
    return sorted([*kept, *rows], key=lambda one: (KINDS.index(one["kind"]), order.index(one["model"])))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        print(json.dumps(measured(*sys.argv[1:5], batches=int(sys.argv[5]))))
    else:
        chosen = [one for one in sys.argv[1:] if one in MODELS] or list(MODELS)
        batches = next((int(one) for one in sys.argv[1:] if one.isdigit()), BATCHES)
        for name in chosen:
            rows = []
            for kind in KINDS:
                for way in MODELS[name].ways:
                    rows.append(case(name, way, kind, batches))
                    print(rows[-1], file=sys.stderr, flush=True)
            save("lengths", with_rows(rows))
