"""A pass runs wherever fuse runs those of its stage, in inference and in training; names decide nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import fuse
from fuse.errors import FaultWarning, FuseError
from fuse.gradients.differentiating import by_loops
from fuse.graph.backward.joint import capture_joint
from fuse.rewrite import nested, registry, surgery
from fuse.rewrite.registry import STAGES, Stage, register_pass
from fuse.rewrite.verdict import Verdict, rewrite

aten = torch.ops.aten
STEPS, BATCH, WIDTH = 9, 2, 6


class Gated(nn.Module):
    """A recurrent layer whose state is gated by itself, and a gate behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(WIDTH, WIDTH)

    def forward(self, xs: Tensor) -> Tensor:
        h = xs.new_zeros(BATCH, WIDTH)
        for x in xs:
            a = self.state(h) + x
            h = torch.tanh(a * torch.sigmoid(a))
        return (h * torch.sigmoid(h)).sum(1)


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    """``registered(function, stage=...)``: register it as a pass until the test is over."""
    names: list[str] = []

    def register(function: registry.PassFunction, **how: object) -> None:
        register_pass(**how)(function)  # type: ignore[arg-type]
        names.append(function.__name__)

    yield register
    for name in names:
        registry.unregister(name)


def kinds(graph: GraphModule) -> set[str]:
    """What a graph holds: operators, loops, regions."""
    return {
        nested.kind(node) if node.op == "call_module" else "operator"
        for node in graph.graph.nodes
        if node.op in ("call_module", "call_function")
    }


def test_the_order_of_fuses_own_passes_does_not_hang_on_their_names() -> None:
    own = [info for info in registry.registered() if info.origin.startswith("fuse.passes.")]
    for seed in range(5):
        assert registry.ordered(random.Random(seed).sample(own, len(own))) == own


def test_passes_run_stage_by_stage() -> None:
    places = [STAGES.index(info.stage) for info in registry.registered()]
    assert places == sorted(places)
    assert set(places) == set(range(len(STAGES)))
    assert registry.of_stages(*STAGES) == [info.name for info in registry.select()]


IN_INFERENCE: dict[Stage, set[str]] = {
    "clean": {"operator"},
    "loops": {"operator", "loop"},
    "match": {"operator", "loop"},
    "fuse": {"operator", "loop", "region"},
    "finish": {"operator", "loop"},  # the region behind the loop is part of it by then
}
IN_TRAINING: dict[Stage, list[set[str]]] = {  # (the call whose gradients are taken,) forward, backward
    "clean": [{"operator"}, {"operator", "loop"}, {"operator", "loop"}],
    "loops": [{"operator", "loop"}] * 3,
    "match": [{"operator", "loop"}] * 2,
    "fuse": [{"operator", "loop", "region"}] * 2,
    "finish": [{"operator", "loop"}] * 2,
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_sees_what_the_stages_before_it_leave(stage: Stage, registered: Callable[..., None]) -> None:
    seen: list[set[str]] = []

    def look(graph: GraphModule) -> Iterator[Verdict]:
        """Notice what a graph holds."""
        seen.append(kinds(graph))
        yield from ()

    registered(look, stage=stage)
    model, xs = Gated(), torch.randn(STEPS, BATCH, WIDTH)
    fuse.show(model, (xs,))
    assert seen == [IN_INFERENCE[stage]]
    seen.clear()
    fuse.show(model, (xs,), train=True)
    assert seen == IN_TRAINING[stage]


def swish(graph: GraphModule) -> Iterator[Verdict]:
    """Replace x * sigmoid(x) by silu(x)."""
    for product in graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        x, gate = product.args
        if isinstance(gate, Node) and gate.target is aten.sigmoid.default and gate.args == (x,):
            yield rewrite(product, silu, product, x)


def silu(product: Node, x: Node) -> None:
    surgery.replace(product, surgery.insert(product, aten.silu.default, x))


def operators(graph: GraphModule) -> list[object]:
    """The operators of a graph, those in steps of its loops included."""
    found: list[object] = []
    for node in graph.graph.nodes:
        if node.op == "call_module":
            found += operators(nested.called_module(node).body)
        else:
            found.append(node.target)
    return found


@pytest.mark.parametrize(("stage", "fired"), [("clean", STEPS + 1), ("loops", 1), ("match", 1)])
def test_a_rewrite_of_an_early_stage_reaches_the_steps(
    stage: Stage, fired: int, registered: Callable[..., None]
) -> None:
    """Where loops are rolled already, the steps of one with a kernel are past rewriting."""
    registered(swish, stage=stage)
    report = fuse.testing.assert_fuses(Gated(), torch.randn(STEPS, BATCH, WIDTH), fired={"swish": fired})
    assert report.after.launches == 1


def test_gradients_are_taken_of_what_a_cleaning_pass_leaves(registered: Callable[..., None]) -> None:
    torch.manual_seed(0)
    model, xs = Gated(), torch.randn(STEPS, BATCH, WIDTH)
    before = capture_joint(model, (xs,), {}, differentiate=by_loops())
    registered(swish, stage="clean")
    after = capture_joint(model, (xs,), {}, differentiate=by_loops())
    assert before.rolled
    assert after.rolled
    assert before.backward is not None
    assert after.backward is not None
    assert aten.silu.default not in operators(before.forward)
    assert aten.silu.default in operators(after.forward)
    assert aten.sigmoid_backward.default in operators(before.backward)
    assert aten.sigmoid_backward.default not in operators(after.backward)
    assert fuse.show(model, (xs,), train=True).loops[0].rolled
    for run in (model, fuse.compile(model)):
        model.zero_grad()
        (run(xs) * torch.arange(1.0, 1 + BATCH)).sum().backward()
        if run is model:
            expected = model.state.weight.grad
    torch.testing.assert_close(model.state.weight.grad, expected, rtol=1e-4, atol=1e-5)


def test_a_pass_may_stay_behind_gradients(registered: Callable[..., None]) -> None:
    registered(swish, stage="clean", before_gradients=False)
    joint = capture_joint(Gated(), (torch.randn(STEPS, BATCH, WIDTH),), {}, differentiate=by_loops())
    assert joint.rolled
    assert aten.silu.default not in operators(joint.forward)


def test_a_pass_that_fails_before_gradients_costs_its_own_rewrites(registered: Callable[..., None]) -> None:
    def crash(graph: GraphModule) -> Iterator[Verdict]:
        """Fail on every graph."""
        raise ValueError("on purpose")
        yield

    registered(crash, stage="loops")
    with pytest.warns(FaultWarning, match="pass 'crash'"):
        report = fuse.show(Gated(), (torch.randn(STEPS, BATCH, WIDTH),), train=True)
    assert [one.pass_name for one in report.ledger.failed] == ["crash"]
    assert report.loops[0].rolled
    assert report.backward is not None
    assert report.backward.loops[0].rolled


def test_rewrites_are_counted_once_in_training_without_loops(registered: Callable[..., None]) -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x)

    registered(swish, stage="clean")
    report = fuse.show(Plain(), (torch.randn(4, requires_grad=True),), train=True)
    assert [one.count for one in report.fired if one.pass_name == "swish"] == [1]


def test_an_order_against_the_stages_is_told(registered: Callable[..., None]) -> None:
    registered(swish, stage="fuse", before="no_ops")
    told = "pass 'swish' of .* contradicts the stages: 'swish' is of stage 'fuse', 'no_ops' of 'clean'; change stage="
    with pytest.raises(FuseError, match=told):
        registry.registered()


def test_a_stage_that_there_is_not_is_told() -> None:
    with pytest.raises(FuseError, match="'swish' names the stage 'early'; there are clean, loops, match, fuse, finish"):
        register_pass(stage="early")(swish)  # type: ignore[arg-type]
