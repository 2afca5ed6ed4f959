"""What is drawn of a graph."""

from __future__ import annotations

import operator
import random
import time

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fuse.graph.capture import capture
from fuse.graph.loop import Loop, LoopSpec, StepInput
from fuse.report.pictures.reading import describe
from fuse.report.pictures.sketch import Sketch, boxes_of, sketch
from fuse.report.show import show
from tests.samples import Cell


def squared(x: Tensor) -> Tensor:
    return torch.mm(x, x)


class TwoLines(nn.Module):
    """Two different operators in turn, on two lines and in an order that never repeats."""

    def forward(self, x: Tensor) -> Tensor:
        order = random.Random(0)
        for _ in range(600):
            x = torch.tanh(x) if order.random() < 0.5 else squared(x)
        return x


def fuse_by_hand(graph: GraphModule, names: list[str], number: int = 0) -> None:
    """Move the nodes of these names, the last of which is the only result, into a region."""
    nodes = [node for node in graph.graph.nodes if node.name in names]
    inside = Graph()
    copies: dict[Node, Node] = {}
    outside = [value for node in nodes for value in node.all_input_nodes if value not in nodes]
    for value in dict.fromkeys(outside):
        copies[value] = inside.placeholder(value.name)
        copies[value].meta = dict(value.meta)
    for node in nodes:
        copies[node] = inside.node_copy(node, copies.__getitem__)
    result = nodes[-1]
    inside.output((copies[result],))
    region = GraphModule(nn.Module(), inside)
    region.meta["kind"] = "region"
    graph.add_submodule(f"region_{number}", region)
    with graph.graph.inserting_after(result):
        call = graph.graph.call_module(f"region_{number}", tuple(dict.fromkeys(outside)))
    call.meta = {"val": (result.meta["val"],), "source": result.meta["source"]}
    with graph.graph.inserting_after(call):
        read = graph.graph.call_function(operator.getitem, (call, 0))
    read.meta = dict(result.meta)
    result.replace_all_uses_with(read)
    for node in reversed(nodes):
        graph.graph.erase_node(node)
    graph.graph.lint()


def fused_cell(steps: int) -> GraphModule:
    """The graph of ``Cell`` with the addition and the tanh of each step in one region."""
    graph = capture(Cell(), (torch.ones(2, steps, 4),))
    sums = [node.name for node in graph.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    for number, name in enumerate(sums):
        tanh = next(iter(next(node for node in graph.graph.nodes if node.name == name).users))
        fuse_by_hand(graph, [name, tanh.name], number)
    return graph


def labels(drawing: Sketch) -> list[str]:
    return [mark.label for mark in drawing.marks.values()]


def test_the_steps_of_a_loop_are_drawn_once() -> None:
    drawing = sketch(capture(Cell(), (torch.ones(2, 64, 4),)))
    (repeat,) = boxes_of(drawing.parts)
    assert (repeat.kind, repeat.label) == ("repeat", "x 64")
    assert labels(drawing).count("addmm") == labels(drawing).count("tanh") == 1


def test_the_state_of_a_loop_is_an_arrow_back() -> None:
    drawing = sketch(capture(Cell(), (torch.ones(2, 64, 4),)))
    (carried,) = (arrow for arrow in drawing.arrows if arrow.carried)
    assert drawing.marks[carried.start].label == "tanh"
    assert drawing.marks[carried.stop].label == "addmm"


def test_a_fused_group_is_a_box_that_says_how_many_became_one() -> None:
    drawing = sketch(fused_cell(2))
    regions = [box for box in boxes_of(drawing.parts) if box.kind == "region"]
    assert [box.label for box in regions] == ["2 -> 1", "2 -> 1"]
    assert [[drawing.marks[part].label for part in box.parts if isinstance(part, int)] for box in regions] == [
        ["add", "tanh"],
        ["add", "tanh"],
    ]


def test_equal_fused_groups_repeat_like_operators() -> None:
    drawing = sketch(fused_cell(64))
    repeat, region = boxes_of(drawing.parts)
    assert (repeat.label, region.label) == ("x 64", "2 -> 1")
    assert len(drawing.marks) < 12


def rolled_cell(steps: int) -> GraphModule:
    """The graph of ``Cell`` with its steps rolled into one loop."""
    with torch.no_grad():
        return show(Cell(), (torch.ones(2, steps, 4),)).graph


def test_a_rolled_loop_is_a_box_around_one_step_that_says_how_many_became_one() -> None:
    drawing = sketch(rolled_cell(64))
    (loop,) = boxes_of(drawing.parts)
    assert (loop.kind, loop.label) == ("loop", "loop x 64: 192 -> 1")
    inside = [drawing.marks[part].label for part in loop.parts if isinstance(part, int)]
    assert [label for label in inside if label in ("addmm", "add", "tanh")] == ["addmm", "add", "tanh"]


def test_the_state_of_a_rolled_loop_comes_from_outside_and_from_the_step_before() -> None:
    class FromHalf(Cell):
        def forward(self, x: Tensor) -> Tensor:
            h = x[:, 0].sigmoid()
            for t in range(x.shape[1]):
                h = torch.tanh(self.recurrent(h) + x[:, t])
            return h

    with torch.no_grad():
        drawing = sketch(show(FromHalf(), (torch.ones(2, 64, 4),)).graph)
    ends = {(drawing.marks[a.start].label, drawing.marks[a.stop].label, a.carried) for a in drawing.arrows}
    assert {("sigmoid", "addmm", False), ("tanh", "addmm", True), ("tanh", "output", False)} <= ends


def test_a_state_that_is_handed_on_is_followed_to_what_computes_it() -> None:
    class Step(nn.Module):
        def forward(self, last: Tensor, before: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.ops.aten.add.Tensor(x, before), last

    loop = Loop(torch.fx.symbolic_trace(Step()), LoopSpec(8, carries=2, step_inputs=(StepInput(0, 0, 1),), collected=0))
    graph = Graph()
    start, x = graph.placeholder("start"), graph.placeholder("x")
    call = graph.call_module("loop", (start, start, x))
    graph.output(tuple(graph.call_function(operator.getitem, (call, number)) for number in range(2)))
    drawing = sketch(GraphModule({"loop": loop}, graph))
    ends = {(drawing.marks[a.start].label, drawing.marks[a.stop].label) for a in drawing.arrows}
    assert ends == {("start", "add"), ("x", "add"), ("add", "output")}


def test_arrows_enter_and_leave_a_fused_group_at_its_operators() -> None:
    drawing = sketch(fused_cell(1))
    ends = {(drawing.marks[arrow.start].label, drawing.marks[arrow.stop].label) for arrow in drawing.arrows}
    assert {("addmm", "add"), ("add", "tanh"), ("tanh", "output")} <= ends


def test_weights_and_their_views_are_left_out_but_inputs_stay() -> None:
    drawing = sketch(capture(nn.Linear(4, 4), (torch.ones(2, 4),)))
    assert labels(drawing) == ["input", "addmm", "output"]


def test_views_that_follow_each_other_are_one_mark() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x.t().unsqueeze(0).select(0, 0))

    drawing = sketch(capture(Views(), (torch.ones(2, 3),)))
    assert labels(drawing) == ["x", "t, unsqueeze, select", "tanh", "output"]
    assert len(drawing.arrows) == 3


def test_a_view_with_two_readers_is_not_joined_to_either() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            turned = x.t()
            return turned.select(0, 0) + turned.select(0, 1)

    assert labels(sketch(capture(Shared(), (torch.ones(2, 3),)))) == ["x", "t", "select", "select", "add", "output"]


def test_an_operator_without_a_launch_is_as_thin_as_a_view() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.fuse.assemble([torch.tanh(x), torch.sin(x)], 0)

    drawing = sketch(capture(Joined(), (torch.ones(2),)))
    assert [mark.kind for mark in drawing.marks.values() if mark.label == "assemble"] == ["view"]


def test_an_input_is_labelled_with_its_shape() -> None:
    drawing = sketch(capture(nn.Tanh(), (torch.ones(2, 3, dtype=torch.float64),)))
    assert next(iter(drawing.marks.values())).detail == "f64[2, 3]"


def test_too_many_operators_are_merged_by_user_line() -> None:
    drawing = sketch(capture(TwoLines(), (torch.ones(4, 4),)), limit=50)
    merged = {mark.label: mark.count for mark in drawing.marks.values()}
    assert merged.keys() == {"x", "tanh", "mm", "output"}
    assert merged["tanh"] + merged["mm"] == 600


def test_twenty_thousand_operators_become_a_readable_picture_quickly() -> None:
    graph = capture(Cell(), (torch.ones(2, 10, 4),))
    step = [node for node in graph.graph.nodes if node.op == "call_function"][-4:]
    last = step[-1]
    for _ in range(5000):
        for node in step:
            with graph.graph.inserting_before(graph.graph.output_node()):
                last = graph.graph.node_copy(node)
    graph.graph.output_node().replace_input_with(step[-1], last)
    started = time.process_time()  # other programs must not count
    drawing = sketch(graph)
    assert time.process_time() - started < 3.0
    assert len(drawing.marks) <= 40


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, dtype=torch.bool), "bool[2]"),
        (torch.ones((), dtype=torch.complex64), "complex64[]"),
        ((torch.ones(1), torch.ones(2)), "f32[1], f32[2]"),
        (None, ""),
    ],
)
def test_values_are_described_by_dtype_and_shape(value: object, text: str) -> None:
    assert describe(value) == text
