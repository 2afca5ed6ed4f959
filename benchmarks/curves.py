"""Train the study's four models on generated data to a fixed loss, eager and fused, and draw the curves.

    same weights, same data, same seeds  ->  losses of eager and of fuse.compile  ->  benchmarks/results/curves.json
                                                                                      docs/images/training_curves.svg

Each task can be learned from its data alone: words to translate by a fixed dictionary, an answer between two marks, a
tag that depends on the word, a class that shifts the word vectors. Dropout draws eager's numbers from eager's seed, so
that the two curves are one but for rounding. ``python -m benchmarks.curves [MODEL ...]``
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from benchmarks.common import ROOT, save

PICTURE = ROOT / "docs" / "images" / "training_curves.svg"
LONGEST = 300
SMOOTHED = 5
"""Steps whose mean loss has to reach the target."""

Batch = tuple[dict[str, Tensor], Callable[[Any], Tensor]]
"""Arguments of a call, and the loss of its result."""


@dataclass(frozen=True)
class Task:
    """One model: its file in ``models/``, endless batches, and the loss at which training stops."""

    name: str
    batches: Callable[[Any, torch.Generator], Iterator[Batch]]
    target: float
    rate: float


def _pick(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def translated(module: Any, generator: torch.Generator) -> Iterator[Batch]:
    """RNNSearch: each of twenty words has one translation; what lies behind a sentence's end is masked in the loss."""
    dictionary = torch.randperm(20, generator=generator) + 30
    while True:
        lengths = _pick(generator, 10, module.source_length + 1, module.batch_size)
        mask = torch.arange(module.source_length) < lengths[:, None]
        source = _pick(generator, 2, 22, module.batch_size, module.source_length) * mask
        target = dictionary[(source - 2).clamp(min=0)][:, : module.target_length]
        kept = mask[:, : module.target_length]

        def loss(result: tuple[Tensor, Tensor], target: Tensor = target, kept: Tensor = kept) -> Tensor:
            every = F.cross_entropy(result[0].transpose(1, 2), target, reduction="none")
            return (every * kept).sum() / kept.sum()

        yield {"source": source, "mask": mask, "target": target}, loss


def answered(module: Any, generator: torch.Generator) -> Iterator[Batch]:
    """ALBERT, question answering: the answer begins at the word 5 and ends at the word 6."""
    rows, length = 8, module.seq_length
    while True:
        words = _pick(generator, 10, 60, rows, length)
        start, more = _pick(generator, 0, length // 2, rows), _pick(generator, 1, length // 2, rows)
        words[torch.arange(rows), start], words[torch.arange(rows), start + more] = 5, 6

        def loss(result: dict[str, Tensor], start: Tensor = start, end: Tensor = start + more) -> Tensor:
            return (F.cross_entropy(result["start_logits"], start) + F.cross_entropy(result["end_logits"], end)) / 2

        types = torch.zeros_like(words)
        yield {"input_ids": words, "attention_mask": torch.ones_like(words), "token_type_ids": types}, loss


def tagged(module: Any, generator: torch.Generator) -> Iterator[Batch]:
    """BERT-CRF: the tag of a word is its number's remainder; the result is the loss."""
    while True:
        lengths = _pick(generator, module.seq_length // 2, module.seq_length + 1, module.batch_size)
        mask = torch.arange(module.seq_length) < lengths[:, None]
        words = _pick(generator, 1, 90, module.batch_size, module.seq_length) * mask
        yield {"words": words, "tags": words % module.num_tags, "mask": mask}, lambda result: result


def classified(module: Any, generator: torch.Generator) -> Iterator[Batch]:
    """TextING: the words of a class lean to one direction."""
    directions = torch.randn(module.num_classes, module.embedding_size, generator=generator) * 0.3
    while True:
        _, adjacency, mask = module.example_inputs()
        classes = _pick(generator, 0, module.num_classes, module.batch_size)
        words = torch.randn(module.batch_size, module.num_words, module.embedding_size, generator=generator)
        words = (words + directions[classes][:, None]) * mask[:, :, None]

        def loss(result: Tensor, classes: Tensor = classes) -> Tensor:
            return F.cross_entropy(result, classes)

        yield {"words": words, "adjacency": adjacency, "mask": mask}, loss


TASKS = (
    Task("rnnsearch", translated, target=2.9, rate=3e-3),
    Task("albert", answered, target=0.05, rate=5e-4),
    Task("bert_crf", tagged, target=15.0, rate=2e-3),
    Task("texting", classified, target=0.5, rate=3e-3),
)


def train(task: Task, run: Callable[..., Any], model: nn.Module, module: Any) -> tuple[list[float], list[float]]:
    """Losses until their mean over the last few reaches the task's, and milliseconds of each step."""
    optimizer = torch.optim.Adam(model.parameters(), task.rate)
    losses: list[float] = []
    milliseconds = []
    for number, (arguments, loss_of) in enumerate(task.batches(module, torch.Generator().manual_seed(1))):
        torch.manual_seed(number)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(run(**arguments))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        milliseconds.append((time.perf_counter() - start) * 1e3)
        losses.append(loss.item())
        recent = losses[-SMOOTHED:]
        if len(losses) == LONGEST or (len(recent) == SMOOTHED and sum(recent) <= task.target * SMOOTHED):
            return losses, milliseconds
    raise AssertionError("batches are endless")


def case(task: Task) -> dict[str, Any]:
    """One model trained both ways."""
    module = importlib.import_module(f"models.{task.name}")
    torch.manual_seed(0)
    model = module.model().train()
    eager = copy.deepcopy(model)
    fused = fuse.compile(model)
    mine, my_time = train(task, fused, model, module)
    theirs, their_time = train(task, eager, eager, module)
    run = fused.last_run
    assert run is not None
    backward = run.backward
    assert backward is not None
    both = list(zip(mine, theirs, strict=False))
    return {
        "model": task.name,
        "target": task.target,
        "steps": {"eager": len(theirs), "fused": len(mine)},
        "reached": min(sum(mine[-SMOOTHED:]), sum(theirs[-SMOOTHED:])) <= task.target * SMOOTHED,
        "largest_relative_difference": max(abs(a - b) / abs(b) for a, b in both),
        "milliseconds": {"eager": _median(their_time), "fused": _median(my_time)},
        "launches": {"forward": run.launches, "backward": backward.launches},
        "fallbacks": [f.reason for f in (*run.fallbacks, *backward.fallbacks)],
        "losses": {"eager": [round(x, 6) for x in theirs], "fused": [round(x, 6) for x in mine]},
    }


def _median(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]


WIDTH, HEIGHT, MARGIN = 320, 200, 36


def picture(cases: Sequence[dict[str, Any]]) -> str:
    """The curves as SVG, one panel a model: eager broad and light, fused thin and dark on top of it."""
    panels = [_panel(one, number % 2 * WIDTH, number // 2 * HEIGHT) for number, one in enumerate(cases)]
    width, height = 2 * WIDTH, (len(cases) + 1) // 2 * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(panels)
        + "\n</svg>\n"
    )


def _panel(one: dict[str, Any], left: int, top: int) -> str:
    curves = one["losses"]
    longest = max(map(len, curves.values()))
    highest = max(max(curve) for curve in curves.values())

    def points(curve: Sequence[float]) -> str:
        across = (WIDTH - 2 * MARGIN) / max(longest - 1, 1)
        down = (HEIGHT - 2 * MARGIN) / highest
        places = ((MARGIN + i * across, HEIGHT - MARGIN - loss * down) for i, loss in enumerate(curve))
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN
    steps = one["steps"]
    return "\n".join(
        [
            f'<g transform="translate({left} {top})">',
            f'<path d="M{MARGIN} {MARGIN}V{bottom}H{right}" fill="none" stroke="#888"/>',
            f'<text x="{MARGIN}" y="{MARGIN - 14}">{one["model"]} to a loss of {one["target"]:g}: '
            f"eager {steps['eager']}, fused {steps['fused']} steps</text>",
            f'<text x="{MARGIN - 4}" y="{MARGIN + 4}" text-anchor="end">{highest:.1f}</text>',
            f'<text x="{MARGIN - 4}" y="{bottom}" text-anchor="end">0</text>',
            f'<text x="{right}" y="{bottom + 14}" text-anchor="end">{longest} steps</text>',
            f'<polyline points="{points(curves["eager"])}" fill="none" stroke="#f4b183" stroke-width="5"/>',
            f'<polyline points="{points(curves["fused"])}" fill="none" stroke="#1f3864" stroke-width="1.2"/>',
            "</g>",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="models to train instead of all; nothing is saved")
    chosen = parser.parse_args(arguments).models
    cases = []
    for task in TASKS:
        if not chosen or task.name in chosen:
            cases.append(case(task))
            print({k: v for k, v in cases[-1].items() if k != "losses"}, file=sys.stderr, flush=True)
    if not chosen:
        save("curves", cases)
        PICTURE.write_text(picture(cases))
    return 0 if all(one["reached"] and not one["fallbacks"] for one in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
