from __future__ import annotations

import operator
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse.graph.capture import capture
from fuse.graph.outputs import outputs_of
from fuse.rewrite import regions, surgery

aten = torch.ops.aten


class Steps(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a = x * 2
        b = (a.t() + y).tanh()
        c = b @ b.t()
        return a, b[1:], c


class TwoParts(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values, positions = x.max(1)
        return values.exp() + positions


class Padded(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        ones = torch.ones(4)
        return (x + ones) * ones


ARGUMENTS = (torch.arange(16.0).view(4, 4) / 8, torch.ones(4, 4))


def members(graph: GraphModule, *names: str) -> list[Node]:
    """The calls of the named operators, in program order."""
    operators = [n for n in graph.graph.nodes if isinstance(n.target, OpOverload)]
    return [n for n in operators if n.target._schema.name.removeprefix("aten::") in names]


def fused(model: nn.Module, *names: str) -> tuple[GraphModule, Node, Sequence[Tensor]]:
    """``model`` with one region of the named operators, and what it gives before the region is made."""
    graph = capture(model, ARGUMENTS)
    arguments = [value for value in ARGUMENTS for node in graph.graph.find_nodes(op="placeholder") if node.users][:2]
    before = graph(*ARGUMENTS)
    chosen = members(graph, *names)
    call = regions.insert_region(graph, chosen, *regions.build_body(chosen))
    regions.sort(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert len(arguments) == 2
    for new, old in zip(graph(*ARGUMENTS), before, strict=True):
        assert torch.equal(new, old)
    return graph, call, before


def test_a_region_returns_what_is_read_outside_and_nothing_else():
    _, call, _ = fused(Steps(), "mul", "add", "tanh")
    assert sorted(user.name.split("_")[0] for user in call.users) == ["getitem", "getitem"]
    assert [tuple(v.shape) for v in call.meta["val"]] == [(4, 4), (4, 4)]


def test_views_of_its_own_values_are_inside_and_no_result():
    graph, call, _ = fused(Steps(), "mul", "add", "tanh")
    body = graph.get_submodule(str(call.target))
    targets = [n.target for n in body.graph.nodes if n.op == "call_function"]
    assert targets == [aten.mul.Tensor, aten.t.default, aten.add.Tensor, aten.tanh.default]
    assert all(not regions.ops.is_view(r.target) for r in outputs_of(body.graph))


def test_parts_of_an_operator_with_several_results_are_read_inside():
    graph, call, _ = fused(TwoParts(), "max", "exp", "add")
    body = graph.get_submodule(str(call.target))
    assert len(body.graph.find_nodes(op="call_function", target=operator.getitem)) == 2
    assert len(call.users) == 1


def test_several_results_of_one_operator_leave_as_parts():
    _, call, _ = fused(TwoParts(), "max")
    assert len(call.users) == 2


def test_tensors_made_from_nothing_are_made_again_inside():
    graph, call, _ = fused(Padded(), "add", "mul")
    body = graph.get_submodule(str(call.target))
    assert len(body.graph.find_nodes(op="call_function", target=aten.ones.default)) == 1
    assert [n.op for n in graph.graph.nodes].count("call_function") == 1, "only the part is left"


def test_a_region_joins_a_region():
    graph, call, _ = fused(Steps(), "add", "tanh")
    both = [*members(graph, "mul"), call]
    outer = regions.insert_region(graph, both, *regions.build_body(both))
    graph.graph.lint()
    body = graph.get_submodule(str(outer.target))
    assert [str(n.op) for n in body.graph.nodes].count("call_module") == 0
    assert len(outer.users) == 2


def test_sorting_puts_operands_first_and_keeps_random_order():
    class Noise(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            return x.tanh(), torch.rand(3), torch.rand(4), y.exp()

    graph = capture(Noise(), ARGUMENTS)
    tanh, exp = members(graph, "tanh", "exp")
    exp.append(tanh)
    before = [tuple(n.meta["val"].shape) for n in members(graph, "rand")]
    regions.sort(graph.graph)
    graph.graph.lint()
    assert [tuple(n.meta["val"].shape) for n in members(graph, "rand")] == before == [(3,), (4,)]


def test_a_body_can_be_given_more_results():
    graph, call, before = fused(Steps(), "mul", "add", "tanh")
    part = next(iter(call.users))
    with surgery.fake_mode(graph.graph):
        body, results, (inner,) = regions.copied_body(call, [part])
    added = regions.exchange_body(graph, call, regions.region_module(body, [*results, inner]))
    graph.recompile()
    assert [p.args[1] for p in added] == [2]
    assert all(torch.equal(new, old) for new, old in zip(graph(*ARGUMENTS), before, strict=True))


@pytest.mark.parametrize(("model", "expected"), [(Padded(), ["ones"]), (Steps(), [])])
def test_constructors_are_told_from_what_computes(model, expected):
    graph = capture(model, ARGUMENTS)
    assert [n.name.split("_")[0] for n in graph.graph.nodes if regions.is_constructor(n)] == expected


def test_erasing_a_node_looks_once_at_each_of_its_readers():
    """Each value is read twice, and a result holds them all: there are 2 ** 60 ways from the first to the result."""

    class Doubled(nn.Module):
        def forward(self, x):
            for _ in range(60):
                x = x * 2 + x
            return x

    graph = capture(Doubled(), (torch.randn(3),))
    nodes = list(graph.graph.nodes)
    regions.erase_with_users(nodes[1])
    assert list(graph.graph.nodes) == nodes
