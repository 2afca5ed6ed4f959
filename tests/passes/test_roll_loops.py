"""Loops that people write become one launch, whatever their length, and give what eager gives."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fuse
from fuse.check.oracle import check
from fuse.errors import CompilerMissing
from fuse.graph.capture import capture
from fuse.kernel.kernel import Declined
from fuse.rewrite import registry
from fuse.rewrite.pipeline import run_passes
from fuse.runtime import making
from fuse.runtime.programs import schedule

BATCH, WIDTH, LENGTHS = 3, 20, (5, 8, 17)
Step = Callable[..., object]


class Cell(nn.Module):
    """A loop under test with the weights that most cells want."""

    def __init__(self, loop: Step) -> None:
        super().__init__()
        self.loop = loop
        self.inputs = nn.Linear(WIDTH, 4 * WIDTH)
        self.hidden = nn.Linear(WIDTH, 4 * WIDTH)
        self.square = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.transitions = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> object:
        return self.loop(self, x)


def lstm(m: Cell, x: Tensor) -> object:
    h = c = torch.zeros(BATCH, WIDTH, dtype=x.dtype)
    outputs = []
    for step in x:
        i, f, g, o = (m.inputs(step) + m.hidden(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs), (h, c)


def gru_reset_inside(m: Cell, x: Tensor) -> object:
    h = x[0]
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        xr, xz, xn, _ = m.inputs(x[t]).chunk(4, 1)
        hr, hz, hn, _ = m.hidden(h).chunk(4, 1)
        z = torch.sigmoid(xz + hz)
        h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
        out[t] = h
    return out


def gru_reset_outside(m: Cell, x: Tensor) -> object:
    h = x[0]
    for t in range(x.shape[0]):
        r, z, n, _ = m.inputs(x[t]).chunk(4, 1)
        gate = torch.sigmoid(r + m.square(h))
        h = torch.sigmoid(z) * h + (1 - torch.sigmoid(z)) * torch.tanh(n + m.square(gate * h))
    return h


def reversed_rnn(m: Cell, x: Tensor) -> object:
    h, outputs = torch.zeros(BATCH, WIDTH, dtype=x.dtype), []
    for t in reversed(range(x.shape[0])):
        h = torch.tanh(m.square(h) + x[t])
        outputs.append(h)
    return torch.stack(outputs, 1)


def rnn_over_unbind(m: Cell, x: Tensor) -> object:
    h = torch.ones(BATCH, WIDTH, dtype=x.dtype)
    for step in x.unbind(0):
        h = torch.relu(m.square(h) + step)
    return h


def rnn_over_split(m: Cell, x: Tensor) -> object:
    h = torch.ones(BATCH, WIDTH, dtype=x.dtype)
    for step in x.split(1):
        h = torch.tanh(m.square(h) + step.squeeze(0))
    return h


def batch_first(m: Cell, x: Tensor) -> object:
    x = x.transpose(0, 1)
    h, outputs = torch.zeros(BATCH, WIDTH, dtype=x.dtype), []
    for t in range(x.shape[1]):
        h = torch.tanh(m.square(h) + x[:, t])
        outputs.append(h.unsqueeze(1))
    return torch.cat(outputs, 1)


def two_states_swapped(m: Cell, x: Tensor) -> object:
    a, b = x[0], x[1]
    for t in range(x.shape[0]):
        a, b = torch.tanh(m.square(b) + x[t]), a * 0.5
    return a, b


def masked(m: Cell, x: Tensor) -> object:
    h = torch.zeros(BATCH, WIDTH, dtype=x.dtype)
    keep = x[:, :, :1] > 0
    for t in range(x.shape[0]):
        h = torch.where(keep[t], torch.tanh(m.square(h) + x[t]), h)
    return h


def elementwise(m: Cell, x: Tensor) -> object:
    h, total = x[0], torch.zeros(BATCH, WIDTH, dtype=x.dtype)
    for t in range(x.shape[0]):
        h = torch.sigmoid(x[t]) * h + x[t]
        total = total + h
    return h, total


def layer_norm(m: Cell, x: Tensor) -> object:
    h, outputs = torch.zeros(BATCH, WIDTH, dtype=x.dtype), []
    for t in range(x.shape[0]):
        h = torch.tanh(m.norm(m.square(h) + x[t]))
        outputs.append(h)
    return torch.stack(outputs)


def crf_forward(m: Cell, x: Tensor) -> object:
    alpha = x[0]
    for t in range(1, x.shape[0]):
        alpha = torch.logsumexp(alpha.unsqueeze(2) + m.transitions, 1) + x[t]
    return torch.logsumexp(alpha, 1)


def first_step_differs(m: Cell, x: Tensor) -> object:
    h = torch.tanh(x[0]) * 2
    for t in range(1, x.shape[0]):
        h = torch.tanh(m.square(h) + x[t])
    return h


def no_input(m: Cell, x: Tensor) -> object:
    h = x[0]
    for _ in range(x.shape[0]):
        h = h + 0.1 * torch.tanh(m.square(h))
    return h


CELLS = [
    lstm, gru_reset_inside, gru_reset_outside, reversed_rnn, rnn_over_unbind, rnn_over_split, batch_first,
    two_states_swapped, masked, elementwise, layer_norm, crf_forward, first_step_differs, no_input,
]  # fmt: skip


def rolled(model: nn.Module, x: Tensor) -> int:
    ledger = run_passes(capture(model, (x,)), registry.earlier_than("unused_steps"))
    return sum(f.count for f in ledger.fired if f.pass_name in ("roll_loops", "roll_whole_loops"))


@pytest.mark.sampled
@pytest.mark.parametrize("loop", CELLS, ids=lambda loop: loop.__name__)
def test_a_loop_is_right_and_its_launches_do_not_grow(loop: Step) -> None:
    torch.manual_seed(0)
    model = Cell(loop).eval()
    precise = copy.deepcopy(model).double()
    fused = fuse.compile(model)
    launches = set()
    for length in LENGTHS:
        x = torch.randn(length, BATCH, WIDTH)
        with torch.no_grad():
            got, eager, exact = fused(x), model(x), precise(x.double())
        for mine, theirs, reference in zip(*map(tree_leaves, (got, eager, exact)), strict=True):
            assert mine.dtype == theirs.dtype
            assert mine.stride() == theirs.stride()
            error = (theirs.double() - reference).abs().max()
            assert (mine.double() - reference).abs().max() <= 2 * error + 1e-5
        assert fused.last_run is not None
        assert not fused.last_run.fallbacks
        assert rolled(model, x) == 1
        launches.add(fused.last_run.launches)
    assert len(launches) == 1, launches


def views_of_what_is_collected(m: Cell, x: Tensor) -> object:
    h, outputs = x[0], []
    for step in x:
        h = torch.tanh(m.square(h) + step)
        outputs.append(h)
    collected = torch.stack(outputs, 1)
    return collected, collected.view(-1, WIDTH) + 1, collected[:, -1] * 2


@pytest.mark.parametrize("missing", ["kernel", "compiler"])
def test_without_a_kernel_a_loop_gives_what_its_steps_give(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*source: object) -> None:
        raise CompilerMissing("no C++ compiler")

    if missing == "kernel":
        monkeypatch.setattr(schedule, "lower_loop", lambda *loop: Declined("no kernel today"))
        monkeypatch.setattr(schedule, "lower_with_ends", lambda *loop: Declined("no kernel today"))
    else:
        monkeypatch.setattr(making, "program_of", no_compiler)
    with pytest.warns(UserWarning, match="no kernel today|no C"):
        report = check(Cell(views_of_what_is_collected).eval(), (torch.randn(8, BATCH, WIDTH),))
    # what is missing shows in the launches, which are more than predicted, and in nothing else
    assert [problem for problem in report.problems if "predicted" not in problem] == []
    assert report.observed[1] > 8


def changed_body(m: Cell, x: Tensor) -> object:
    h = x[0]
    for t in range(6):
        h = torch.tanh(m.square(h) + x[t]) if t != 3 else torch.sigmoid(m.square(h) + x[t])
    return h


def extra_read_of_the_state(m: Cell, x: Tensor) -> object:
    h = x[0]
    for t in range(6):
        h = torch.tanh(m.square(h) + (x[t] if t != 3 else h))
    return h


def number_that_no_tensor_stands_for(m: Cell, x: Tensor) -> object:
    h = x[0]
    for t in range(6):
        h = torch.tanh(F.leaky_relu(m.square(h), 0.1 * t) + x[t])
    return h


def input_at_squares(m: Cell, x: Tensor) -> object:
    h = x[0]
    for t in range(6):
        h = torch.tanh(m.square(h) + x[t * t % 7])
    return h


NEAR_MISSES = [changed_body, extra_read_of_the_state, number_that_no_tensor_stands_for, input_at_squares]


@pytest.mark.parametrize("loop", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses_stay_and_are_right(loop: Step) -> None:
    model = Cell(loop).eval()
    x = torch.randn(8, BATCH, WIDTH)
    assert rolled(model, x) == 0
    with torch.no_grad():
        torch.testing.assert_close(fuse.compile(model)(x), model(x))


def test_stacked_and_following_loops_all_roll() -> None:
    def two_layers(m: Cell, x: Tensor) -> object:
        forward, backward = F.relu(x[0]), F.relu(x[0])
        for t in range(x.shape[0]):
            forward = torch.tanh(m.square(forward) + x[t])
        for t in range(x.shape[0]):
            backward = torch.sigmoid(m.square(backward) + x[-1 - t])
        return forward, backward

    model = Cell(two_layers).eval()
    x = torch.randn(8, BATCH, WIDTH)
    assert rolled(model, x) == 2
    with torch.no_grad():
        torch.testing.assert_close(fuse.compile(model)(x), model(x))


def test_several_results_of_one_operator_read_step_by_step_are_no_failure() -> None:
    graph = capture(Cell(lambda m, x: [row * 2 + 1 for row in torch.unbind_copy(x)]), (torch.randn(8, 3),))
    assert run_passes(graph).failed == ()


@pytest.mark.parametrize("dim", [0, 1])
def test_views_of_states_as_they_were_before_each_step_are_as_many_as_the_steps(dim: int) -> None:
    """The last state has no such view: what the loop keeps of it belongs to no piece."""

    def before_each(m: Cell, x: Tensor) -> object:
        h, kept = m.square.bias.expand(BATCH, WIDTH), []
        for step in x:
            kept.append(h.unsqueeze(dim))
            h = torch.tanh(m.square(h) + step)
        return torch.cat(kept, dim), h

    with torch.no_grad():
        report = check(Cell(before_each).eval(), (torch.randn(9, BATCH, WIDTH),))
    assert report.passed, str(report)
    assert not report.fallbacks


def test_a_loop_takes_no_name_that_another_has() -> None:
    def two_loops(m: Cell, x: Tensor) -> object:
        a = b = x[0]
        for step in x:
            a = torch.tanh(a * 0.5 + step)
        for step in x:
            b = torch.sigmoid(b - step)
        return a, b

    model, x = Cell(two_loops), torch.randn(6, BATCH, WIDTH)
    graph = capture(model, (x,))
    run_passes(graph, ["roll_loops"], fuel=1)
    del graph.meta["loops_made"]  # as where gradients were taken loop by loop: the graph is another one then
    run_passes(graph, ["roll_loops"])
    assert len({node.target for node in graph.graph.find_nodes(op="call_module")}) == 2
    for made, expected in zip(tree_leaves(graph(x)), two_loops(model, x), strict=True):
        torch.testing.assert_close(made, expected)
