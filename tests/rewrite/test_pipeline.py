from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fuse.errors import FuseError
from fuse.graph.capture import capture
from fuse.rewrite import registry, surgery
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten


class Doubled(nn.Module):
    """Three copies that nobody could tell apart."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.sin(x).clone()
        return torch.sin(x)


@pytest.fixture
def temporary() -> Iterator[list[str]]:
    """Passes that a test registers and lists here are forgotten after it."""
    listed: list[str] = []
    yield listed
    for name in listed:
        registry.unregister(name)


def clones(graph: GraphModule) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=aten.clone.default))


def test_the_ledger_says_what_fired_and_what_it_saved():
    ledger = run_passes(capture(Doubled(), (torch.randn(3),)), passes=["no_ops"])
    (firings,) = ledger.fired
    assert (firings.pass_name, firings.count, firings.launches_saved) == ("no_ops", 3, 3)
    assert [one.number for one in ledger.rewrites] == [1, 2, 3]
    assert all(one.source.startswith("test_pipeline.py:") for one in ledger.rewrites)
    assert set(ledger.seconds) == {"no_ops"}


@pytest.mark.parametrize("fuel", [0, 1, 2, 3])
def test_fuel_stops_after_that_many_rewrites(fuel):
    graph = capture(Doubled(), (torch.randn(3),))
    assert len(run_passes(graph, passes=["no_ops"], fuel=fuel).rewrites) == fuel
    assert clones(graph) == 3 - fuel


def test_without_fuel_no_pass_touches_the_graph():
    graph = capture(Doubled(), (torch.randn(3),))
    before = str(graph.graph)
    assert run_passes(graph, fuel=0).rewrites == ()
    assert str(graph.graph) == before


def test_passes_run_in_the_declared_order_whatever_the_given_one():
    graph = capture(Doubled(), (torch.randn(3),))
    assert run_passes(graph, passes=["no_ops", "dead_code"]).passes == ("dead_code", "no_ops")


def test_refusals_are_grouped_by_reason_with_an_example(temporary):
    @registry.register_pass(enabled=False)
    def refuse(graph: GraphModule) -> Iterator[Verdict]:
        for node in graph.graph.find_nodes(op="call_function", target=aten.sin.default):
            yield declined(node, "sines stay", pattern="sine")

    temporary.append("refuse")
    (rejection,) = run_passes(capture(Doubled(), (torch.randn(3),)), passes=["refuse"]).rejected
    assert (rejection.pattern, rejection.reason, rejection.count, rejection.example) == ("sine", "sines stay", 4, "sin")
    assert rejection.source.startswith("test_pipeline.py:")


def test_a_pass_that_fails_is_named(temporary):
    @registry.register_pass(enabled=False)
    def crash(graph: GraphModule) -> Iterator[Verdict]:
        yield rewrite(graph.graph.output_node(), lambda: [][1])

    temporary.append("crash")
    with pytest.raises(FuseError, match=r"pass 'crash' of .* failed \(IndexError: .*--ignore crash") as caught:
        run_passes(capture(Doubled(), (torch.randn(3),)), passes=["crash"])
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_pass_that_leaves_a_node_without_metadata_is_named(temporary):
    @registry.register_pass(enabled=False)
    def forget(graph: GraphModule) -> Iterator[Verdict]:
        output = graph.graph.output_node()
        with graph.graph.inserting_before(output):
            yield rewrite(output, graph.graph.call_function, aten.zeros.default, ([3],))

    temporary.append("forget")
    with pytest.raises(FuseError, match=r"pass 'forget' .* node zeros.* has no metadata"):
        run_passes(capture(Doubled(), (torch.randn(3),)), passes=["forget"])


class Loop(nn.Module):
    """A loop as passes see it: a body that is a graph, and how often it runs."""

    def __init__(self, body: GraphModule, trip_count: int) -> None:
        super().__init__()
        self.body = body
        self.trip_count = trip_count
        self.meta = {"kind": "loop"}


def with_loop(steps: int) -> GraphModule:
    body = capture(Doubled(), (torch.randn(3),))
    graph = Graph()
    x = graph.placeholder("x")
    x.meta.update(val=surgery.fake_mode(body.graph).from_tensor(torch.randn(3)), source="")
    node = graph.call_module("loop", (x,))
    node.meta.update(val=(x.meta["val"],), source="")
    graph.output((node,))
    return GraphModule({"loop": Loop(body, steps)}, graph)


def test_loop_bodies_are_rewritten_and_count_once_for_each_step():
    graph = with_loop(steps=10)
    ledger = run_passes(graph, passes=["no_ops"])
    assert clones(graph.loop.body) == 0
    assert ledger.fired[0].launches_saved == 3 * 10


def test_a_region_is_left_alone():
    graph = with_loop(steps=10)
    graph.loop.meta["kind"] = "region"
    assert run_passes(graph, passes=["no_ops"]).rewrites == ()
