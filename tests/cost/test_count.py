"""Predicted counts: of eager records, and of graphs with regions, loops and mutations."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_structure

from fuse.check.oracle import check
from fuse.cost import profiles
from fuse.cost.count import Count, by_source, count_dispatches, count_graph, unknown_ops
from fuse.graph.loop import Loop, LoopSpec
from fuse.graph.signature import Dispatch, Mutation, Signature

aten = torch.ops.aten
CPU = profiles.get("cpu")
FAKE = FakeTensorMode()


def fake(*shape: int) -> Tensor:
    with FAKE:
        return torch.empty(*shape)


class Builder:
    """A graph written by hand, its fake values computed as it is written."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.modules: dict[str, nn.Module] = {}

    def input(self, *shape: int) -> Node:
        node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        node.meta = {"val": fake(*shape), "source": ""}
        return node

    def call(self, target: Any, *args: Any, source: str = "model.py:1") -> Node:
        node = self.graph.call_function(target, args)
        with FAKE:
            node.meta = {"val": target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"])), "source": source}
        return node

    def module(self, name: str, module: nn.Module, value: tuple[Tensor, ...], *args: Node) -> Node:
        self.modules[name] = module
        node = self.graph.call_module(name, args)
        node.meta = {"val": value, "source": "model.py:9"}
        return node

    def finish(self, *outputs: Node, **meta: Any) -> GraphModule:
        self.graph.output(outputs)
        module = GraphModule(self.modules, self.graph)
        module.meta.update(meta)
        return module


def tanh_of_slice_plus_one() -> GraphModule:
    """A region that reads one of 100 rows of its input."""
    build = Builder()
    row = build.call(aten.select.int, build.input(100, 256), 0, 3)
    return build.finish(build.call(aten.add.Tensor, build.call(aten.tanh.default, row), 1.0), kind="region")


def parent_of(module: nn.Module) -> GraphModule:
    build = Builder()
    fused = build.module("fused", module, (fake(256),), build.input(100, 256))
    return build.finish(build.call(operator.getitem, fused, 0))


def test_a_region_is_one_launch_that_moves_only_what_it_reads_and_writes() -> None:
    count = count_graph(parent_of(tanh_of_slice_plus_one()), CPU)
    assert count.by_kind == {"region": 1}
    assert count.launches == 1
    assert count.nodes == 3
    assert count.flops == 256 * (10 + 1)
    assert count.bytes == 4 * (256 + 256)


def loop_body() -> GraphModule:
    build = Builder()
    h, w = build.input(4, 64), build.input(64, 64)
    return build.finish(build.call(aten.tanh.default, build.call(aten.mm.default, h, w)))


def count_of_loop(persistent: bool) -> Count:
    build = Builder()
    steps = Loop(loop_body(), LoopSpec(10, 1, (), 0, persistent=persistent))
    loop = build.module("loop", steps, (fake(4, 64),), build.input(4, 64), build.input(64, 64))
    return count_graph(build.finish(build.call(operator.getitem, loop, 0)), CPU)


def test_a_loop_is_its_body_trip_count_times() -> None:
    count = count_of_loop(persistent=False)
    assert count.by_kind == {"gemm": 10, "pointwise": 10}
    assert count.flops == 10 * (2 * 4 * 64 * 64 + 10 * 4 * 64)


def test_a_persistent_loop_is_one_launch_with_all_the_arithmetic() -> None:
    count = count_of_loop(persistent=True)
    assert count.by_kind == {"loop": 1}
    assert count.flops == count_of_loop(persistent=False).flops
    assert count.bytes == 4 * (4 * 64 + 64 * 64 + 4 * 64)


def test_views_getitem_and_assemble_launch_nothing() -> None:
    build = Builder()
    left, right = build.call(aten.relu.default, build.input(4, 8)), build.call(aten.tanh.default, build.input(4, 8))
    both = build.call(torch.ops.fuse.assemble.default, [left, right], 1)
    parts = build.call(aten.split.Tensor, build.call(aten.t.default, both), 8)
    count = count_graph(build.finish(build.call(operator.getitem, parts, 0)), CPU)
    assert count.by_kind == {"pointwise": 2}
    assert count.nodes == 5


def test_a_mutation_is_a_copy() -> None:
    build = Builder()
    value = build.call(aten.add.Tensor, build.input(4), 1.0)
    signature = Signature((), (), tree_structure(()), (Mutation(0, 0),), ())
    count = count_graph(build.finish(value, signature=signature), CPU)
    assert count.launches == 2
    assert count.by_kind["movement"] == 1


class Twice(nn.Module):
    def forward(self, x: Tensor) -> object:
        return x.sort()[0], x.sort()[0], x.max(1)[0], x.max(1)[1], x.max(1)[0]


def test_a_result_that_is_given_twice_is_copied() -> None:
    report = check(Twice(), (torch.randn(3, 6),))
    assert report.passed, report
    assert report.observed[1] == report.predicted[1]


def test_unknown_operators_are_counted_once_each_and_listed() -> None:
    with torch.library._scoped_library("count_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
        x = torch.ones(4)
        record = [dispatch(torch.ops.count_test.mystery.default, x, result=x.clone())] * 2
        assert count_dispatches(record, CPU).by_kind == {"other": 2}
        assert unknown_ops(record) == ["count_test.mystery.default"]
        build = Builder()
        graph = build.finish(build.call(torch.ops.count_test.mystery.default, build.input(4)))
        assert count_graph(graph, CPU).by_kind == {"other": 1}
        assert unknown_ops(graph) == ["count_test.mystery.default"]


def dispatch(
    op: Any, *args: Any, result: Any, source: str = "model.py:1", kwargs: Mapping[str, Any] | None = None
) -> Dispatch:
    return Dispatch(op, args, kwargs or {}, result, source)


def test_launches_are_attributed_to_user_lines_the_largest_first() -> None:
    x = torch.ones(4)
    record = [
        dispatch(aten.relu.default, x, result=x.relu(), source="model.py:3"),
        dispatch(aten.tanh.default, x, result=x.tanh(), source="model.py:7"),
        dispatch(aten.t.default, x, result=x.t(), source="model.py:8"),
        dispatch(aten.exp.default, x, result=x.exp(), source="model.py:7"),
    ]
    assert list(by_source(record).items()) == [("model.py:7", 2), ("model.py:3", 1)]


def test_an_operator_is_small_where_its_time_is_under_a_launch() -> None:
    small, large = torch.ones(16), torch.ones(1 << 20)
    record = [dispatch(aten.relu.default, x, result=x.relu()) for x in (small, large)]
    assert count_dispatches(record, CPU).small_ops == 1
    assert count_dispatches(record, profiles.get("h200")).small_ops == 2


def test_empty_tensors_launch_nothing_but_filled_ones_do() -> None:
    x = torch.ones(4)
    record = [
        dispatch(aten.empty.memory_format, [4], result=torch.empty(4)),
        dispatch(aten.zeros.default, [4], result=torch.zeros(4)),
        dispatch(aten.copy_.default, x, x.clone(), result=x),
    ]
    assert count_dispatches(record, CPU).by_kind == {"movement": 2}


def test_counts_add_up_and_the_peak_is_the_higher_one() -> None:
    first = Count(launches=2, by_kind={"gemm": 1, "region": 1}, small_ops=1, nodes=5, flops=10, bytes=20, peak_bytes=30)
    second = Count(launches=1, by_kind={"gemm": 1}, nodes=1, flops=1, bytes=2, peak_bytes=40)
    both = first + second
    assert both.to_dict() == {
        "launches": 3, "by_kind": {"gemm": 2, "region": 1}, "small_ops": 1, "nodes": 6, "flops": 11, "bytes": 22,
        "peak_bytes": 40, "modelled_seconds": 0.0, "launching_seconds": 0.0,
    }  # fmt: skip


def test_counting_is_linear() -> None:
    x, w = fake(32, 64), fake(64, 64)
    pair = [dispatch(aten.mm.default, x, w, result=x), dispatch(aten.tanh.default, x, result=x)]

    def seconds(pairs: int) -> float:
        start = time.process_time()
        assert count_dispatches(pair * pairs, CPU).launches == 2 * pairs
        return time.process_time() - start

    seconds(100)
    assert seconds(10_000) < 40 * min(seconds(1_000) for _ in range(3))  # 100 times if it were quadratic


def test_modelled_time_is_what_launching_costs_or_the_work_where_that_is_longer() -> None:
    profile = profiles.get("v100")
    small, large = torch.ones(4), torch.ones(1 << 24)
    record = [Dispatch(torch.ops.aten.relu.default, (x,), {}, x.relu(), "model.py:4") for x in (small, large, small)]
    count = count_dispatches(record, profile)
    work = 2 * large.nbytes / profile.bytes_per_second
    assert work > profile.launch_seconds
    assert count.modelled_seconds == pytest.approx(2 * profile.launch_seconds + work, rel=1e-6)
    assert count.launching_seconds == pytest.approx(2 * profile.launch_seconds, rel=1e-4)
    twice = count + count
    assert twice.modelled_seconds == 2 * count.modelled_seconds
