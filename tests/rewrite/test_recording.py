"""Recorded rewrites: replaying the first k gives the graph that ``fuel=k`` gives."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import Module

import fuse
from benchmarks.replay import ROOT, differing, graphs
from fuse.graph.capture import capture
from fuse.graph.sources import modules_of
from fuse.rewrite import registry, surgery
from fuse.rewrite.deltas import Order
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.recording import PassRecorder, recording
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten
WRAPPED = (
    (Graph, "create_node"),
    (Graph, "erase_node"),
    (Node, "prepend"),
    (Node, "__setattr__"),
    (Module, "add_module"),
)


def few(rewrites: int) -> list[int]:
    """The ends, and three in between."""
    return sorted({0, rewrites, *random.Random(rewrites).choices(range(rewrites + 1), k=3)})


MODELS = ("models/albert.py", "models/resnet18.py", "models/lstm_loop.py")


@pytest.mark.parametrize("target", MODELS)
def test_replaying_some_rewrites_of_a_model_gives_what_fuel_gives(target: str) -> None:
    ((_, make),) = graphs([target])
    rewrites, wrong = differing(make, few)
    assert rewrites
    assert not wrong


def cells() -> list[tuple[str, Callable[[], GraphModule]]]:
    return [(name, make) for name, make in graphs([]) if not name.startswith("models/")]


def test_replaying_some_rewrites_of_loops_gives_what_fuel_gives() -> None:
    chosen = cells()[::10]
    assert len(chosen) == 6
    assert {name: wrong for name, make in chosen if (wrong := differing(make, few)[1])} == {}


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x).clone()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + x


def test_a_delta_says_what_was_erased_and_rewired() -> None:
    graph = capture(Outer(), (torch.ones(3),))
    ledger = run_passes(graph, passes=["no_ops"], record=True)
    assert ledger.recording is not None
    first, *others = ledger.recording.deltas
    names = {made.id: made.row.name for made in ledger.recording.start.made}
    assert (first.number, first.pass_name, first.made) == (1, "no_ops", ())
    assert [names[node] for node in first.erased] == ["clone"]
    assert [(names[node], sorted(different)) for node, different in first.changed] == [("sin_1", ["uses"])]
    assert [delta.number for delta in others] == [2, 3]


@pytest.fixture
def temporary() -> Iterator[list[str]]:
    listed: list[str] = []
    yield listed
    for name in listed:
        registry.unregister(name)


def test_what_passes_change_in_any_way_is_replayed(temporary: list[str]) -> None:
    """Arguments, order, metadata, attributes and submodules, in rewrites and between them."""

    @registry.register_pass(stage="clean", before="no_ops", enabled=False)
    def meddle(graph: GraphModule) -> Iterator[Verdict]:
        for sine in graph.graph.find_nodes(op="call_function", target=aten.sin.default):
            yield declined(sine, "not yet")
            yield rewrite(sine, change, graph, sine)
        first = graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
        graph.graph.output_node().prepend(first)

    def change(graph: GraphModule, sine: Node) -> None:
        (user,) = sine.users
        new = surgery.insert(user, aten.mul.Tensor, sine, 2)
        user.replace_input_with(sine, new)
        sine.meta["val"] = sine.meta["val"].double()
        user.meta.update(source="elsewhere.py:1")
        new.args = (sine, 3)
        new.kwargs = {}
        if new.next is not user:
            user.prepend(new)
        new.target = aten.div.Tensor

    temporary.append("meddle")
    for passes in (["meddle"], ["meddle", "no_ops", "fuse_pointwise"]):
        graph = capture(Outer(), (torch.ones(3),))
        ledger = run_passes(graph, passes=passes, record=True)
        assert ledger.recording is not None
        assert ledger.recording.after().text() == PassRecorder(graph).state.text()
        for fuel in range(len(ledger.rewrites) + 1):
            graph = capture(Outer(), (torch.ones(3),))
            run_passes(graph, passes=passes, fuel=fuel)
            assert ledger.recording.after(fuel).text() == PassRecorder(graph).state.text()
        candidate = ledger.recording.declined[0]
        assert (candidate.reason, candidate.after, len(candidate.nodes)) == ("not yet", 0, 1)


def test_nothing_is_wrapped_before_and_afterwards_and_metadata_is_plain() -> None:
    before = [getattr(owner, name) for owner, name in WRAPPED]
    graph = capture(Outer(), (torch.ones(3),))
    with recording(graph):
        node = next(iter(graph.graph.nodes))
        assert type(node.meta) is not dict
        assert type(copy.copy(node.meta)) is type(copy.deepcopy({**node.meta, "val": None})) is dict
        assert type(pickle.loads(pickle.dumps(type(node.meta)({"a": 1}, node, {})))) is dict
        assert all(getattr(owner, name) is not one for (owner, name), one in zip(WRAPPED, before, strict=True))
    assert [getattr(owner, name) for owner, name in WRAPPED] == before
    assert all(type(node.meta) is dict for node in graph.graph.nodes)


def test_a_pass_that_fails_leaves_no_trace_in_the_recording(temporary: list[str]) -> None:
    @registry.register_pass(stage="clean", before="no_ops", enabled=False)
    def crash(graph: GraphModule) -> Iterator[Verdict]:
        node = graph.graph.find_nodes(op="call_function", target=aten.sin.default)[0]
        yield rewrite(node, surgery.insert, node, aten.cos.default, node.args[0])
        raise ValueError("no further")

    temporary.append("crash")
    graph = capture(Outer(), (torch.ones(3),))
    with pytest.warns(fuse.errors.FaultWarning):
        ledger = run_passes(graph, passes=["crash", "no_ops"], record=True)
    assert ledger.recording is not None
    assert {delta.pass_name for delta in ledger.recording.deltas} == {"no_ops"}
    assert ledger.recording.after().text() == PassRecorder(graph).state.text()


def test_lines_know_the_module_that_ran() -> None:
    with modules_of(model := Outer()):
        graph = capture(model, (torch.ones(3),))
    sources = [node.meta["source"] for node in graph.graph.nodes if node.op == "call_function"]
    assert [line.module for line in sources] == ["layers.0"] * 2 + ["layers.1"] * 2 + ["layers.2"] * 2 + [""]
    assert {line.path for line in sources} == {__file__}


def test_recording_costs_in_proportion_to_the_rewrites() -> None:
    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for number in range(self.steps):
                x = torch.sin(x).clone() * float(number % 7 + 2)
            return x

        steps = 0

    def touched(steps: int) -> int:
        model = Long()
        model.steps = steps
        ledger = run_passes(capture(model, (torch.ones(3),)), passes=["no_ops"], record=True)
        assert ledger.recording is not None
        deltas = ledger.recording.deltas
        assert len(deltas) == steps
        return sum(len(d.made) + len(d.erased) + len(d.changed) + len(d.placed) for d in deltas)

    assert touched(400) == 4 * touched(100)


def test_order_is_kept_when_nodes_move() -> None:
    order = Order()
    for node in range(5):
        order.place(node, node - 1, 0)
    order.place(4, 0, 0)
    order.remove(2)
    order.place(0, 3, 0)
    assert list(order.of(0)) == [4, 1, 3, 0]
    assert [order.before(node) for node in (4, 1, 2)] == [-1, 4, -2]


def test_models_are_where_the_replays_look_for_them() -> None:
    assert all((ROOT / target).exists() for target in MODELS)
