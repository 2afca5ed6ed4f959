"""Split rewritten graphs into a text without numbers, and their numbers; copy graphs for other sizes.

    x [50, 3, 64]   loop of 50 steps   view [150, 64]        "x float32 3, loop #, view [#, #]",  (50, 3, 64, 9600, ...)
    x [37, 3, 64]   loop of 37 steps   view [111, 64]        its copy with  (37, 3, 64, 7104, ...)

No code of the model and no pass runs for a copy. Its fake tensors are made from their shapes and strides, and views are
computed from their operands. If a view has another layout than the numbers, there is no copy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from fuse import ops
from fuse.graph.fakes.fake_operators import FakeRunner, Recipe, TensorMetadata, mode_of
from fuse.graph.loop import Loop, LoopSpec
from fuse.graph.loop_with_ends import LoopWithEnds
from fuse.graph.signature import InputSpec, OutputSpec, Signature
from fuse.kernel.sizes.region_text import Numbers, mapped, mapped_arguments, parts_of, text_and_numbers
from fuse.rewrite.constants import value_of_origin


class NotResized(Exception):
    """A graph has no copy for other sizes, or a schedule has none."""


def spelled_graphs(graphs: Sequence[GraphModule]) -> tuple[str, Numbers]:
    """A text without numbers, and the numbers, of graphs with their regions, loops, signatures and constants.

    Raises:
        NotResized: a graph contains something that has no such text.
    """
    lines: list[str] = []
    numbers: list[Any] = []
    for graph in graphs:
        signature: Signature = graph.meta["signature"]
        origins = (_walked(spec.origin, None) for spec in signature.inputs if spec.origin is not None)
        for part, extra in chain(_walked(graph, _extra_of_signature(signature)), *origins):
            text, found = text_and_numbers(part, lambda node: "", extra)
            lines.append(text)
            numbers += found
    return "\n\n".join(lines), tuple(numbers)


def arguments_in(graph: GraphModule) -> int:
    """Number of sizes and strides of a graph's arguments, which are its first numbers."""
    inputs = zip(graph.meta["signature"].inputs, graph.graph.find_nodes(op="placeholder"), strict=True)
    return sum(2 * node.meta["val"].dim() for spec, node in inputs if spec.kind == "argument")


def resized(graphs: Sequence[GraphModule], numbers: Numbers) -> tuple[GraphModule, ...]:
    """Copies of graphs with these numbers, in the order of :func:`spelled_graphs`.

    Raises:
        NotResized: a view has another layout than the numbers.
    """
    first = next(iter(graphs[0].graph.nodes))
    copier = _Copier(iter(numbers), FakeRunner(mode_of(first.meta["val"])))
    return tuple(_copied(graph, copier) for graph in graphs)


@dataclass(frozen=True)
class NodeNumbers:
    """A node with other numbers: its arguments, and the sizes of the tensors that it computes; with the last node of a
    graph also ``counts``: steps of a loop and places in what it reads, or integers that a call returns."""

    node: Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: tuple[tuple[int, ...], ...]
    counts: tuple[Any, ...] = ()


def nodes_with(graphs: Sequence[GraphModule], numbers: Numbers) -> Iterator[NodeNumbers]:
    """The nodes of graphs, of the graphs that they call and of those that compute constants, with these numbers in the
    order of :func:`spelled_graphs`."""
    rest = iter(numbers)

    def take(_: Any) -> Any:
        return next(rest)

    for graph in graphs:
        signature: Signature = graph.meta["signature"]
        origins = (_walked(spec.origin, None) for spec in signature.inputs if spec.origin is not None)
        for part, extra in chain(_walked(graph, _extra_of_signature(signature)), *origins):
            for node in part.graph.nodes:
                given = mapped_arguments(node, take)
                made = [mapped(one, take) for one in parts_of(node.meta.get("val")) if isinstance(one, Tensor)]
                kwargs = dict(zip(node.kwargs, given[len(node.args) :], strict=True))
                counts = _counts_in(mapped(extra, take)) if node.op == "output" else ()
                args, sizes = tuple(given[: len(node.args)]), tuple(tuple(one.shape) for one in made)
                yield NodeNumbers(node, args, kwargs, sizes, counts)


def _counts_in(extra: Any) -> tuple[Any, ...]:
    """The numbers among further facts about a graph that are no layouts of tensors."""
    if extra is None:
        return ()
    _, first, *rest = extra
    return (first, rest[0]) if rest else tuple(value for _, value in first)


def _copied(graph: GraphModule, copier: _Copier) -> GraphModule:
    signature: Signature = graph.meta["signature"]
    copy, (_, layouts) = copier.graph(graph, _extra_of_signature(signature))
    outputs = tuple(map(_output_with, signature.outputs, layouts))
    inputs = tuple(spec if spec.origin is None else _constant(spec, copier) for spec in signature.inputs)
    copy.meta["signature"] = replace(signature, inputs=inputs, outputs=outputs, dispatches=(), eagers=False)
    return copy


def _constant(spec: InputSpec, copier: _Copier) -> InputSpec:
    """A constant input, computed again for other sizes."""
    assert spec.origin is not None
    origin, _ = copier.graph(spec.origin, None)
    value = value_of_origin(origin)
    if value is None:
        raise NotResized(f"constant {spec.name} is too large to compute")
    return replace(spec, value=value, origin=origin)


def _walked(graph: GraphModule, extra: Any) -> Iterator[tuple[GraphModule, Any]]:
    """A graph and its nested graphs, each with further facts that the text and numbers contain."""
    yield graph, extra
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            raise NotResized(f"{node.name} is an attribute")
        if node.op == "call_module":
            inside, found = _inside(graph.get_submodule(str(node.target)))
            yield from _walked(inside, found)


def _inside(module: nn.Module) -> tuple[GraphModule, Any]:
    """The graph that a called module runs, and further facts of the module with sizes in them."""
    if isinstance(module, Loop):
        if module.truths is not None or module.spec.stop is not None:
            raise NotResized("a loop may end early")
        return module.body, _extra_of_loop(module)
    if isinstance(module, LoopWithEnds):
        return module.body, None
    if isinstance(module, GraphModule) and module.meta.get("kind") == "region":
        return module, None
    raise NotResized(f"module {type(module).__name__} is neither a loop nor a region")


def _extra_of_loop(loop: Loop) -> Any:
    """The parts of a loop that the text contains, with sizes as numbers."""
    spec = loop.spec
    fixed = replace(spec, trip_count=0, step_inputs=())
    dims = [read.dim for read in spec.step_inputs]
    ends = [(read.start, read.step) for read in spec.step_inputs]
    return repr((fixed, dims)), spec.trip_count, ends, loop.strides


def _loop_with(loop: Loop, body: GraphModule, extra: Any) -> Loop:
    _, trip_count, ends, strides = extra
    reads = (replace(read, start=a, step=b) for read, (a, b) in zip(loop.spec.step_inputs, ends, strict=True))
    spec: LoopSpec = replace(loop.spec, trip_count=trip_count, step_inputs=tuple(reads))
    made = Loop(body, spec)
    made.strides = strides
    return made


def _extra_of_signature(signature: Signature) -> Any:
    """The parts of a signature that the text contains, with the sizes of results as numbers."""
    inputs = [(spec.kind, spec.name, spec.index, spec.origin is not None) for spec in signature.inputs]
    outputs = [(spec.kind, spec.index, spec.view is not None) for spec in signature.outputs]
    fixed = (
        inputs,
        outputs,
        signature.out_spec,
        signature.mutations,
        signature.containers,
        signature.reassigned,
        signature.learning and (signature.learning.leaves, signature.learning.facts()),
        signature.reshaped,
    )
    return repr(fixed), list(map(_numbers_of, signature.outputs))


def _numbers_of(output: OutputSpec) -> Any:
    view = output.view
    layout = (view.size, view.stride, view.offset) if view is not None else ()
    return layout, output.value if type(output.value) is int else repr(output.value)


def _output_with(output: OutputSpec, numbers: Any) -> OutputSpec:
    layout, value = numbers
    view = replace(output.view, size=layout[0], stride=layout[1], offset=layout[2]) if output.view else None
    return replace(output, view=view, value=value if type(output.value) is int else output.value)


class _Copier:
    """Copier of graphs, which takes numbers in order from an iterator."""

    def __init__(self, numbers: Iterator[Any], runner: FakeRunner) -> None:
        self._numbers = numbers
        self._runner = runner

    def take(self, _: Any) -> Any:
        return next(self._numbers)

    def graph(self, graph: GraphModule, extra: Any) -> tuple[GraphModule, Any]:
        """A copy of a graph with the modules that it calls, and of ``extra`` facts about it."""
        made = Graph()
        copies: dict[Node, Node] = {}
        for node in graph.graph.nodes:
            given = mapped_arguments(node, self.take, copies)
            args, kwargs = tuple(given[: len(node.args)]), dict(zip(node.kwargs, given[len(node.args) :], strict=True))
            # torch.fx searches the arguments of a new node for symbolic sizes, which takes a third of the time.
            copy = made.create_node(node.op, node.target, name=node.name)
            copy._update_args_kwargs(args, kwargs)
            copy.meta = dict(node.meta)
            if "val" in node.meta:
                copy.meta["val"] = self._value(node, copy)
            copies[node] = copy
        extra = mapped(extra, self.take)
        called = nn.Module()
        for node in graph.graph.find_nodes(op="call_module"):
            called.add_module(str(node.target), self._module(graph.get_submodule(str(node.target))))
        module = _LazyGraphModule(called, made)
        module.meta = dict(graph.meta)
        return module, extra

    def _module(self, module: nn.Module) -> nn.Module:
        """A copy of a region or a loop."""
        inside, extra = self.graph(*_inside(module))
        if isinstance(module, Loop):
            return _loop_with(module, inside, extra)
        return LoopWithEnds(inside) if isinstance(module, LoopWithEnds) else inside

    def _value(self, node: Node, copy: Node) -> Any:
        """The fake tensors of a copied node, with the layouts that the numbers give."""
        value = node.meta["val"]
        layouts = [self._layout(part) for part in parts_of(value)]
        if node.op == "output":
            return tuple(argument.meta["val"] for argument in copy.args[0])  # type: ignore[union-attr]
        if node.target is operator.getitem:
            source, index = copy.args
            found = source.meta["val"][index]  # type: ignore[union-attr]
        elif node.op == "call_function" and ops.is_view(node.target):
            arguments = torch.fx.node.map_arg((copy.args, dict(copy.kwargs)), lambda n: n.meta["val"])
            try:
                found = self._runner.view(node.target, *arguments)  # type: ignore[arg-type]
            except (RuntimeError, IndexError) as error:
                raise NotResized(f"{node.name}: {error}") from error
        else:
            made = [self._made(part, layout) for part, layout in zip(parts_of(value), layouts, strict=True)]
            return type(value)(made) if isinstance(value, (tuple, list)) else made[0]
        for part, layout in zip(parts_of(found), layouts, strict=True):
            if isinstance(part, Tensor) and (tuple(part.shape), part.stride()) != layout:
                raise NotResized(f"{node.name} is {tuple(part.shape)}, {part.stride()}, and not {layout}")
        return found

    def _layout(self, value: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        if not isinstance(value, Tensor):
            return None
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise NotResized("a tensor is sparse, or lazily conjugated or negated")
        return tuple(map(self.take, value.shape)), tuple(map(self.take, value.stride()))

    def _made(self, value: Any, layout: tuple[tuple[int, ...], tuple[int, ...]] | None) -> Any:
        if layout is None:
            return value
        size, stride = layout
        metadata = TensorMetadata(value.dtype, size, stride, 0, value.device, -1, False)
        return self._runner.make(Recipe(metadata), ())
