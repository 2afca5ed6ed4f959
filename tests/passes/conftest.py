"""What the tests of single passes share: capture a model, run some passes, and hold the rewritten graph to its word."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fuse.graph.capture import capture
from fuse.rewrite import effects
from fuse.rewrite.launches import node_launches
from fuse.rewrite.ledger import Ledger
from fuse.rewrite.pipeline import run_passes


class Witness(Interpreter):
    """Runs a graph and compares what every node really gives with what its metadata says."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            for real, said in zip(pytree.tree_leaves(result), pytree.tree_leaves(n.meta["val"]), strict=True):
                assert (real.dtype, real.size(), real.stride()) == (said.dtype, said.size(), said.stride()), (
                    n.format_node()
                )
            assert "source" in n.meta
        base = effects.view_base(n)
        if isinstance(result, Tensor) and base is not None and isinstance(base.meta["val"], Tensor):
            moved = result.storage_offset() - self.env[base].storage_offset()
            assert moved == n.meta["val"].storage_offset() - base.meta["val"].storage_offset(), n.format_node()
        return result


@dataclass(frozen=True)
class Rewritten:
    """A graph after some passes, with the real results of running it."""

    graph: GraphModule
    ledger: Ledger
    results: tuple[Tensor, ...]

    @property
    def fired(self) -> dict[str, int]:
        return {one.pass_name: one.count for one in self.ledger.fired}

    @property
    def reasons(self) -> dict[str, int]:
        return {one.reason: one.count for one in self.ledger.rejected}

    @property
    def launches(self) -> int:
        return sum(node_launches(node) for node in self.graph.graph.nodes)

    def count(self, operator: str) -> int:
        return sum(str(node.target).startswith(f"aten.{operator}.") for node in self.graph.graph.nodes)


@pytest.fixture
def rewritten() -> Callable[..., Rewritten]:
    """``rewritten(model, *args, passes=[...], fuel=None, exact=True)``: run passes, check values, metadata and sources.

    ``exact`` wants equal bits before and after, which the merging of products cannot promise.
    """

    def run(
        model: nn.Module, *args: Tensor, passes: Sequence[str], fuel: int | None = None, exact: bool = True
    ) -> Rewritten:
        expected = _run(capture(model, args), model, args)
        graph = capture(model, args)
        ledger = run_passes(graph, passes=passes, fuel=fuel)
        assert not ledger.failed, ledger.failed[0].traceback
        results = _run(graph, model, args)
        for new, old in zip(results, expected, strict=True):
            if exact:
                assert torch.equal(_bits(new), _bits(old))
            else:
                torch.testing.assert_close(new, old)
            assert (new.dtype, new.stride()) == (old.dtype, old.stride())
        for i, one in enumerate(results):
            for j, other in enumerate(results[:i]):
                shared = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
                was_shared = expected[i].untyped_storage().data_ptr() == expected[j].untyped_storage().data_ptr()
                assert shared == was_shared, "the results share memory as eager's do"
        return Rewritten(graph, ledger, results)

    return run


def _run(graph: GraphModule, model: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inputs = []
    for spec in graph.meta["signature"].inputs:
        value = args[spec.index] if spec.kind == "argument" else state.get(spec.name, spec.value)
        assert value is not None
        inputs.append(copy.deepcopy(value.detach()))
    torch.manual_seed(0)
    with torch.no_grad():
        results: tuple[Tensor, ...] = Witness(graph).run(*inputs)
    return results


def _bits(value: Tensor) -> Tensor:
    """The tensor as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.contiguous().view(integers[value.element_size()]) if value.is_floating_point() else value
