"""Capture a pattern like a model, and turn its operators into terms.

pattern(x: f32[4, 8], bias: f32[8])   ->   add(x, bias): the operators that torch runs for these shapes and dtypes
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fuse.devices import HOST
from fuse.errors import CaptureError, FuseError
from fuse.graph.fakes.fake_mode import FakeMode
from fuse.graph.fakes.fake_operators import unlogged
from fuse.graph.function import Function
from fuse.graph.outputs import outputs_of
from fuse.graph.recording.recorder import Recorder
from fuse.graph.recording.recording_plan import Plan
from fuse.rewrite.constants import constant_nodes
from fuse.rewrite.evaluate import evaluate
from fuse.rewrite.patterns.canonical import term_of_node
from fuse.rewrite.patterns.language import Environment, running
from fuse.rewrite.patterns.terms import Term, Terms, type_of

LARGEST_CONSTANT = 1 << 20
"""The most bytes of a tensor that is compared by its value."""


@dataclass(frozen=True)
class Traced:
    """The graph of one run.

    ``inputs``: its placeholders, by position of the tensor among the arguments; ``meta["input"]`` of a placeholder is
    its parameter, and its position there. ``constants``: the values of nodes that depend on no input.
    """

    graph: Graph
    inputs: tuple[Node | None, ...]
    outputs: tuple[Node, ...]
    constants: Mapping[Node, Tensor] = field(default_factory=dict, repr=False)


def trace(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    environment: Environment,
    mode: FakeTensorMode,
    *,
    holds: bool = False,
) -> Traced:
    """Record ``function(*arguments)`` in ``environment``; arguments are fake tensors of ``mode``, and lists of them.

    ``holds``: it may make tensors from values, which can be compared with a graph's, but not inserted into it.

    Raises:
        CaptureError: the function raises, or does something that a pattern cannot do, such as write to its inputs.
    """
    try:
        with running(environment), unlogged():
            module = _PatternRecorder(Function(function), mode, Plan()).run(tuple(arguments), {})
        if not holds and any(spec.kind != "argument" for spec in module.meta["inputs"]):
            raise CaptureError("it makes a tensor with torch.tensor(...); make that a parameter")
    except CaptureError as error:
        raise CaptureError(str(error).replace("forward failed", "it fails")) from error
    keys = [
        (name, position)
        for name, argument in zip(inspect.signature(function).parameters, arguments, strict=True)
        for position in range(len(argument) if isinstance(argument, list) else 1)
    ]
    inputs: list[Node | None] = [None] * len(pytree.tree_leaves(list(arguments)))
    given: dict[Node, Tensor | None] = {}
    for spec, node in zip(module.meta["inputs"], module.graph.find_nodes(op="placeholder"), strict=True):
        if spec.kind == "argument":
            inputs[spec.index] = node
            node.meta["input"] = keys[spec.index]
        else:
            given[node] = spec.value
    return Traced(module.graph, tuple(inputs), outputs_of(module.graph), _constants(module, given))


def _constants(module: GraphModule, given: dict[Node, Tensor | None]) -> dict[Node, Tensor]:
    """The values of the nodes that depend on no input, evaluated as in constant folding."""
    for node in constant_nodes(module, given):
        evaluate(node, given, LARGEST_CONSTANT)
    return {node: value for node, value in given.items() if value is not None}


def terms_of(traced: Traced, terms: Terms, leaves: Sequence[Term]) -> dict[Node, Term]:
    """The terms of every node of ``traced``, with ``leaves`` for its inputs."""
    known = {node: leaf for node, leaf in zip(traced.inputs, leaves, strict=True) if node is not None}
    for node in traced.graph.nodes:
        if node in traced.constants:
            known[node] = terms.constant(traced.constants[node], type_of(node.meta["val"]))
        elif node.op == "call_function":
            known[node] = term_of_node(terms, node, known.__getitem__)
    return known


def fake_copy(mode: FakeTensorMode, value: Tensor) -> Tensor:
    """A new fake tensor with the layout of ``value``; on the CPU if ``value`` is a meta tensor."""
    device = HOST if value.device.type == "meta" else value.device
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def fake_copies(mode: FakeTensorMode, arguments: Sequence[Any]) -> list[Any]:
    """``arguments`` with fake copies of the tensors in them, and in lists."""
    made: list[Any] = pytree.tree_map_only(Tensor, lambda tensor: fake_copy(mode, tensor), list(arguments))
    return made


class _PatternRecorder(Recorder):
    """Records a graph whose outputs are the tensors that the function returns, views included."""

    def _finish(self, result: Any) -> GraphModule:
        leaves = list(result) if isinstance(result, (tuple, list)) else [result]
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise CaptureError("it must return a tensor, or a tuple of tensors")
        if any(spec.kind != "argument" and spec.value is None for spec in self.inputs.specs):
            raise CaptureError("it reads a tensor that is not a parameter; make it one")
        if any(self.functional.aliases[id(fake)].base.version for fake in self.inputs.placeholders):
            raise CaptureError("it writes to an input")
        outputs = tuple(self.functional.value(leaf) for leaf in leaves)
        output = self.graph.output(outputs)
        output.meta.update(val=tuple(node.meta["val"] for node in outputs), source="")
        module = GraphModule(nn.Module(), self.graph)
        module.meta["inputs"] = tuple(self.inputs.specs)
        return module


def why_not(function: Callable[..., Any], arguments: Sequence[Any], environment: Environment) -> str | None:
    """Why ``function(*arguments)`` raises, or None; the arguments are meta tensors.

    It is tried on these first, which takes microseconds, and then on fake tensors, which check more.
    """
    try:
        with running(environment), torch.device("meta"), torch.no_grad():
            function(*arguments)
        mode = FakeMode()
        with running(environment), mode, torch.no_grad(), unlogged():
            function(*fake_copies(mode, arguments))
    except FuseError:
        raise
    except Exception as error:  # any error of the user's function
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None
