"""What a report says of loops: launches of a step, what became of each loop, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fuse
from fuse.report.loops import Repetition, RolledLoop, formula
from fuse.report.report import Report
from fuse.rewrite.registry import register_pass, unregister
from fuse.rewrite.verdict import Verdict, rewrite
from tests.samples import Cell


class Normalised(Cell):
    """A step that has a reduction and a product of the input: unless it is small, the product leaves the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, states = torch.zeros(x.shape[1], 4), []
        for step in x:
            h = torch.softmax(self.project(step) + self.recurrent(h), 1)
            states.append(h)
        return torch.stack(states)


class BothWays(Cell):
    """One function with a loop in it, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.backward_recurrent = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.over(x, self.recurrent) + self.over(x.flip(1), self.backward_recurrent)

    def over(self, x: Tensor, recurrent: nn.Module) -> Tensor:
        h = torch.zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h = torch.tanh(recurrent(h) + x[:, t])
        return h


class EncoderDecoder(Cell):
    """Two loops of different lengths that call one function in each of their steps."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.zeros(2, 4)
        for t in range(x.shape[1]):
            h = self.step(h, x[:, t])
        for t in range(y.shape[1]):
            h = self.step(torch.sin(h), y[:, t])
        return h

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.recurrent(h) + x)


def unrolled(model: nn.Module, *args: Tensor) -> Report:
    rolling = {"roll_loops", "roll_whole_loops"}
    passes = [name for name in fuse.show(model, args).to_dict()["passes"] if name not in rolling]
    return fuse.show(model, args, passes=passes)


def figures(loop: Repetition) -> tuple[int, int, int]:
    return loop.trip_count, loop.launches_per_step_before, loop.launches_per_step_after


@pytest.mark.parametrize("steps", [4, 64])
def test_a_rolled_loop_leaves_no_launch_of_a_step_however_few_they_are(steps: int) -> None:
    (loop,) = fuse.show(Cell().eval(), (torch.ones(2, steps, 4),)).loops
    assert figures(loop) == (steps, 3, 0)
    assert loop.source.startswith("samples.py:")


def test_a_rolled_loop_says_what_it_carries_reads_and_keeps() -> None:
    (loop,) = fuse.show(Normalised(), (torch.ones(8, 512, 4),)).loops
    assert loop.rolled == (RolledLoop(8, states=("f32[512, 4]",), reads=("f32[512, 4]",), keeps=("f32[512, 4]",)),)
    assert loop.peeled == 0


def test_what_left_the_loop_is_named_with_the_reason() -> None:
    (loop,) = fuse.show(Normalised(), (torch.ones(8, 512, 4),)).loops
    (hoisted,) = loop.outside
    assert hoisted.startswith("gemm (test_loops.py:")
    assert loop.reasons == ("roll_whole_loops: a step has reductions: the input's products leave the loop",)


def test_a_loop_left_as_it_was_keeps_its_launches() -> None:
    (loop,) = unrolled(Cell(), torch.ones(2, 64, 4)).loops
    assert figures(loop) == (64, 3, 2)
    assert (loop.rolled, loop.outside) == ((), ())
    assert loop.reasons == ("the passes that roll loops were left out",)


def test_a_loop_of_few_steps_says_so() -> None:
    (loop,) = fuse.show(Cell(), (torch.ones(2, 3, 4),)).loops
    assert figures(loop)[0] == 3
    assert loop.rolled == ()
    assert "fewer than 4 steps" in loop.reasons[0]


def test_a_loop_that_carries_nothing_says_so() -> None:
    class Independent(Cell):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([torch.cumsum(self.recurrent(step), 0) for step in x])

    (loop,) = fuse.show(Independent(), (torch.ones(8, 2, 4),)).loops
    assert loop.rolled == ()
    assert any("no value is carried" in reason for reason in loop.reasons)


def test_a_loop_in_a_function_called_twice_is_two_loops() -> None:
    one, other = fuse.show(BothWays(), (torch.ones(2, 8, 4),)).loops
    assert figures(one) == figures(other) == (8, 3, 0)
    assert one.rolled == other.rolled != ()


def test_launches_of_a_function_that_two_loops_call_are_those_of_each() -> None:
    one, other = unrolled(EncoderDecoder(), torch.ones(2, 20, 4), torch.ones(2, 7, 4)).loops
    assert figures(one) == (20, 3, 2)
    assert figures(other) == (7, 4, 2)


def test_a_loop_of_lines_of_their_own_is_found_by_its_kernel() -> None:
    class Written(Cell):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(2, 4)
            h = torch.tanh(self.recurrent(h) + x[:, 0])
            h = torch.tanh(self.recurrent(h) + x[:, 1])
            h = torch.tanh(self.recurrent(h) + x[:, 2])
            return torch.tanh(self.recurrent(h) + x[:, 3])

    (loop,) = fuse.show(Written(), (torch.ones(2, 4, 4),)).loops
    assert figures(loop) == (4, 3, 0)


def test_launches_without_a_line_are_of_no_loop() -> None:
    def without_lines(graph: GraphModule) -> Iterator[Verdict]:
        """Forget the lines of all operators."""
        output = graph.graph.output_node()
        yield rewrite(output, lambda: [n.meta.update(source="") for n in graph.graph.nodes if n.op == "call_function"])

    register_pass(enabled=False)(without_lines)
    try:
        (loop,) = fuse.show(Normalised(), (torch.ones(8, 2, 4),), passes=["without_lines"]).loops
    finally:
        unregister("without_lines")
    assert figures(loop) == (8, 4, 0)


def test_straight_code_has_no_loops() -> None:
    report = fuse.show(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(2, 4),))
    assert report.loops == ()
    assert "inside the loops" not in str(report)


def test_steps_that_differ_are_peeled() -> None:
    kernel = RolledLoop(7, ("f32[4]",), (), ())
    assert Repetition(8, 3, 0, "m.py:1", (kernel,)).peeled == 1
    assert Repetition(3, 16, 2, "m.py:1", (kernel, kernel)).peeled == 0  # a stack of loops, not steps


@pytest.mark.parametrize(
    ("launches", "parts", "text"),
    [
        (771, [(12, 64)], "3 + 12*T"),
        (63, [(1, 64)], "-1 + 1*T"),
        (9, [(2, 3), (0, 4)], "3 + 2*T1"),
        (1204, [(12, 50), (12, 50)], "4 + 24*T"),
    ],
)
def test_launches_are_said_in_terms_of_the_steps(launches: int, parts: list[tuple[int, int]], text: str) -> None:
    assert formula(launches, parts) == text


def test_the_table_has_the_formula_and_the_facts() -> None:
    text = str(fuse.show(Normalised(), (torch.ones(8, 512, 4),)))
    assert "launches = 2 + 4*T -> 2  with T = 8" in text
    for expected in (
        "one kernel for all steps",
        "1: f32[512, 4] a step",
        "gemm (test_loops.py:",
        "a step has reductions",
    ):
        assert expected in text


def test_equal_loops_are_described_once() -> None:
    text = str(fuse.show(BothWays(), (torch.ones(2, 8, 4),)))
    assert text.count("one kernel for all steps") == 1


def test_json_says_what_the_table_does() -> None:
    (loop,) = fuse.show(Normalised(), (torch.ones(8, 512, 4),)).to_dict()["loops"]
    assert json.loads(json.dumps(loop)) == loop
    assert loop["rolled"] == [
        {
            "trip_count": 8,
            "states": ["f32[512, 4]"],
            "reads": ["f32[512, 4]"],
            "keeps": ["f32[512, 4]"],
            "launches_per_step": 0,
        }
    ]
    assert len(loop["outside"]) == len(loop["reasons"]) == 1
