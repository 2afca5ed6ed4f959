"""Hold a captured graph to eager: run it node by node on real tensors and play its signature back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fuse import ops
from fuse.graph.capture import capture
from fuse.graph.signature import InputSpec, OutputSpec
from fuse.graph.structure.result_structure import flatten_result

SEED = 20


class CheckedInterpreter(Interpreter):
    """Runs a graph and holds every value to the fake one the graph promises: shape, stride, dtype."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(n.meta["val"]), strict=True)
            for real, promised in pairs:
                if real is not None:  # operators such as mkldnn_rnn_layer may leave out a result that nobody reads
                    assert _facts(real) == _facts(promised), n.format_node()
        return result


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    """What a graph promises of a value; strides of dimensions of extent 1, which nothing can tell, are left out."""
    strides = tuple(stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True) if extent != 1)
    return tensor.dtype, tuple(tensor.shape), strides, tensor.device


def run_captured(graph: GraphModule, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What calling the model would do, by the graph and its signature alone: mutations, aliases and structure."""
    signature = graph.meta["signature"]
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    inputs = [_tensor_of(spec, model, leaves) for spec in signature.inputs]
    values = CheckedInterpreter(graph).run(*inputs)
    for mutation in signature.mutations:
        inputs[mutation.input_index].copy_(values[mutation.value_index])
    result: list[Any] = []
    for spec in signature.outputs:
        result.append(result[spec.index] if spec.kind == "repeat" else _leaf(spec, values, inputs))
    return pytree.tree_unflatten(result, signature.out_spec)


def _tensor_of(spec: InputSpec, model: nn.Module, leaves: list[Any]) -> Tensor:
    if spec.kind == "argument":
        return leaves[spec.index]
    if spec.kind == "constant":
        assert spec.value is not None
        return spec.value
    return (dict(model.named_parameters()) | dict(model.named_buffers()))[spec.name]


def _leaf(spec: OutputSpec, values: tuple[Tensor, ...], inputs: list[Tensor]) -> Any:
    if spec.kind == "python":
        return spec.value
    whole = (values if spec.kind == "graph" else inputs)[spec.index]
    if spec.view is None:
        return whole
    return whole.as_strided(spec.view.size, spec.view.stride, whole.storage_offset() + spec.view.offset)


def assert_pure(graph: GraphModule) -> None:
    """Only functional operators, each with metadata, and no composite one."""
    for node in graph.graph.nodes:
        assert "val" in node.meta
        assert "source" in node.meta
        if isinstance(node.target, torch._ops.OpOverload):
            assert not ops.mutates(node.target), node.format_node()
            assert not ops.is_composite(node.target), node.format_node()
    graph.graph.lint()


def assert_same_call(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, exact: bool = True
) -> GraphModule:
    """Capture, replay and compare with eager: values, layouts, aliases, mutations, random state."""
    kwargs = dict(kwargs or {})
    twin, twin_args, twin_kwargs = copy.deepcopy((model, args, kwargs))
    state = torch.random.get_rng_state()
    graph = capture(model, args, kwargs)
    assert torch.equal(state, torch.random.get_rng_state()), "capture drew random numbers"
    assert_pure(graph)
    with torch.no_grad():
        torch.manual_seed(SEED)
        expected = twin(*twin_args, **twin_kwargs)
        expected_state = torch.random.get_rng_state()
        torch.manual_seed(SEED)
        actual = run_captured(graph, model, args, kwargs)
    assert torch.equal(torch.random.get_rng_state(), expected_state), "random numbers drawn differ"
    ours = _reachable(actual, model, args, kwargs)
    eagers = _reachable(expected, twin, twin_args, twin_kwargs)
    assert [_facts(t) for t in ours] == [_facts(t) for t in eagers]
    assert _sharing(ours) == _sharing(eagers)
    assert type(actual) is type(expected)
    for mine, theirs in zip(ours, eagers, strict=True):
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
        torch.testing.assert_close(mine, theirs, equal_nan=True, **tolerance)
    plain, expected_plain = (
        [leaf for leaf in flatten_result(result)[0] if not isinstance(leaf, Tensor)] for result in (actual, expected)
    )
    assert plain == expected_plain
    return graph


def _reachable(result: Any, model: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    leaves = [*flatten_result(result)[0], *pytree.tree_leaves((args, kwargs))]
    return [t for t in (*leaves, *model.parameters(), *model.buffers()) if isinstance(t, Tensor)]


def _sharing(tensors: list[Tensor]) -> list[tuple[int, int, int]]:
    """For every tensor: the first that is the same object, the first on the same storage, its place in that storage."""
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    return [
        (
            objects.setdefault(id(t), i),
            storages.setdefault(t.untyped_storage()._cdata, i),
            t.storage_offset(),
        )
        for i, t in enumerate(tensors)
    ]


class Calls(nn.Module):
    """A model that is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Calls:
        return Calls(self.function)


@pytest.fixture(scope="session")
def calls() -> type[Calls]:
    """A model made of a function."""
    return Calls


@pytest.fixture(scope="session")
def same_call() -> Callable[..., GraphModule]:
    """Capture a model's call and hold its replay to eager."""
    return assert_same_call


@pytest.fixture(scope="session")
def same_function() -> Callable[..., GraphModule]:
    """``same_call`` for a plain function of tensors."""

    def check(function: Callable[..., Any], *args: Any, exact: bool = True, **kwargs: Any) -> GraphModule:
        return assert_same_call(Calls(function), args, kwargs, exact)

    return check
