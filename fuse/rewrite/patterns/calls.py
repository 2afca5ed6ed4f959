"""Operator calls that differ only in their operands, and the term that they share.

    relu_3 = relu(add_7)        relu_9 = relu(add_21)        one call:  relu(#0), f32[4, 16] from f32[4, 16]

A large graph has few different calls. The term of each is made once, over leaves that stand for its distinct operands
by number. A node is then its call and its operands, in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from fuse.rewrite.patterns.canonical import term_of_node
from fuse.rewrite.patterns.terms import FILL, KNOWN, LEAF, NUMBER, TensorType, Term, Terms, below, type_of
from fuse.rewrite.patterns.views import stripped
from fuse.rewrite.surgery import constant_key


@dataclass(frozen=True, eq=False)
class CallShape:
    """One call, as a ``term`` over leaves.

    ``steps``: the terms that compute something, the last first. ``last``: the steps whose value is the result; there
    are two if an operand has equal elements, and may be read as a number. ``reading``: the steps that read each leaf.
    ``within``: the steps that read each step. ``viewed``: the number of the leaf that the call is a view of; -1 if it
    computes something. ``names``: the names of ``last``, and ``number`` if the result may be read as a number.
    """

    term: Term
    last: tuple[Term, ...]
    steps: tuple[Term, ...]
    reading: tuple[tuple[Term, ...], ...]
    within: Mapping[Term, tuple[Term, ...]]
    viewed: int
    names: tuple[str, ...]


class NodeCall(NamedTuple):
    """The call of a node, and its distinct operands."""

    shape: CallShape
    operands: tuple[Node, ...]


class Calls:
    """The different calls of one graph. ``terms``: the table of their terms. ``constants``: known values of nodes."""

    def __init__(self, constants: Mapping[Node, Tensor | None] | None = None) -> None:
        self.terms = Terms()
        self.constants = constants or {}
        self._types: dict[Node, Any] = {}
        self._marks: dict[Node, int] = {}
        self._same_types: dict[Any, Any] = {}
        self._layouts: dict[Node, Hashable] = {}
        self._known: dict[Node, NodeCall] = {}
        self._fills: dict[Node, Term | None] = {}
        self._makers: dict[int, bool] = {}  # by id of the target: hashing a target takes longer
        self._shapes: dict[Hashable, CallShape] = {}

    def type_of(self, node: Node) -> Any:
        """The type of the value of ``node``, a tuple for several results. Equal types are one object."""
        tensor_type = self._types.get(node)
        if tensor_type is None:
            value = node.meta.get("val")
            # a key costs less than a type
            key = (value.shape, value.dtype, value.fake_device) if isinstance(value, FakeTensor) else type_of(value)
            tensor_type = self._same_types.get(key)
            if tensor_type is None:
                tensor_type = self._same_types[key] = type_of(value)
            self._types[node] = tensor_type
        return tensor_type

    def layout(self, node: Node) -> Hashable:
        """A key of type and strides of the value of ``node``, one tensor or several."""
        known = self._layouts.get(node)
        if known is None:
            value = node.meta["val"]
            values = [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)
            strides = [one.stride() for one in values if isinstance(one, Tensor)]
            known = self._layouts[node] = (id(self.type_of(node)), *strides)
        return known

    def alike(self, nodes: Sequence[Node]) -> Hashable:
        """A key that is equal for sequences of nodes with equal calls, layouts and connections."""
        names: dict[Node, int] = {}
        keys, within = [], set(nodes)
        for node in nodes:
            shape, operands = self.of(node)
            given = [(names.setdefault(one, len(names)), self.layout(one)) for one in operands]
            alone = all(user in within for user in node.users)
            keys.append((shape, tuple(given), names.setdefault(node, len(names)), self.layout(node), alone))
        return tuple(keys)

    def of(self, node: Node) -> NodeCall:
        """The call of a node; the node must be an operator (:func:`fuse.rewrite.patterns.index.is_operator`)."""
        call = self._known.get(node)
        if call is None:
            numbers: dict[Node, int] = {}
            args = [
                ("operand", numbers.setdefault(one, len(numbers)))
                if isinstance(one, Node)
                else one  # only integers are bare in a key
                if type(one) is int
                else _said(one, numbers)
                for one in node.args
            ]
            kwargs = node.kwargs
            said = (id(node.target), *args, _said(kwargs, numbers) if kwargs else None)  # hashing a target takes longer
            operands = tuple(numbers)
            key = (said, id(self.type_of(node)), *map(self._mark, operands))
            shape = self._shapes.get(key)
            if shape is None:
                shape = self._shapes[key] = self._shape(node, operands)
            call = self._known[node] = NodeCall(shape, operands)
        return call

    def _mark(self, node: Node) -> int:
        """A key of an operand: its elements if they are equal and known, otherwise its type."""
        mark = self._marks.get(node)
        if mark is None:
            mark = self._marks[node] = id(self._fill(node) or self.type_of(node))
        return mark

    def _shape(self, node: Node, operands: Sequence[Node]) -> CallShape:
        leaves = {
            one: self.terms.leaf((number, tensor_type), tensor_type)
            for number, one in enumerate(operands)
            for tensor_type in [self.type_of(one)]
        }
        terms = [term_of_node(self.terms, node, leaves.__getitem__)]
        if fills := {one: term for one in operands if (term := self._fill(one)) is not None}:
            terms.append(term_of_node(self.terms, node, lambda one: fills.get(one) or leaves[one]))
        term = terms[0]
        steps = tuple(one for one in below(*terms) if one.computes)
        last = tuple(dict.fromkeys(one for one in map(stripped, terms) if one.computes))
        reading_of: dict[Term, dict[Term, None]] = {one: {} for one in (*leaves.values(), *steps)}
        for step in steps:
            for operand in map(stripped, step.operands):
                if operand in reading_of:
                    reading_of[operand][step] = None
        reading = tuple(tuple(reading_of[leaf]) for leaf in leaves.values())
        within = {one: tuple(reading_of[one]) for one in steps}
        base = stripped(term)
        viewed = base.value[0] if base.name == LEAF else -1
        names = (*[one.name for one in last], *(NUMBER,) * (base.name in KNOWN))
        return CallShape(term, last, steps, reading, within, viewed, names)

    def _fill(self, node: Node) -> Term | None:
        """The term of a node with equal, known elements; None for any other node."""
        if node.op == "call_function":
            maker = self._makers.get(id(node.target))
            if maker is None:
                maker = self._makers[id(node.target)] = _makes_from_numbers(node.target)
            if not maker:
                return None
        if node not in self._fills:
            self._fills[node] = self._found_fill(node)
        return self._fills[node]

    def _found_fill(self, node: Node) -> Term | None:
        value = self.constants.get(node)
        if value is not None and value.numel() == 1:
            return self.terms.constant(value, self.type_of(node))
        if not isinstance(node.target, OpOverload) or not isinstance(self.type_of(node), TensorType):
            return None
        term = term_of_node(self.terms, node, dict[Node, Term]().__getitem__)
        return term if term.name == FILL else None


def _makes_from_numbers(target: object) -> bool:
    """Whether the operator takes no tensor: ``full``, ``zeros``, ``arange``."""
    return isinstance(target, OpOverload) and not any("Tensor" in str(one.type) for one in target._schema.arguments)


@dataclass(frozen=True)
class Table:
    """A table of terms over other leaves; the term of a call over given operands is made once."""

    calls: Calls
    terms: Terms = field(default_factory=Terms)
    _made: dict[Hashable, Term] = field(default_factory=dict)

    def term(self, node: Node, term_of: Callable[[Node], Term]) -> Term:
        """The term of ``node``; ``term_of`` returns the terms of its operands."""
        shape, operands = self.calls.of(node)
        key = (shape, *[term_of(operand) for operand in operands])
        known = self._made.get(key)
        if known is None:
            known = self._made[key] = term_of_node(self.terms, node, term_of)
        return known


def _said(argument: Any, numbers: dict[Node, int]) -> Hashable:
    """A key of an argument; a node is its number among the distinct operands."""
    if isinstance(argument, Node):
        return ("operand", numbers.setdefault(argument, len(numbers)))
    if isinstance(argument, (tuple, list)):
        return ("sequence", *[_said(item, numbers) for item in argument])
    if isinstance(argument, dict):
        return ("mapping", *[(name, _said(item, numbers)) for name, item in argument.items()])
    return constant_key(argument)
