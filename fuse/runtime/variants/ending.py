"""One program for calls whose loop ends after different numbers of steps.

    captured    7 steps   pre, 7 x body, rest          the loop stops at its condition, after at most 7 steps
    captured    4 steps   pre, 4 x body, rest          equal except for the number: the program of 7 steps serves both
    called      5 steps   stops after 5 steps, which were not captured: ``rest`` is unknown, so the call is captured

The operators after a loop may depend on the number of its steps, in ways that a capture of another number does not
show. So each number is captured once. If its graph equals that of a call with more steps except for the number, no
program is built for it: the kernel stops at the condition, and from then on the program of more steps serves this
number too. Collected outputs then have fewer steps, and plain results (a count) are those of the capture.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import Module

from fuse import ops
from fuse.graph.loop import Loop, Stop
from fuse.graph.loop_with_ends import LoopWithEnds, graph_in
from fuse.graph.numbers.learned import Learned, Learning, Truths, bits, same_bits
from fuse.graph.outputs import cone, outputs_of
from fuse.graph.signature import OutputSpec, Signature
from fuse.runtime.programs.result_reconstruction import Reconstruction, reconstruction

aten = torch.ops.aten


@dataclass(frozen=True)
class Ending:
    """The number of steps of a captured call's loop, and everything else about its graph.

    Attributes:
        steps: steps that the loop took.
        stop: the condition at which the loop stops.
        truths: the values of this condition that Python read.
        reads: keys of these reads, in order.
        others: other values that Python read.
        text: the graph without the number of steps.
        constants: the constant tensors of the graph.
        tables: constant tensors with a part for each step.
        lasting: outputs with a part for each step: (index, dimension of the steps).
        values: fake tensors of these outputs, by index; None for others.
        signature: the signature of the graph.
    """

    steps: int
    stop: Stop
    truths: Truths
    reads: tuple[int, ...]
    others: frozenset[tuple[int, str, object]]
    text: str
    constants: tuple[Tensor, ...] = field(repr=False)
    tables: tuple[Tensor, ...] = field(repr=False)
    lasting: tuple[tuple[int, int], ...]
    values: tuple[Tensor | None, ...] = field(repr=False)
    signature: Signature = field(repr=False)

    @property
    def count(self) -> int:
        """Number of condition values for which the loop went on."""
        return self.truths.last - self.truths.first - 1

    def includes(self, other: Ending) -> bool:
        """Whether the program of this graph, stopped earlier, serves calls that ended like ``other``."""
        mine, its = self.signature, other.signature
        return (
            other.steps <= self.steps
            and self.count - other.count == self.steps - other.steps
            and other.text == self.text
            and other.stop == self.stop
            and other.others == self.others
            and other.reads == self.reads[: other.count + 1]
            and other.lasting == self.lasting
            and len(other.constants) == len(self.constants)
            and len(other.tables) == len(self.tables)
            and all(map(_is_same, self.constants, other.constants))
            and all(_is_same(one[: len(two)], two) for one, two in zip(self.tables, other.tables, strict=True))
            and (mine.mutations, mine.out_spec, len(mine.outputs)) == (its.mutations, its.out_spec, len(its.outputs))
            and [(spec.kind, spec.name, spec.index) for spec in mine.inputs]
            == [(spec.kind, spec.name, spec.index) for spec in its.inputs]
            and [variable for variable, _ in mine.context] == [variable for variable, _ in its.context]
            and all(map(_is_alike, mine.outputs, its.outputs))
        )

    def went_on(self, values: Sequence[Tensor | None]) -> int:
        """Number of condition values for which the loop went on in a call with these outputs."""
        conditions = values[self.truths.leaf]
        assert conditions is not None
        found = conditions.tolist()[self.truths.first : self.truths.last]
        stops = not self.truths.goes_on
        return found.index(stops) if stops in found else len(found)

    @cached_property
    def reconstruct(self) -> Reconstruction:
        """A function that makes the result of a call that ended like this one, from values of a program with more
        steps."""
        usual = reconstruction(self.signature)
        return lambda values, inputs: usual(self._cut(values), inputs)

    def copies(self, values: Sequence[Tensor | None]) -> int:
        """Number of copies that this takes: one for each value whose first steps are not contiguous at its start."""
        return sum(not _begins_with(whole, wanted) for whole, wanted, _ in self._longer(values))

    def _longer(self, values: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor, int]]:
        """(value, wanted, dimension of the steps) for values with more steps than this call."""
        pairs = ((values[index], self.values[index], dim) for index, dim in self.lasting)
        return [(a, b, dim) for a, b, dim in pairs if a is not None and b is not None and a.shape != b.shape]

    def _cut(self, values: Sequence[Tensor | None]) -> list[Tensor | None]:
        cut = {id(whole): _first_steps(whole, wanted, dim) for whole, wanted, dim in self._longer(values)}
        return [cut.get(id(value), value) for value in values]


def ending_of(graph: GraphModule) -> Ending | None:
    """The ending of a captured and rewritten call.

    None if no loop, or more than one, may stop early, and if something other than operators depends on the number of
    steps (random numbers that Python draws may).
    """
    signature: Signature = graph.meta["signature"]
    learning = signature.learning
    found = [loop for node in graph.graph.nodes for loop in _loops_of(graph, node) if loop.spec.stop is not None]
    if (
        learning is None
        or len(found) != 1
        or signature.mutated
        or signature.containers
        or signature.drawn
        or not _has_operators_only(graph)
    ):
        return None
    (loop,) = found
    stop, truths = loop.spec.stop, loop.truths
    assert stop is not None
    assert truths is not None
    inside = [one for one in learning.learned if is_of(truths, one)]
    others = [one for one in learning.learned if not is_of(truths, one)]
    if any(isinstance(one.expected, Tensor) for one in others):
        return None
    outputs = outputs_of(graph.graph)
    read = {one.leaf for one in learning.learned}
    named = {spec.index for leaf, spec in enumerate(signature.outputs) if spec.kind == "graph" and leaf not in read}
    named |= {mutation.value_index for mutation in signature.mutations}
    checks = [node for node in graph.graph.nodes if node.op == "call_function" and not node.users]
    writer = _Speller(graph, loop)
    text = writer.graph([*(outputs[index] for index in sorted(named)), *checks])
    lasting = {index: writer.long[outputs[index]] for index in sorted(named) if outputs[index] in writer.long}
    viewed = {spec.index for spec in signature.outputs if spec.kind == "graph" and spec.view is not None}
    if not viewed.isdisjoint(lasting) or any(mutation.value_index in lasting for mutation in signature.mutations):
        return None
    return Ending(
        loop.trip_count,
        stop,
        truths,
        tuple(one.key for one in inside),
        frozenset((one.key, one.guard, bits(one.expected)) for one in others),
        text,
        tuple(writer.constants),
        tuple(writer.tables),
        tuple(lasting.items()),
        tuple(node.meta["val"] if index in lasting else None for index, node in enumerate(outputs)),
        replace(signature, dispatches=()),
    )


def is_of(truths: Truths, one: Learned) -> bool:
    """Whether a value that Python read is one of the conditions ``truths`` of a loop."""
    index = -1 if one.index is None else one.index
    return one.leaf == truths.leaf and truths.first <= index < truths.last


def without_conditions(learning: Learning, truths: Truths) -> Learning:
    """The values that Python read, without the conditions ``truths`` of a loop."""
    return replace(learning, learned=tuple(one for one in learning.learned if not is_of(truths, one)))


def _loops_of(graph: GraphModule, node: Node) -> list[Loop]:
    """The loops in the module that a node calls."""
    module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
    return [part for part in module.modules() if isinstance(part, Loop)] if module is not None else []


def _has_operators_only(graph: GraphModule) -> bool:
    """Whether a graph consists of known operators only: no tensor attributes, no custom operators, no random numbers.

    Calls with another number of steps would draw more random numbers.
    """
    nodes = [node for part in graph.modules() if isinstance(part, GraphModule) for node in part.graph.nodes]
    targets = [node.target for node in nodes if node.op == "call_function" and node.target is not operator.getitem]
    known = all(getattr(target, "namespace", "") in _KNOWN and not ops.is_random(target) for target in targets)
    return known and not any(node.op == "get_attr" for node in nodes)


_KNOWN = ("aten", "fuse", "prims")


class _Speller:
    """Writer of a text of some nodes of a graph, without the number of steps of ``loop``.

    ``long``: nodes with a part for each step, by the dimension of the steps.
    """

    def __init__(self, whole: GraphModule, loop: Loop) -> None:
        self.loop = loop
        signature: Signature = whole.meta["signature"]
        given = whole.graph.find_nodes(op="placeholder")
        self.specs = dict(zip(given, signature.inputs, strict=True))
        self.whole = whole
        self.long: dict[Node, int] = {}
        self.constants: list[Tensor] = []
        self.tables: list[Tensor] = []
        for node in whole.graph.nodes:
            self._tables_of(node)

    def _tables_of(self, call: Node) -> None:
        """If ``call`` calls the loop, add to ``long`` the constants that steps read part by part."""
        module = self.whole.get_submodule(str(call.target)) if call.op == "call_module" else None
        operands = list(call.args)
        if isinstance(module, LoopWithEnds) and module.loop is self.loop:
            inside = module.body.graph.find_nodes(op="placeholder")
            outer = dict(zip(inside, call.args, strict=True))
            operands = [outer.get(argument) for argument in module.call.args]
        elif module is not self.loop:
            return
        for operand, how in zip(operands[self.loop.spec.carries :], self.loop.spec.step_inputs, strict=False):
            value = self.specs[operand].value if operand in self.specs else None
            if (
                not isinstance(operand, Node)
                or value is None
                or (how.dim, how.start, how.step) != (0, 0, 1)
                or len(value) != self.loop.trip_count
            ):
                continue
            if len(operand.users) == 1:
                self.long[operand] = 0
                if isinstance(module, LoopWithEnds):
                    self.long |= {node: 0 for node, given in outer.items() if given is operand}

    def graph(self, results: Sequence[Node]) -> str:
        """The text of ``results`` and of all nodes that they depend on."""
        needed = cone(results)
        return self._nodes([node for node in self.whole.graph.nodes if node in needed], results, self.whole)

    def _nodes(self, nodes: Sequence[Node], results: Sequence[Node], around: GraphModule) -> str:
        numbers = {node: f"%{number}" for number, node in enumerate(nodes)}
        lines = [self._line(node, numbers, around) for node in nodes if node.op != "output"]
        return "\n".join([*lines, " ".join(numbers[node] for node in results)])

    def _line(self, node: Node, numbers: dict[Node, str], around: GraphModule) -> str:
        target = str(node.target)
        if node.op == "placeholder" and around is self.whole:
            target += self._noted(node)
        elif node.op == "placeholder":
            target = ""
        if node.op == "call_module":
            target = self._module(around.get_submodule(target))
        elif node.op == "call_function":
            self._follow(node, around)
        args = map_arg((node.args, node.kwargs), lambda one: _Name(numbers[one]))
        return f"{node.op} {target} {args} {self._layout(node)} {self._sizes_read(node, around)}"

    def _sizes_read(self, node: Node, around: GraphModule) -> list[Any]:
        """The sizes of operands with a part for each step, for a node that computes with them outside of the loop."""
        if node in self.long or self.loop in _loops_of(around, node):
            return []
        return [tuple(one.meta["val"].shape) for one in node.all_input_nodes if one in self.long]

    def _noted(self, node: Node) -> str:
        """The identity of a placeholder's tensor if its contents may change; other tensors are added to the
        constants."""
        spec = self.specs[node]
        if spec.may_change:
            return f" {id(spec.value)}"
        if spec.value is not None:
            (self.tables if node in self.long else self.constants).append(spec.value)
        return ""

    def _follow(self, node: Node, around: GraphModule) -> None:
        """Add ``node`` to ``long`` if it is a collected output of the loop, or a permutation of one."""
        first = node.args[0] if node.args else None
        if not isinstance(first, Node):
            return
        if node.target is operator.getitem and first.op == "call_module":
            module, place = around.get_submodule(str(first.target)), node.args[1]
            if module is self.loop and place >= self.loop.spec.carries:  # type: ignore[operator]  # a number
                self.long[node] = 0
            if isinstance(module, LoopWithEnds) and module.loop is self.loop:
                inner = outputs_of(module.body.graph)[place]  # type: ignore[index]  # likewise
                if inner in self.long:
                    self.long[node] = self.long[inner]
        elif node.target is aten.permute.default and first in self.long:
            order: Any = node.args[1]
            self.long[node] = [d % len(order) for d in order].index(self.long[first])

    def _layout(self, node: Node) -> str:
        value = node.meta.get("val")
        if node in self.long:
            sizes = [str(size) for size in value.shape]  # type: ignore[union-attr]  # a tensor then
            sizes[self.long[node]] = "steps"
            return f"{sizes} {value.dtype}"  # type: ignore[union-attr]  # likewise
        if not isinstance(value, (tuple, list)):
            return _layout_of(value)
        return "" if node.op == "call_module" else str([_layout_of(one) for one in value])

    def _module(self, module: Module) -> str:
        if isinstance(module, Loop):
            spec = replace(module.spec, trip_count=0, source="") if module is self.loop else module.spec
            return f"loop {spec} {self._whole(module.body)}"
        inside = graph_in(module)
        if inside is None:
            return f"{type(module)} {id(module)}"
        return f"{'region' if inside is module else 'with ends'} {self._whole(inside)}"

    def _whole(self, graph: GraphModule) -> str:
        """The text of a nested graph, which may contain the loop."""
        return "{" + self._nodes(list(graph.graph.nodes), outputs_of(graph.graph), graph) + "}"


class _Name(str):
    """The number of a node; prints without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _layout_of(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{tuple(value.shape)} {value.stride()} {value.dtype}"


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    return one.stride() == other.stride() and same_bits(one, other)


def _is_alike(mine: OutputSpec, its: OutputSpec) -> bool:
    if mine.kind == its.kind == "python":
        return True
    return (mine.kind, mine.index, mine.view) == (its.kind, its.index, its.view)


def _first_steps(whole: Tensor, wanted: Tensor, dim: int) -> Tensor:
    """The first steps of a value as a tensor with the layout of ``wanted``, in memory that no other tensor shares."""
    if _begins_with(whole, wanted):
        memory = whole.untyped_storage()
        memory.resize_(wanted.numel() * wanted.itemsize)  # so that the caller can resize the tensor as in eager
        return whole.new_empty(0).set_(memory, 0, wanted.shape, wanted.stride())
    steps = whole.narrow(dim, 0, wanted.shape[dim])
    return torch.empty_strided(wanted.shape, wanted.stride(), dtype=whole.dtype, device=whole.device).copy_(steps)


def _begins_with(whole: Tensor, wanted: Tensor) -> bool:
    """Whether the first steps of ``whole`` are at the start of its memory, in the layout of ``wanted``."""
    sizes, strides = wanted.shape, wanted.stride()
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    alike = all(size == 1 or a == b for size, a, b in zip(sizes, whole.stride(), strides, strict=True))
    return alike and last + 1 == wanted.numel() and whole.storage_offset() == 0
