"""What the next step does not need is done for all steps at once behind the loop, and what it needs stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuse.testing import assert_fuses

BATCH, WIDTH, WIDE, FEW = 3, 80, 256, 5
LENGTHS = (7, 12)


class Model(nn.Module):
    def __init__(self, run: Callable[[Model, Tensor], object]) -> None:
        super().__init__()
        self.run = run
        self.square, self.wide, self.few = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDE, FEW))
        self.again = nn.Linear(WIDE, FEW)

    def forward(self, x: Tensor) -> object:
        return self.run(self, x)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(x + self.square(h))


def large_output_layer(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for step in x:
        h = m.step(step, h)
        outputs.append(m.wide(h))
    return torch.stack(outputs), h


def large_output_layer_batch_first(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for step in x:
        h = m.step(step, h)
        outputs.append(F.gelu(m.wide(h)))
    return torch.stack(outputs, 1)


def softmax_of_scores(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for step in x:
        h = m.step(step, h)
        outputs.append(F.log_softmax(m.wide(h), -1))
    return torch.stack(outputs)


def two_layers_and_the_input(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for t in reversed(range(len(x))):
        h = m.step(x[t], h)
        outputs.append(m.again(torch.relu(m.wide(h))) * x[t][:, :FEW])
    return torch.cat(outputs[::-1]), h


def best_scores(m: Model, x: Tensor) -> object:
    h, best, where = x[0], [], []
    for step in x:
        h = m.step(step, h)
        value, index = m.wide(h).max(1)
        best.append(value)
        where.append(index)
    return torch.stack(best), torch.stack(where)


def sum_of_losses(m: Model, x: Tensor) -> object:
    h, loss = x[0], 0.0
    for t in range(len(x) - 1):
        h = m.step(x[t], h)
        loss = loss + F.mse_loss(m.square(h), x[t + 1])
    return loss / len(x)


def sum_of_cross_entropies(m: Model, x: Tensor) -> object:
    labels, h, loss = x[:, :, 0].abs().long(), x[0], x.new_ones(())
    for step, label in zip(x, labels, strict=True):
        h = m.step(step, h)
        loss = loss + F.cross_entropy(m.few(h), label)
    return loss, h


def sum_of_halved_squares(m: Model, x: Tensor) -> object:
    h, loss = x[0], x.new_zeros(())
    for step in x:
        h = m.step(step, h)
        loss = loss + 0.5 * m.wide(h).square().sum()
    return loss, h


def count_of_signs(m: Model, x: Tensor) -> object:
    h, count = x[0], torch.zeros(BATCH, dtype=torch.long)
    for step in x:
        h = m.step(step, h)
        count = count + (m.wide(h) > 0).sum(1)
    return count


LEAVE = {
    large_output_layer: {"launches": 2, "gemm": 1},
    large_output_layer_batch_first: {"launches": 2},
    softmax_of_scores: {"launches": 3, "gemm": 1},
    two_layers_and_the_input: {"launches": 5, "gemm": 1},
    best_scores: {"launches": 3, "gemm": 1},
    sum_of_losses: {"launches": 4, "gemm": 1},
    sum_of_halved_squares: {"launches": 3, "gemm": 1},
    sum_of_cross_entropies: {"launches": 5},
    count_of_signs: {"launches": 3, "gemm": 1},
}


@pytest.mark.sampled
@pytest.mark.parametrize("run", LEAVE, ids=lambda run: run.__name__)
def test_what_no_state_needs_is_done_once_behind_the_loop(run: Callable[[Model, Tensor], object]) -> None:
    torch.manual_seed(0)
    model, expected = Model(run).eval(), LEAVE[run]
    for length in LENGTHS:
        with torch.no_grad():
            report = assert_fuses(model, torch.randn(length, BATCH, WIDTH), launches=expected["launches"])
        assert report.after.by_kind["loop"] == 1
        assert report.after.by_kind.get("gemm", 0) == expected.get("gemm", 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_as_right_in_other_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        report = assert_fuses(Model(sum_of_losses).eval().to(dtype), torch.randn(7, BATCH, WIDTH, dtype=dtype))
    assert report.after.by_kind["loop"] == 1


def small_output_layer(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for step in x:
        h = m.step(step, h)
        outputs.append(m.few(h))
    return torch.stack(outputs)


def output_that_is_fed_back(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for step in x:
        scores = m.wide(h)
        h = m.step(step + scores[:, :WIDTH], h)
        outputs.append(scores)
    return torch.stack(outputs)


def sum_that_is_read(m: Model, x: Tensor) -> object:
    h, total = x[0], x.new_zeros(BATCH, WIDTH)
    for step in x:
        h = m.step(step - 0.1 * total, h)
        total = total + torch.tanh(h)
    return total


def state_many_times_its_result(m: Model, x: Tensor) -> object:
    s, outputs = x.new_zeros(BATCH, WIDTH, WIDTH), []
    for step in x:
        s = 0.9 * s + step.unsqueeze(1) * step.unsqueeze(2)
        outputs.append((step.unsqueeze(1) @ s).squeeze(1))
    return torch.stack(outputs)


STAY = {small_output_layer: 1, output_that_is_fed_back: 1, sum_that_is_read: 1, state_many_times_its_result: 1}


@pytest.mark.parametrize("run", STAY, ids=lambda run: run.__name__)
def test_near_misses_stay_in_the_step(run: Callable[[Model, Tensor], object]) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        report = assert_fuses(Model(run).eval(), torch.randn(7, BATCH, WIDTH), launches=STAY[run])
    assert report.after.by_kind["loop"] == 1


def dropped_out(m: Model, x: Tensor) -> object:
    h, outputs = x[0], []
    for step in x:
        h = m.step(step, h)
        outputs.append(F.dropout(m.wide(h), 0.5, training=True))
    return torch.stack(outputs)


def test_random_numbers_are_drawn_step_by_step() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        assert_fuses(Model(dropped_out).train(), torch.randn(7, BATCH, WIDTH))
