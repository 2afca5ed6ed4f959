"""Loops that tempt a roller: values, layouts, writes, aliases and launches are eager's, rolled or not.

Each loop gets a model with weights and an input ``[8, 3, 20]``. ``tests/fuzz`` draws more at random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import CheckReport, check
from fuse.graph.capture import capture
from fuse.rewrite import registry
from fuse.rewrite.pipeline import run_passes

STEPS, BATCH, WIDTH = 8, 3, 20
X = torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
Step = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A loop under test, with weights and buffers for it."""

    def __init__(self, loop: Callable[..., object], width: int = WIDTH) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.loop = loop
        self.w = nn.Parameter(torch.randn(width, width, generator=generator) * max(width, 1) ** -0.5)
        self.u = nn.Parameter(torch.randn(width, width, generator=generator) * max(width, 1) ** -0.5)
        self.b = nn.Parameter(torch.randn(width, generator=generator))
        self.gates = nn.Parameter(torch.randn(width, 4 * width, generator=generator) * max(width, 1) ** -0.5)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("table", torch.randn(3, width, generator=generator))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, *inputs: Tensor) -> object:
        return self.loop(self, *inputs)


def step(m: Model, x: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(x + h @ m.w)


def rolled(model: nn.Module, *inputs: Tensor) -> int:
    ledger = run_passes(capture(model, inputs), registry.earlier_than("unused_steps"))
    return sum(f.count for f in ledger.fired if f.pass_name in ("roll_loops", "roll_whole_loops"))


def assert_as_eager(model: Model, *inputs: Tensor, tolerance: float | None = None) -> CheckReport:
    report = check(model, inputs, atol=tolerance, rtol=tolerance)
    assert report.passed, str(report)
    assert report.fallbacks == ()
    return report


# ---- steps that differ -----------------------------------------------------------------------------------------------


def another_weight_in_the_middle(m: Model, x: Tensor) -> object:
    h = x[0]
    for t in range(STEPS):
        h = torch.tanh(x[t] + h @ (m.w if t != 4 else m.u))
    return h


def another_weight_from_the_middle(m: Model, x: Tensor) -> object:
    h = x[0]
    for t in range(STEPS):
        h = torch.tanh(x[t] + h @ (m.w if t < 4 else m.u))
    return h


def states_swapped_once(m: Model, x: Tensor) -> object:
    a, b = x[0], x[1]
    for t in range(STEPS):
        a, b = step(m, x[t], a), step(m, x[t], b)
        if t == 4:
            a, b = b, a
    return a, b


def constant_not_affine(m: Model, x: Tensor) -> object:
    h = x[0]
    for t in range(STEPS):
        h = step(m, x[t], h) * (t * t % 5)
    return h


def constant_of_each_step(m: Model, x: Tensor) -> object:
    h = x[0]
    for t in range(STEPS):
        h = step(m, x[t], h) + torch.tensor(float(t * t))
    return h


def mask_of_each_step(m: Model, x: Tensor) -> object:
    h, lengths = x[0], torch.tensor([3, 5, 8])
    for t in range(STEPS):
        h = torch.where((t < lengths).unsqueeze(1), step(m, x[t], h), h)
    return h


def smaller_and_smaller(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for t in range(STEPS):
        rows = BATCH - t // 3
        h = step(m, x[t, :rows], h[:rows])
        outputs.append(h)
    return outputs


def longer_and_longer(m: Model, x: Tensor) -> object:
    seen = x[0].unsqueeze(0)
    for t in range(STEPS):
        seen = torch.cat([seen, step(m, x[t], seen.mean(0)).unsqueeze(0)])
    return seen


def loops_in_loops(m: Model, x: Tensor) -> object:
    h = x[0]
    for _ in range(5):
        for t in range(STEPS // 2):
            h = step(m, x[t], h)
        h = h * 0.9
    return h


@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize(
    "loop",
    [
        another_weight_in_the_middle,
        another_weight_from_the_middle,
        states_swapped_once,
        constant_not_affine,
        constant_of_each_step,
        mask_of_each_step,
        smaller_and_smaller,
        longer_and_longer,
        loops_in_loops,
    ],
    ids=lambda loop: loop.__name__,
)
def test_steps_that_differ(loop: Callable[..., object]) -> None:
    assert_as_eager(Model(loop), X)


# ---- what is read and written between the steps ----------------------------------------------------------------------


def one_state_read_after_its_step(m: Model, x: Tensor) -> object:
    h, kept = x[0], []
    for t in range(STEPS):
        h = step(m, x[t], h)
        if t == 5:
            kept.append(h + 1)
    return h, kept


def input_written_behind(m: Model, x: Tensor) -> object:
    h = x[0].clone()
    for t in range(STEPS):
        h = step(m, x[t], h)
        x[t] = h * 2
    return h


def input_written_ahead(m: Model, x: Tensor) -> object:
    h = x[0].clone()
    for t in range(STEPS - 1):
        h = step(m, x[t], h)
        x[t + 1] += h
    return h


def input_written_once(m: Model, x: Tensor) -> object:
    h = x[0].clone()
    for t in range(STEPS):
        h = step(m, x[t], h)
        if t == 3:
            x[6].mul_(2)
    return h


def buffers_written(m: Model, x: Tensor) -> object:
    h = x[0]
    for t in range(STEPS):
        h = step(m, x[t] + m.table, h)
        m.table.mul_(0.9)
        m.count += 1
    return h


def state_is_a_buffer(m: Model, x: Tensor) -> object:
    for t in range(STEPS):
        m.table.copy_(step(m, x[t], m.table))
    return m.table


def state_is_an_input_written(m: Model, x: Tensor) -> object:
    h = x[0]
    for t in range(STEPS):
        h.copy_(step(m, x[t], h))
    return h


def view_of_a_state_written(m: Model, x: Tensor) -> object:
    h = x[0].clone()
    for t in range(STEPS):
        flat = h.view(-1)
        h = step(m, x[t], h)
        flat.zero_()
    return h


def rows_written_and_read(m: Model, x: Tensor) -> object:
    rows = torch.zeros(STEPS + 1, BATCH, WIDTH, dtype=x.dtype)
    for t in range(STEPS):
        rows[t + 1] = step(m, x[t], rows[t])
    return rows


def rows_written_again(m: Model, x: Tensor) -> object:
    rows, h = torch.zeros(3, BATCH, WIDTH, dtype=x.dtype), x[0]
    for t in range(STEPS):
        h = step(m, x[t], h)
        rows[t % 3] = h
    return rows


def total_in_place(m: Model, x: Tensor) -> object:
    total, h = torch.zeros(BATCH, WIDTH, dtype=x.dtype), x[0]
    for t in range(STEPS):
        h = step(m, x[t], h)
        total += h
    return total


@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize(
    "loop",
    [
        one_state_read_after_its_step,
        input_written_behind,
        input_written_ahead,
        input_written_once,
        buffers_written,
        state_is_a_buffer,
        state_is_an_input_written,
        view_of_a_state_written,
        rows_written_and_read,
        rows_written_again,
        total_in_place,
    ],
    ids=lambda loop: loop.__name__,
)
def test_reads_and_writes_between_steps(loop: Callable[..., object]) -> None:
    assert_as_eager(Model(loop), X)


# ---- memory that is shared -------------------------------------------------------------------------------------------


def state_starts_as_a_result(m: Model, x: Tensor) -> object:
    h = x[3]
    for t in range(STEPS):
        h = step(m, x[t], h)
    return h, x[3], x


def every_step_returned(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for t in range(STEPS):
        h = step(m, x[t], h)
        outputs.append(h)
    return outputs, h, outputs[0]


def views_of_what_is_collected(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for t in range(STEPS):
        h = step(m, x[t], h)
        outputs.append(h)
    collected = torch.stack(outputs, 1)
    return collected[:, -1], collected.transpose(0, 1), collected.view(-1, WIDTH), h


def what_is_collected_is_written(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for t in range(STEPS):
        h = step(m, x[t], h)
        outputs.append(h)
    collected = torch.stack(outputs, 1)
    collected[:, 3].zero_()
    outputs[4].add_(5)
    return collected, outputs[3], outputs[4], h


def collected_in_any_order(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for t in range(STEPS):
        h = step(m, x[t], h)
        outputs += [h, h]
    return torch.stack(outputs), torch.stack(outputs[::-2]), torch.stack(outputs[::2], -1), torch.cat(outputs[1:5])


def states_start_as_one_tensor(m: Model, x: Tensor) -> object:
    h = c = x[0]
    for t in range(STEPS):
        c = c * 0.5 + x[t]
        h = step(m, c, h)
    return h, c


def states_start_as_parts_of_one(m: Model, x: Tensor) -> object:
    both = torch.zeros(2 * BATCH, WIDTH, dtype=x.dtype)
    h, c = both.chunk(2)
    for t in range(STEPS):
        c = c * 0.5 + x[t]
        h = step(m, c, h)
    return h, c, both


def states_are_views_of_the_step(m: Model, x: Tensor) -> object:
    flat, turned = x[0].reshape(-1), x[1].t()
    for t in range(STEPS):
        flat = step(m, x[t], flat.view(BATCH, WIDTH)).view(-1)
        turned = (turned * 0.5 + x[t].t()).t().tanh().t()
    return flat, turned


@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize(
    "loop",
    [
        state_starts_as_a_result,
        every_step_returned,
        views_of_what_is_collected,
        what_is_collected_is_written,
        collected_in_any_order,
        states_start_as_one_tensor,
        states_start_as_parts_of_one,
        states_are_views_of_the_step,
    ],
    ids=lambda loop: loop.__name__,
)
def test_memory_that_is_shared(loop: Callable[..., object]) -> None:
    model = Model(loop)
    assert rolled(model, X)
    assert_as_eager(model, X)


def lstm(m: Model, x: Tensor, h: Tensor, c: Tensor) -> object:
    outputs = []
    for t in range(len(x)):
        i, f, g, o = (x[t].repeat(1, 4) + h @ m.gates).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs), h, c


def decay(m: Model, x: Tensor, h: Tensor, c: Tensor) -> object:
    for t in range(len(x)):
        h, c = torch.sigmoid(x[t]) * h + m.b, c * 0.5 + h
    return h, c


STATES = {
    "transposed": torch.randn(WIDTH, BATCH).t(),
    "every other": torch.randn(BATCH, 2 * WIDTH)[:, ::2],
    "a window": torch.randn(5, WIDTH + 4)[1:4, 3:-1],
    "a row for all": torch.randn(1, WIDTH).expand(BATCH, WIDTH),
    "a column for all": torch.randn(BATCH, 1).expand(BATCH, WIDTH),
    "one number": torch.randn(1, 1).expand(BATCH, WIDTH),
    "overlapping rows": torch.randn(3 * WIDTH).as_strided((BATCH, WIDTH), (5, 1)),
}
INPUTS = {
    "batch first": X.transpose(0, 1).contiguous().transpose(0, 1),
    "steps last": X.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "one step for all": X[:1].expand(STEPS, BATCH, WIDTH),
    "overlapping steps": torch.randn(STEPS + BATCH, WIDTH).as_strided((STEPS, BATCH, WIDTH), (WIDTH, WIDTH, 1)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("loop", [lstm, decay], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("layout", STATES)
def test_first_states_of_any_layout(loop: Callable[..., object], layout: str) -> None:
    model = Model(loop)
    assert rolled(model, X, STATES[layout], X[0]) == 1
    assert_as_eager(model, X, STATES[layout], STATES[layout])  # both states in the same memory


@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize("layout", INPUTS)
def test_inputs_of_any_layout(layout: str) -> None:
    model = Model(lstm)
    x = INPUTS[layout]
    assert rolled(model, x, X[0], X[1]) == 1
    assert_as_eager(model, x, x[0], x[1])


# ---- numbers and sizes -----------------------------------------------------------------------------------------------


def reductions(m: Model, x: Tensor, h: Tensor, c: Tensor) -> object:
    for t in range(len(x)):
        h = torch.logsumexp(h.unsqueeze(2) + m.w, 1) + x[t].max(1, keepdim=True)[0]
        c = (c * 0.5 + x[t]).softmax(1) + torch.relu(torch.maximum(c, x[t].clamp(-1, 1)))
    return h, c


NUMBERS = {
    "NaN and infinity": X.clone().index_put_(
        (torch.tensor([2, 3, 4]), torch.tensor([1, 0, 2]), torch.tensor([4, 1, 0])),
        torch.tensor([torch.nan, torch.inf, -torch.inf]),
    ),
    "nothing but -infinity": torch.full_like(X, -torch.inf),
    "denormals": X * 1e-39,
}


@pytest.mark.sampled
@pytest.mark.parametrize("loop", [lstm, decay, reductions], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_numbers_that_are_none(loop: Callable[..., object], numbers: str) -> None:
    x = NUMBERS[numbers]
    model = Model(loop)
    assert rolled(model, x, x[0], x[1]) == 1
    assert_as_eager(model, x, x[0], x[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    tolerance = None if dtype is torch.float64 else 0.05
    x = X.to(dtype)
    for loop in (lstm, decay, reductions):
        assert_as_eager(Model(loop).to(dtype), x, x[0], x[1], tolerance=tolerance)


def test_states_of_several_dtypes() -> None:
    def loop(m: Model, x: Tensor) -> object:
        precise, count, odd = torch.zeros(3, 20, dtype=torch.float64), torch.zeros(3, 20, dtype=torch.int64), x[0] > 0
        for t in range(STEPS):
            precise, count, odd = precise * 0.5 + x[t], count * 3 + odd, odd ^ (x[t] > 0)
        return precise, count, odd

    model = Model(loop)
    assert rolled(model, X) == 1
    assert_as_eager(model, X)


@pytest.mark.parametrize("size", [(STEPS, 0, WIDTH), (STEPS, BATCH, 0), (0, BATCH, WIDTH), (STEPS, 1, 1)], ids=str)
def test_sizes_of_zero_and_one(size: tuple[int, int, int]) -> None:
    x = torch.randn(size)

    def loop(m: Model, x: Tensor) -> object:
        h, outputs = torch.zeros(size[1:], dtype=x.dtype), [x.sum(0)]
        for t in range(len(x)):
            h = step(m, x[t], h)
            outputs.append(h)
        return torch.stack(outputs), h

    assert_as_eager(Model(loop, size[2]), x)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 1000])
def test_any_number_of_steps(steps: int) -> None:
    x = torch.randn(steps, BATCH, WIDTH)
    model = Model(decay)
    assert rolled(model, x, x[0], x[0]) == (steps > 3)
    assert_as_eager(model, x, x[0], x[0])


# ---- random operators ------------------------------------------------------------------------------------------------


def dropout(m: Model, x: Tensor) -> object:
    h = x[0]
    for t in range(STEPS):
        h = m.drop(step(m, x[t], h))
    return h


def noise(m: Model, x: Tensor) -> object:
    h = x[0]
    for t in range(STEPS):
        h = step(m, x[t], h) + torch.rand_like(h) * torch.bernoulli(torch.full_like(h, 0.5))
    return h, torch.rand(2)


def noise_that_nobody_reads(m: Model, x: Tensor) -> object:
    h = x[0]
    for t in range(STEPS):
        h = step(m, x[t], h)
        torch.rand(3)
    return h, torch.rand(2)


@pytest.mark.parametrize("loop", [dropout, noise, noise_that_nobody_reads], ids=lambda loop: loop.__name__)
def test_random_numbers_are_drawn_in_eagers_order(loop: Callable[..., object]) -> None:
    model = Model(loop).train()
    with torch.no_grad():
        assert rolled(model, X) == (loop is not noise)  # draws that are all made before the loop keep their order
    assert_as_eager(model, X)


# ---- a model that lives ----------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def both(model: Model, fused: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        for mine, eager in zip(fused(x, x[0], x[1]), model(x, x[0], x[1]), strict=True):
            torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize("loop", [lstm, decay, reductions], ids=lambda loop: loop.__name__)
def test_changes_of_weights_take_effect(loop: Callable[..., object]) -> None:
    model = Model(loop)
    fused = fuse.compile(model)
    both(model, fused, X)
    model.gates.data.mul_(0.5)
    model.b.data[3] = 7
    model.w.data.neg_()
    both(model, fused, X)
    model.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
    both(model, fused, X)
    fused.load_state_dict(Model(loop).state_dict())
    both(model, fused, X)
    twin = copy.deepcopy(fused)
    twin.gates.data.zero_()
    twin.b.data.zero_()
    both(model, fused, X)
    changed = copy.deepcopy(model)
    changed.gates.data.zero_()
    changed.b.data.zero_()
    both(changed, twin, X)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("loop", [lstm, decay, reductions], ids=lambda loop: loop.__name__)
def test_any_number_of_threads_and_of_callers(loop: Callable[..., object]) -> None:
    model = Model(loop, 128)
    fused = fuse.compile(model)
    several = [torch.randn(30, 16, 128) for _ in range(12)]
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        both(model, fused, several[0])
    torch.set_num_threads(2)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda x: both(model, fused, x), several))
