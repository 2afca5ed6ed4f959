"""Choices by random numbers of Python as data: one program serves all ways through the steps."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.graph.capture import capture
from fuse.graph.values.choices import NOTHING, rewritten
from tests.runtime.test_drawn_numbers import compiled_calls

STEPS = 6


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    state = random.getstate()
    yield
    random.setstate(state)


class Steps(nn.Module):
    """``step(model, x, y, t)`` gives the input of step ``t + 1``: tokens or vectors."""

    def __init__(self, run: Callable[[Steps, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.embedding, self.cell, self.out = nn.Embedding(12, 8), nn.GRUCell(8, 8), nn.Linear(8, 12)
        self.back, self.run = nn.Linear(12, 8), run

    def forward(self, h: Tensor, trg: Tensor) -> Any:
        return self.run(self, h, trg)


def arguments() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 8), torch.randint(0, 12, (STEPS + 1, 3))


def _tokens(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    token, outputs = trg[0], []
    for t in range(STEPS):
        h = self.cell(self.embedding(token), h)
        output = self.out(h)
        outputs.append(output)
        teacher_force = random.random() < 0.5
        top1 = output.argmax(1)
        token = trg[t + 1] if teacher_force else top1
    return torch.stack(outputs)


def _branches(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    token, outputs = trg[0], []
    for t in range(STEPS):
        h = self.cell(self.embedding(token), h)
        output = self.out(h)
        outputs.append(output)
        if random.random() < 0.5:
            token = trg[t + 1]
        else:
            _, topi = output.topk(1)
            token = topi.squeeze(-1).detach()
    return torch.stack(outputs)


def _flags(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    token, outputs = trg[0], []
    for t in range(STEPS):
        h = self.cell(self.embedding(token), h)
        outputs.append(self.out(h))
        use = True if random.random() < 0.5 else False  # noqa: SIM210  # as it is written
        token = trg[t + 1] if use else outputs[-1].argmax(1)
    return torch.stack(outputs)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("run", [_tokens, _branches, _flags], ids=lambda r: r.__name__)
def test_one_program_serves_all_choices(run: Any, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuse.runtime import known_variants

    made, code = [], run.__code__
    monkeypatch.setattr(known_variants, "make", lambda *a, of=known_variants.make, **k: made.append(1) or of(*a, **k))
    assert all(compiled_calls(Steps(run), arguments(), 10, train))
    assert len(made) == 1
    assert run.__code__ is code
    signature = capture(Steps(run), arguments()).meta["signature"]
    assert (len(signature.drawn.choices), signature.drawn.comparisons) == (STEPS, ())


def test_steps_that_choose_are_one_loop() -> None:
    fused, args = fuse.compile(Steps(_tokens)), arguments()
    with torch.no_grad():
        launches = [fused(*args) is not None and fused.last_run.launches for _ in range(4)]
    assert set(launches) == {launches[0]}
    assert launches[0] <= 4


def test_eager_launches_are_those_of_the_side_that_was_taken() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.topks = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.topks += op is torch.ops.aten.topk.default
            return op(*args, **(kwargs or {}))

    random.seed(3)
    dispatches = capture(Steps(_branches), arguments()).meta["signature"].dispatches
    with Counted() as counted, torch.no_grad():
        Steps(_branches)(*arguments())
    assert sum(one.op is torch.ops.aten.topk.default for one in dispatches) == counted.topks
    assert 0 < counted.topks < STEPS


def _vectors(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    given = self.embedding(trg)
    step, outputs = given[0], []
    for t in range(STEPS):
        h = self.cell(step, h)
        outputs.append(self.out(h))
        fed = self.back(outputs[-1])
        step = given[t + 1] if random.random() < 0.5 else fed
    return torch.stack(outputs)


def _of_other_shapes(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    total = h.sum()
    for t in range(STEPS):
        part = h[t % 3] if random.random() < 0.5 else h[:2]
        total = torch.tanh(total + part.sum() * (t + 1))
    return total * h


def _read_later(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    scale = h[0]
    for t in range(STEPS):
        if random.random() < 0.5:
            part = h[0] * 2
        else:
            scale = h[t % 3]
            part = scale * 3
        h = torch.tanh(h + part + scale)
    return h


def _keeps_one(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    kept = h[0]
    for _ in range(STEPS):
        if random.random() < 0.5:
            kept = kept + 1
            part = kept * 2
        else:
            part = h[1]
        h = torch.tanh(h + part)
    return h


def _tries(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    for t in range(STEPS):
        try:
            part = h[t] if random.random() < 0.5 else h[0]
        except IndexError:
            part = h[0] * 3
        h = torch.tanh(h + part)
    return h


def _notes_it(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    taken = []
    for t in range(STEPS):
        part = h[0] if random.random() < 0.5 else (taken.append(t) or h[1])
        h = torch.tanh(h + part)
    return h * len(taken)


def _returns_it(self: Steps, h: Tensor, trg: Tensor) -> tuple[Tensor, Tensor]:
    chosen = trg
    for t in range(3):
        other = chosen.flip(0) + t
        chosen = trg if random.random() < 0.5 else other
    return h * 2, chosen


def _is_not(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    for _ in range(STEPS):
        force = random.random() < 0.5
        part = h[0] if not force else h[1]
        h = torch.tanh(h + part) + int(force)
    return h


def _asks_which(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    for _ in range(STEPS):
        force = random.random() < 0.5
        part = h[0] if force is True else h[1]
        h = torch.tanh(h + part)
    return h


def _tells_truths(self: Steps, h: Tensor, trg: Tensor) -> tuple[Tensor, list[bool]]:
    forced = []
    for _ in range(3):
        force = random.random() < 0.5
        forced.append(force)
        part = h[0] if force else h[1]
        h = torch.tanh(h + part)
    return h, forced


def _counts_lookups(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    looked_up = collections.defaultdict(lambda: h[0])
    for t in range(STEPS):
        part = looked_up[t] if random.random() < 0.5 else h[1]
        h = torch.tanh(h + part)
    return h * len(looked_up)


def _knows_it(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    for _ in range(STEPS):
        first, second = h[0], h[1]
        part = first if random.random() < 0.5 else second
        h = torch.tanh(h + part) * (2 if part is second else 1)
    return h


def _asks_layout(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    for _ in range(STEPS):
        first, second = h[:, :4], h[:, 4:] * 1
        part = first if random.random() < 0.5 else second
        h = torch.tanh(h + part.sum()) * (2 if part.is_contiguous() else 1)
    return h


def _counts_variables(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
    for _ in range(STEPS):
        part = h[0] if random.random() < 0.5 else h[1]
        h = torch.tanh(h + part)
    return h * len(locals())


NEAR_MISSES = [
    *(_of_other_shapes, _read_later, _keeps_one, _tries, _notes_it, _returns_it, _is_not, _asks_which, _tells_truths),
    *(_counts_lookups, _knows_it, _asks_layout, _counts_variables),
]


@pytest.mark.sampled
@pytest.mark.parametrize("run", NEAR_MISSES, ids=lambda r: r.__name__)
def test_other_choices_are_learned(run: Any) -> None:
    compiled_calls(Steps(run), arguments(), 5)
    signature = capture(Steps(run), arguments()).meta["signature"]
    assert len(signature.drawn.comparisons) > 1


@pytest.mark.filterwarnings("ignore:Steps runs eager")
def test_a_view_of_a_choice_raises_where_eager_raises() -> None:
    def run(self: Steps, h: Tensor, trg: Tensor) -> Tensor:
        part = h[:, :4]
        for _ in range(3):
            other = h[:, 4:] * 2
            part = h[:, 4:] if random.random() < 0.5 else other
        return part.view(-1) * 1

    fused, args = fuse.compile(Steps(run)), arguments()
    raised = []
    for seed in range(6):
        for one in (Steps(run), fused):
            random.seed(seed)
            try:
                one(*args)
                raised.append(False)
            except RuntimeError:
                raised.append(True)
    assert raised[::2] == raised[1::2]
    assert len(set(raised)) == 2


def test_choices_between_tensors_with_gradients_are_learned() -> None:
    """A layer whose result is chosen in no step has no gradient, which is not the same as zeros."""
    compiled_calls(Steps(_vectors), arguments(), 4, train=True)


def test_only_the_source_of_the_code_is_rewritten() -> None:
    assert rewritten(_tokens, NOTHING) is not None
    assert rewritten(_notes_it, NOTHING) is None
    space: dict[str, Any] = {}
    exec("def made(a, b, c):\n    d = a if c else b\n    return d", space)
    assert rewritten(space["made"], NOTHING) is None
    other = lambda a, b, c: a if c else b  # noqa: E731
    assert rewritten(other, NOTHING) is None
