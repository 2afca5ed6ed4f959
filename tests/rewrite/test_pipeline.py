from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fuse.errors import FaultWarning
from fuse.graph.capture import capture
from fuse.graph.loop import Loop, LoopSpec
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


class Apart(nn.Module):
    """Products and values of eight steps, in the dtypes that they have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.stack([torch.sort(self.inner(x[t])).values.tanh() for t in range(8)])


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


def test_what_passes_insert_is_not_subject_to_autocast() -> None:
    def rewritten() -> tuple[str, list[torch.dtype]]:
        graph = capture(model, (x,))
        run_passes(graph)
        values = [value for node in graph.graph.nodes if isinstance(value := node.meta.get("val"), Tensor)]
        return str(graph.graph), [value.dtype for value in values]

    model, x = Apart(), torch.randn(8, 3, 4)
    expected = rewritten()
    with torch.autocast("cpu", torch.bfloat16):
        assert rewritten() == expected


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


def crash(graph: GraphModule) -> Iterator[Verdict]:
    """Rewrites a part of the graph, then raises while it rewrites another."""

    def half() -> None:
        graph.add_submodule("added", nn.Identity())
        for node in graph.graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.cos.default
        graph.meta["crashed"] = [][1]

    for node in graph.graph.find_nodes(op="call_function", target=aten.clone.default)[:1]:
        yield rewrite(node, surgery.replace, node, node.args[0])
    yield rewrite(graph.graph.output_node(), half)


def forget(graph: GraphModule) -> Iterator[Verdict]:
    """Leaves a node without metadata behind."""
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        yield rewrite(output, graph.graph.call_function, aten.zeros.default, ([3],))


def unlink(graph: GraphModule) -> Iterator[Verdict]:
    """Leaves an operand behind its user."""
    first, *_, last = graph.graph.find_nodes(op="call_function", target=aten.sin.default)
    yield rewrite(last, last.append, first)


FAULTS = {
    "crash": (
        crash,
        r"pass 'crash' of \S+ failed at test_pipeline.py:\d+ and was left out: IndexError: list",
    ),
    "forget": (forget, r"pass 'forget' .* ValueError: node zeros.* has no metadata"),
    "unlink": (unlink, r"pass 'unlink' .* RuntimeError: .* used before it has been defined"),
}


@pytest.mark.parametrize(("function", "told"), FAULTS.values(), ids=FAULTS.keys())
def test_a_pass_that_fails_is_named_and_leaves_nothing_behind(
    function: Callable[[GraphModule], Iterator[Verdict]], told: str, temporary: list[str]
) -> None:
    expected = capture(Doubled(), (torch.randn(3),))
    run_passes(expected, passes=["no_ops"])
    registry.register_pass(stage="clean", before="no_ops", enabled=False)(function)
    temporary.append(function.__name__)
    graph = capture(Doubled(), (torch.randn(3),))
    with pytest.warns(FaultWarning, match=told):
        ledger = run_passes(graph, passes=["no_ops", function.__name__])
    (failed,) = ledger.failed
    assert failed.reason in failed.traceback
    assert ledger.passes == ("no_ops",)
    assert {one.pass_name for one in ledger.rewrites} == {"no_ops"}
    assert str(graph.graph) == str(expected.graph)
    assert dict(graph.named_modules()).keys() == {""}
    assert graph.meta.keys() == expected.meta.keys()
    x = torch.randn(3)
    assert torch.equal(graph(x)[0], Doubled()(x))
    for node, twin in zip(graph.graph.nodes, expected.graph.nodes, strict=True):
        assert node.meta.keys() == twin.meta.keys()
        assert node.meta["source"] == twin.meta["source"]


def test_a_fault_inside_a_loop_is_undone_there_too(temporary: list[str]) -> None:
    registry.register_pass(stage="clean", before="no_ops", enabled=False)(crash)
    temporary.append("crash")
    graph = with_loop(steps=10)
    body = graph.loop.body
    with pytest.warns(FaultWarning, match="pass 'crash'"):
        ledger = run_passes(graph, passes=["no_ops", "crash"])
    assert graph.loop.body is body
    assert clones(body) == 0
    assert len(body.graph.find_nodes(op="call_function", target=aten.sin.default)) == 4
    assert ledger.fired[0].launches_saved == 3 * 10


def with_loop(steps: int) -> GraphModule:
    body = capture(Doubled(), (torch.randn(3),))
    graph = Graph()
    x = graph.placeholder("x")
    x.meta.update(val=surgery.fake_mode(body.graph).from_tensor(torch.randn(3)), source="")
    node = graph.call_module("loop", (x,))
    node.meta.update(val=(x.meta["val"],), source="")
    graph.output((node,))
    return GraphModule({"loop": Loop(body, LoopSpec(steps, 1, (), 0, persistent=False))}, graph)


def test_loop_bodies_are_rewritten_and_count_once_for_each_step():
    graph = with_loop(steps=10)
    ledger = run_passes(graph, passes=["no_ops"])
    assert clones(graph.loop.body) == 0
    assert ledger.fired[0].launches_saved == 3 * 10


def test_a_region_is_left_alone():
    graph = with_loop(steps=10)
    graph.loop = graph.loop.body
    graph.loop.meta["kind"] = "region"
    assert run_passes(graph, passes=["no_ops"]).rewrites == ()
    assert clones(graph.loop) == 3


class Solved(nn.Module):
    """A loop that is rolled, of which every step writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for _ in range(6):
            self.steps += 1
            x = torch.linalg.solve(x, torch.eye(3)) + 0.1
            states.append(x.sin())
        return torch.stack(states)


def test_passes_do_the_same_in_inference_mode() -> None:
    ledgers = []
    for inference in (False, True):
        graph = capture(Solved(), (torch.eye(3),))
        with torch.inference_mode(inference), torch.no_grad():
            ledgers.append(run_passes(graph))
            assert torch.is_inference_mode_enabled() == inference
    assert ledgers[0].fired == ledgers[1].fired
    assert ledgers[1].failed == ()
