"""The kernel of a loop computes what little is in front of it and behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.graph.loop_with_ends import LoopWithEnds
from fuse.kernel.kernel import Kernel
from fuse.kernel.loops.lower_loops import lower_with_ends
from fuse.testing import assert_fuses

BATCH, WIDTH = 3, 20
NAME = "loop_ends"


class Model(nn.Module):
    def __init__(self, run: Callable[[Model, Tensor], object]) -> None:
        super().__init__()
        self.run, self.cell, self.norm = run, nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.start = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> object:
        return self.run(self, x)


def steps(m: Model, h: Tensor, x: Tensor) -> Tensor:
    for step in x:
        h = torch.tanh(m.cell(h) + step)
    return h


def in_front(m: Model, x: Tensor) -> object:
    return steps(m, m.start + x[0], x[1:])


def behind(m: Model, x: Tensor) -> object:
    return torch.logsumexp(steps(m, torch.zeros(BATCH, WIDTH), x) + m.start, dim=1)


def at_both_ends(m: Model, x: Tensor) -> object:
    return torch.softmax(steps(m, m.norm(m.start + x[0]), x) * 2 - m.start, 1)


def read_by_others_too(m: Model, x: Tensor) -> object:
    first = m.start + x[0]
    last = steps(m, first, x)
    return first, last, torch.exp(last - first)


def a_part_of_a_state(m: Model, x: Tensor) -> object:
    h = steps(m, (m.start + x[0]).sin(), x)
    return h, h[:, 1:5].t().amax(1)


def the_same_in_every_step(m: Model, x: Tensor) -> object:
    h, scale = torch.zeros(BATCH, WIDTH), torch.sigmoid(m.start)
    for step in x:
        h = torch.tanh(m.cell(h) * scale + step)
    return h


def one_step_of_what_is_kept(m: Model, x: Tensor) -> object:
    h, kept = torch.zeros(BATCH, WIDTH), []
    for step in x:
        h = torch.tanh(m.cell(h) + step)
        kept.append(h * 2 + step)
    return torch.stack(kept), kept[2].exp() - 1


def a_look_up(m: Model, x: Tensor) -> object:
    h = steps(m, m.cell.weight[torch.tensor([0, 3, 5])] + x[0], x)
    return h.gather(1, h.argmax(1, keepdim=True))


ONE = [
    in_front,
    behind,
    at_both_ends,
    read_by_others_too,
    a_part_of_a_state,
    the_same_in_every_step,
    one_step_of_what_is_kept,
    a_look_up,
]


@pytest.mark.parametrize("run", ONE, ids=lambda run: run.__name__)
def test_small_ends_join_the_loop(run: Callable[[Model, Tensor], object]) -> None:
    with torch.no_grad():
        assert_fuses(Model(run).eval(), torch.randn(7, BATCH, WIDTH), launches=1, fired={NAME: 1})


def test_ends_join_where_the_batch_comes_first() -> None:
    def run(m: Model, x: Tensor) -> object:
        h = m.start + x[:, 0]
        for t in range(1, x.shape[1]):
            h = torch.tanh(m.cell(h) + x[:, t])
        return h.softmax(1)

    with torch.no_grad():
        assert_fuses(Model(run).eval(), torch.randn(BATCH, 8, WIDTH), launches=1, fired={NAME: 1})


def all_steps_in_front(m: Model, x: Tensor) -> object:
    return steps(m, torch.zeros(BATCH, WIDTH), x.exp() + 1)


def all_steps_behind(m: Model, x: Tensor) -> object:
    h, kept = torch.zeros(BATCH, WIDTH), []
    for step in x:
        h = torch.tanh(m.cell(h) + step)
        kept.append(h)
    return torch.stack(kept).mean(0)


def a_launch_between(m: Model, x: Tensor) -> object:
    first = m.start + x[0]
    return steps(m, first, x + first.sort(1).values)


def a_launch_beside(m: Model, x: Tensor) -> object:
    h = steps(m, torch.zeros(BATCH, WIDTH), x)
    return h * h.sort(1).values


def a_product_behind(m: Model, x: Tensor) -> object:
    return steps(m, torch.zeros(BATCH, WIDTH), x) @ m.cell.weight


NONE = {
    all_steps_in_front: "",
    all_steps_behind: "grows with the number of steps",
    a_launch_between: "another launch reads it before the loop",
    a_launch_beside: "it waits for another launch behind the loop",
    a_product_behind: "",
}


@pytest.mark.parametrize("run", NONE, ids=lambda run: run.__name__)
def test_what_stands_apart_stays_apart(run: Callable[[Model, Tensor], object]) -> None:
    with torch.no_grad():
        report = assert_fuses(Model(run).eval(), torch.randn(7, BATCH, WIDTH), fired={NAME: 0})
    assert any(NONE[run] in one.reason for one in report.rejected if one.pass_name == NAME) or not NONE[run]


def test_what_is_worth_threads_keeps_them() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x[0].exp().sin()
            for step in x:
                h = torch.tanh(h + step)
            return h

    with torch.no_grad():
        report = assert_fuses(Wide(), torch.randn(5, 64, 512), fired={NAME: 0})
    assert "a region beside a loop is worth several threads" in [one.reason for one in report.rejected]


@pytest.mark.parametrize("run", [at_both_ends, read_by_others_too, one_step_of_what_is_kept], ids=lambda r: r.__name__)
def test_gradients_are_right_with_ends_in_the_loop(run: Callable[[Model, Tensor], object]) -> None:
    report = check(Model(run), (torch.randn(6, BATCH, WIDTH),), train=True)
    assert report.passed, report


@given(
    length=st.integers(4, 9),
    batch=st.integers(1, 4),
    width=st.integers(1, 18),
    batch_first=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    reduced=st.integers(0, 1),
)
@settings(max_examples=6, deadline=None)
def test_any_shape(length: int, batch: int, width: int, batch_first: bool, dtype: torch.dtype, reduced: int) -> None:
    class Decay(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x.select(int(batch_first), 0) * 0.5
            for step in x.unbind(int(batch_first)):
                h = 0.9 * h + step.sin()
            return h.exp().sum(reduced)

    x = torch.randn((batch, length, width) if batch_first else (length, batch, width), dtype=dtype)
    with torch.no_grad():
        assert_fuses(Decay(), x)


def test_one_kernel_serves_all_lengths() -> None:
    def source(length: int) -> str:
        model = Model(at_both_ends)
        graph = fuse.capture(model, (torch.randn(BATCH, length, WIDTH).transpose(0, 1),))
        fuse.run_passes(graph)
        (whole,) = (module for module in graph.children() if isinstance(module, LoopWithEnds))
        kernel = lower_with_ends(whole)
        assert isinstance(kernel, Kernel)
        return kernel.source

    assert source(7) == source(13)


def test_a_declared_length_is_served_by_it() -> None:
    model = Model(at_both_ends).eval()
    fused = fuse.compile(model, dynamic_shapes={"x": {0: torch.export.Dim("T")}})
    with torch.no_grad():
        for length in (9, 40, 64):
            x = torch.randn(length, BATCH, WIDTH)
            torch.testing.assert_close(fused(x), model(x))
    assert fused.last_run.launches == 1
