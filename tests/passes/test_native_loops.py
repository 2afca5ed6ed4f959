"""Loops whose steps need a library: they roll all the same, and launch ``a + b * T``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.report.report import Report

pytestmark = pytest.mark.usefixtures("unranked")

BATCH, WIDTH = 3, 8
LENGTHS = (6, 9, 13)
SHORT = 6  # one step in the middle that differs leaves no four equal ones on either side
Run = Callable[["Model", Tensor], object]


@dataclass(frozen=True)
class Case:
    run: Run
    each: int  # launches of a step
    dtype: torch.dtype = torch.float32


CASES: dict[str, Case] = {}


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.cell = nn.Linear(WIDTH, WIDTH, dtype=case.dtype)
        self.centres = nn.Parameter(torch.randn(5, WIDTH, dtype=case.dtype))

    def forward(self, x: Tensor) -> object:
        return self.case.run(self, x)


def case(each: int, **facts: torch.dtype) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        CASES[run.__name__] = Case(run, each, **facts)
        return run

    return register


def sequence(length: int, case: Case) -> Tensor:
    return torch.randn(length, BATCH, WIDTH, dtype=case.dtype)


@case(each=3)
def sorted_state_alone(m: Model, x: Tensor) -> object:
    h = torch.zeros(BATCH, WIDTH)
    for step in x:
        h = torch.tanh(m.cell(h) + step).sort(-1).values
    return h


@case(each=3)
def called_state_that_is_kept(m: Model, x: Tensor) -> object:
    h, kept = torch.zeros(BATCH, WIDTH), []
    for step in x:
        h = torch.tanh(m.cell(h) + step).sort(-1).values
        kept.append(h)
    return torch.stack(kept), h


@case(each=4)
def largest_kept_with_last_state(m: Model, x: Tensor) -> object:
    h, kept = torch.zeros(BATCH, WIDTH), []
    for step in x:
        h = torch.tanh(m.cell(h) + step)
        h = h * (h >= h.sort(-1, descending=True).values[:, 2:3])
        kept.append(h)
    return torch.stack(kept, 1), h, kept[2]


@case(each=5)
def distances(m: Model, x: Tensor) -> object:
    h, kept = torch.zeros(BATCH, WIDTH), []
    for step in x:
        near = torch.cdist(h + step, m.centres)
        h = torch.tanh(m.cell(h) + torch.softmax(-near, -1) @ m.centres)
        kept.append(h)
    return torch.cat(kept, -1)


@case(each=3, dtype=torch.float64)
def equations_in_double(m: Model, x: Tensor) -> object:
    h, kept = torch.zeros(1, WIDTH, dtype=x.dtype), []
    matrix = m.cell.weight @ m.cell.weight.t() + torch.eye(WIDTH, dtype=x.dtype)
    for step in x:
        h = torch.linalg.solve(matrix + step[0].sigmoid().diag(), step[1:2] + h.tanh(), left=False)
        kept.append(h[0])
    return torch.stack(kept)


@case(each=3)
def states_that_lag(m: Model, x: Tensor) -> object:
    one = two = three = torch.zeros(BATCH, WIDTH)
    for step in x:
        one, two, three = (one * 0.3 + three + step).sort(-1).values @ m.cell.weight, one, two
    return one, two, three


@case(each=3)
def states_that_change_places(m: Model, x: Tensor) -> object:
    a, b = torch.zeros(BATCH, WIDTH), torch.ones(BATCH, WIDTH)
    for step in x:
        a, b = b, torch.tanh(m.cell(a) + b.sort(-1).values + step)
    return a, b


@case(each=3)
def backwards_in_time(m: Model, x: Tensor) -> object:
    h, kept = x[0].t().contiguous().t(), []  # a first state that lies otherwise
    for t in reversed(range(len(x))):
        h = torch.tanh(m.cell(h.sort(-1).values) + x[t] * (t / 10))
        kept.append(h)
    return torch.stack(kept[::-1])


@case(each=3)
def positions_as_states(m: Model, x: Tensor) -> object:
    h, at = torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH, dtype=torch.int64)
    for step in x:
        h = torch.tanh(m.cell(h).gather(1, at) + step)
        at = h.argsort(-1)
    return h, at


@case(each=6)
def sorted_products_of_states(m: Model, x: Tensor) -> object:
    p, kept = torch.eye(WIDTH), []
    for step in x:
        p = m.cell.weight @ p @ p.t() + step.t() @ step
        p = (p / p.norm()).sort(-1).values
        kept.append(p.diagonal())
    return torch.stack(kept), p


@case(each=3)
def losses_behind_the_loop(m: Model, x: Tensor) -> object:
    h, loss, others, likely = torch.zeros(BATCH, WIDTH), 0.0, [], x[:, :, :5].sigmoid()
    for t, step in enumerate(x):
        h = torch.tanh(m.cell(h) + step).sort(-1).values
        scores = nn.functional.linear(h, m.centres)
        loss = loss + nn.functional.cross_entropy(scores, torch.arange(BATCH) + t % 2, ignore_index=1)
        others.append(nn.functional.binary_cross_entropy_with_logits(scores, likely[t]))
    return loss, torch.stack(others), h


@case(each=2)
def one_of_several_results_kept(m: Model, x: Tensor) -> object:
    h, kept = torch.zeros(BATCH, WIDTH), []
    for _ in x:
        h = nn.functional.layer_norm(h.sort(1).values, (WIDTH,))
        kept.append(h)
    return torch.stack(kept), h


@case(each=4)
def one_of_several_results_kept_that_a_region_computes(m: Model, x: Tensor) -> object:
    a = b = c = torch.zeros(BATCH, WIDTH)
    first, second = [], []
    for _ in x:
        largest = b.sort(1).values
        a, b, c = torch.tanh(a @ m.cell.weight), torch.tanh(torch.tanh(c)), nn.functional.layer_norm(largest, (WIDTH,))
        first.append(a)
        second.append(c)
    return torch.stack(first), torch.stack(second)


@case(each=4)
def what_cannot_be_done_at_once_stays(m: Model, x: Tensor) -> object:
    h, kept = torch.zeros(BATCH, WIDTH), []
    for step in x:
        h = torch.tanh(m.cell(h) + step)
        chosen = torch.take(step, h.argmax(-1).sort().values)
        kept.append(torch.log_softmax(nn.functional.linear(h, m.centres), 1).sum() + chosen)
    return torch.stack(kept)


def shown(case: Case, length: int) -> tuple[Report, Model]:
    torch.manual_seed(0)
    model = Model(case).eval()
    with torch.no_grad():
        return fuse.show(model, (sequence(length, case),)), model


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_a_step_launches_the_same_at_every_length_and_is_right(name: str) -> None:
    case, launches = CASES[name], []
    report, model = shown(case, LENGTHS[-1])
    for length in LENGTHS:
        checked = check(model, (sequence(length, case),))
        assert checked.passed, checked
        assert not checked.fallbacks
        launches.append(checked.launches_after)
    (loop,) = report.loops
    assert [rolled.launches for rolled in loop.rolled] == [case.each]
    slopes = {(b - a) / (t - s) for a, b, s, t in zip(launches, launches[1:], LENGTHS, LENGTHS[1:], strict=False)}
    assert slopes == {case.each}, launches


# ---- what does not roll ----------------------------------------------------------------------------------------------


def one_step_unlike(m: Model, x: Tensor) -> object:
    h = torch.zeros(BATCH, WIDTH)
    for t, step in enumerate(x):
        h = torch.tanh(m.cell(h) + step).sort(-1, descending=t == 2).values
    return h


def states_swapped_once(m: Model, x: Tensor) -> object:
    a, b = torch.zeros(BATCH, WIDTH), torch.ones(BATCH, WIDTH)
    for t, step in enumerate(x):
        a, b = torch.tanh(m.cell(a) + step).sort(-1).values, a + b
        if t == 2:
            a, b = b, a
    return a, b


def state_read_again_once(m: Model, x: Tensor) -> object:
    h = torch.zeros(BATCH, WIDTH)
    for t, step in enumerate(x):
        after = torch.tanh(m.cell(h) + step).sort(-1).values
        h = after + h if t == 2 else after
    return h


def number_of_places_that_changes_once(m: Model, x: Tensor) -> object:
    h = torch.zeros(BATCH, WIDTH)
    for t, step in enumerate(x):
        h = torch.tanh(m.cell(h) + step)
        h = h * (h >= h.topk(4 if t == 2 else 3, -1).values[:, -1:])
    return h


def complex_numbers(m: Model, x: Tensor) -> object:
    z = torch.complex(x[0], x[0])
    for step in x:
        z = torch.fft.fft(z * 0.1 + step)
    return z.abs()


NEAR_MISSES = [
    one_step_unlike,
    states_swapped_once,
    state_read_again_once,
    number_of_places_that_changes_once,
    complex_numbers,
]


@pytest.mark.parametrize("run", NEAR_MISSES)
def test_near_misses_stay_and_are_right(run: Run) -> None:
    case = Case(run, 0)
    report, model = shown(case, SHORT)
    assert not any(loop.rolled for loop in report.loops), report
    checked = check(model, (sequence(SHORT, case),))
    assert checked.passed, checked


def test_numbers_drawn_in_a_step_stay_in_eagers_order() -> None:
    def drawn(m: Model, x: Tensor) -> object:
        h = torch.zeros(BATCH, WIDTH)
        for step in x:
            h = nn.functional.dropout(torch.tanh(m.cell(h) + step).sort(-1).values, 0.5, training=True)
        return h

    case = Case(drawn, 0)
    _, model = shown(case, 7)
    checked = check(model, (sequence(7, case),))
    assert checked.passed, checked


@pytest.mark.parametrize("length", [SHORT, SHORT + 1])
def test_last_states_whose_layouts_change_places_every_step_lie_as_eagers(length: int) -> None:
    def run(m: Model, x: Tensor) -> object:
        a, b = torch.ones(WIDTH, BATCH).t(), torch.zeros(BATCH, WIDTH)
        for step in x:
            a, b = b, torch.where(step[:, :1] > 0, a.sort(-1).values.tanh(), b)
        return a, b.t()

    case = Case(run, 0)
    report, model = shown(case, length)
    assert any(loop.rolled for loop in report.loops), report
    checked = check(model, (sequence(length, case),))
    assert checked.passed, checked


# ---- what is said of them --------------------------------------------------------------------------------------------


def test_the_report_gives_launches_by_steps_and_the_reason() -> None:
    report, _ = shown(CASES["sorted_state_alone"], 12)
    text = str(report)
    assert "one program, step by step: 3 launches a step" in text
    assert "-> 1 + 3*T  with T = 12" in text or "-> 3*T" in text.replace("0 + ", ""), text
    assert "roll_loops: sort is taken of rows of more than 0 elements" in " ".join(text.split())
    assert report.to_dict()["loops"][0]["rolled"][0]["launches_per_step"] == 3


def test_the_kernels_of_a_step_are_those_of_any_length() -> None:
    """Those of the first call are of its length alone."""
    case = CASES["sorted_state_alone"]
    _, model = shown(case, 6)
    fused, kernels = fuse.compile(model), []
    for length in (12, 21, 33):
        with torch.no_grad():
            fused(sequence(length, case))
        kernels.append(set(fused.compiled.program.kernels))
    assert kernels[1] == kernels[2] != set()


def test_lengths_that_are_declared_are_right() -> None:
    case = CASES["largest_kept_with_last_state"]
    _, model = shown(case, 6)
    fused = fuse.compile(model, dynamic_shapes={"x": {0: torch.export.Dim("T")}})
    with torch.no_grad():
        for length in (50, 64):
            x = sequence(length, case)
            for found, expected in zip(fused(x), model(x), strict=True):
                torch.testing.assert_close(found, expected)


# ---- what is not as predicted ----------------------------------------------------------------------------------------


@torch.library.custom_op("fuse_tests::turning", mutates_args=())
def turning(x: Tensor) -> Tensor:
    """Laid out otherwise from some step on, which no one could know before."""
    return x.t().clone(memory_format=torch.contiguous_format).t() if x[0, 0] > 3 else x.clone()


@turning.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_layout_that_changes_in_a_late_step_is_noticed() -> None:
    def run(m: Model, x: Tensor) -> object:
        h = torch.zeros(BATCH, WIDTH)
        for step in x:
            h = turning(h + 1).sort(-1).values + step
        return h

    model, x = Model(Case(run, 0)), torch.zeros(SHORT, BATCH, WIDTH)
    fused = fuse.compile(model)
    with torch.no_grad():
        fused(x - 1)
        assert fused.last_run.launches
        assert not fused.last_run.fallbacks
        with pytest.warns(UserWarning, match="strides"):
            found = fused(x)
        assert torch.equal(found, model(x))


def test_each_launch_of_each_step_is_an_event_of_the_profiler() -> None:
    case = CASES["sorted_state_alone"]
    _, model = shown(case, SHORT)
    fused, x = fuse.compile(model), sequence(SHORT, case)
    with torch.no_grad():
        expected = fused(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            found = fused(x)
    events = [event.name for event in profiled.events() if event.name.startswith("fuse::")]
    assert len(events) == fused.last_run.launches
    assert torch.equal(found, expected)
