"""An index of a graph for the matcher: its steps by operator, the operands of each, and its readers.

    node   addmm(b, x, w)                     steps  add(b, .) and matmul(x, w), both of the node
    node   view(addmm)                        no step: looked through

A *step* is a term that computes something, together with its node; a node may have several steps, or none. The index is
made once for a graph, in linear time, and serves every pattern.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice, permutations
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.signature import Signature
from fuse.rewrite.constants import given_constants
from fuse.rewrite.patterns.calls import Calls, NodeCall, Table
from fuse.rewrite.patterns.canonical import may_make
from fuse.rewrite.patterns.operand_filters import OperandFilter, OperandNames, fits
from fuse.rewrite.patterns.rules import negated
from fuse.rewrite.patterns.terms import BY_STRIDES, KNOWN, LEAF, NUMBER, TensorType, Term
from fuse.rewrite.patterns.views import stripped

Known = TypeVar("Known")

Pairs = tuple[tuple[Term, Term], ...]
"""Pairs of an operand of a pattern's step and an operand of a graph's step."""

MAX_READERS = 64
"""The most readers of one value that are examined; values of a pattern have few."""

FEW = 64
"""If an operator is rarer than this, its steps are searched without comparing filters of other operators."""

MAX_DUPLICATE_DEPTH = 8
"""The longest chain of equal operators by which two nodes are recognised as one value."""


class Step(NamedTuple):
    """One term of a node that computes something."""

    node: Node
    term: Term


class Source(NamedTuple):
    """The origin of an operand: a step (several, if the call can be read in two ways), a number, or a given value.

    ``nodes``: the nodes that hold the value or a view of it, the nearest first, except operators with several results.
    """

    steps: tuple[Step, ...]
    number: bool
    nodes: tuple[Node, ...]

    @property
    def step(self) -> Step | None:
        """The step, in the first reading of the call."""
        return self.steps[0] if self.steps else None


_NUMBER = Source((), True, ())


class GraphIndex:
    """The steps of ``graph`` at present, without nodes added later.

    Terms are made on demand: a pattern needs few nodes of a large graph.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph
        self.calls = Calls(self.constants)
        self.position: dict[Node, int] = {}
        self._own: dict[Node, NodeCall | None] = {}
        self._steps: dict[Node, tuple[Step, ...]] = {}
        self._held: dict[Node, Source] = {}
        self._pairings: dict[tuple[Term, Term], tuple[Pairs, ...]] = {}
        self._tables: dict[Hashable, Any] = {}
        self._read_by: dict[Node, list[Step]] = {}
        self._like: dict[OperandFilter, Sequence[Step]] = {}
        self._by_names: dict[str, dict[OperandNames, list[Step]]] = {}
        self._names: dict[Node, tuple[str, ...]] = {}
        self._operands: dict[Term, tuple[tuple[int, Term], ...]] = {}
        self._nodes: dict[str, list[Node]] = defaultdict(list)  # by the names of steps that they may have
        made: dict[int, Collection[str]] = {}  # by id of the target: hashing a target takes longer
        for position, node in enumerate(graph.graph.nodes):
            self.position[node] = position
            if node.op == "call_function":
                target = node.target
                names = made.get(id(target))
                if names is None:
                    names = made[id(target)] = may_make(target) if isinstance(target, OpOverload) else ()
                for name in names:
                    self._nodes[name].append(node)

    @cached_property
    def constants(self) -> Mapping[Node, Tensor | None]:
        """The placeholders with known values."""
        return given_constants(self.graph)

    def count(self, name: str) -> int:
        """An upper bound for the number of steps of this name."""
        return len(self._nodes.get(name, ()))

    def steps(self, name: str) -> Iterator[Step]:
        """The steps of this name, in program order."""
        for node in self._nodes.get(name, ()):
            for step in self.steps_of(node):
                if step.term.name == name:
                    yield step

    def steps_like(self, operand_filter: OperandFilter) -> Sequence[Step]:
        """The steps that pass a filter, in program order."""
        known = self._like.get(operand_filter)
        if known is None:
            found = [steps for read, steps in self._by_read(operand_filter.name).items() if fits(operand_filter, read)]
            several = len(found) > 1
            known = sorted(chain(*found), key=lambda step: self.position[step.node]) if several else [*chain(*found)]
            self._like[operand_filter] = known
        return known

    def _by_read(self, name: str) -> Mapping[OperandNames, Sequence[Step]]:
        """The steps of this name, by the names of their operands."""
        known = self._by_names.get(name)
        if known is None:
            known = self._by_names[name] = defaultdict(list)
            for step in self.steps(name):
                known[self.read_by(step)].append(step)
        return known

    def read_by(self, step: Step) -> OperandNames:
        """For each operand of ``step``, the names of the steps that it may be."""
        node, term = step
        operands = self._operands.get(term)
        if operands is None:
            bare = [stripped(operand) for operand in term.operands]
            operands = tuple((one.value[0] if one.name == LEAF else -1, one) for one in bare)
            self._operands[term] = operands
        given = self._own[node]
        assert given is not None  # because it has this step
        return tuple(
            [
                self._names_of(given.operands[position]) if position >= 0 else _names(self.source(operand, node))
                for position, operand in operands
            ]
        )

    def _names_of(self, node: Node) -> tuple[str, ...]:
        """The names of the steps that may compute the value of ``node``."""
        known = self._names.get(node)
        if known is None:
            call = self.own(node)
            while call is not None and call.shape.viewed >= 0:
                call = self.own(call.operands[call.shape.viewed])
            known = self._names[node] = () if call is None else call.shape.names
        return known

    def rarest(self, operand_filters: Iterable[OperandFilter]) -> OperandFilter | None:
        """The filter that the fewest steps pass, by names first: a rare operator is not filtered further.

        >>> from torch.fx import Graph
        >>> GraphIndex(GraphModule({}, Graph())).rarest([OperandFilter("add", 2, ("mul",))])
        OperandFilter(name='add', operands=2, read=('mul',))
        """
        best, fewest = None, math.inf
        for operand_filter in sorted(operand_filters, key=lambda one: self.count(one.name)):
            if self.count(operand_filter.name) > FEW >= fewest:
                break
            if (count := len(self.steps_like(operand_filter))) < fewest:
                best, fewest = operand_filter, count
        return best

    def list_lengths(self) -> set[int]:
        """The lengths of all tensor lists among operators' arguments."""
        operators = (node for node in self.position if node.op == "call_function")
        arguments = (argument for node in operators for argument in node.args if isinstance(argument, (list, tuple)))
        return {len(argument) for argument in arguments if argument and isinstance(argument[0], Node)}

    def own(self, node: Node) -> NodeCall | None:
        """The call of ``node``; None if it is not an operator."""
        call = self._own.get(node)
        if call is None and node not in self._own:
            is_call = node in self.position and is_operator(node)
            call = self._own[node] = self.calls.of(node) if is_call else None
        return call

    def steps_of(self, node: Node) -> tuple[Step, ...]:
        """The steps of ``node``, the last first."""
        known = self._steps.get(node)
        if known is None:
            own = self.own(node)
            known = self._steps[node] = () if own is None else tuple([Step(node, term) for term in own.shape.steps])
        return known

    def is_write(self, node: Node) -> bool:
        """Whether ``node`` is the functional form of an in-place operator, as far as its operator and line can tell."""
        return (node.target, node.meta.get("source")) in self._writes

    @cached_property
    def _writes(self) -> set[tuple[object, str]]:
        signature: Signature | None = self.graph.meta.get("signature")
        written = (one for one in signature.dispatches if ops.mutates(one.op)) if signature else ()
        return {(ops.functional_form(one.op), one.source) for one in written}

    def last_steps(self, node: Node) -> tuple[Step, ...]:
        """The steps whose value ``node`` holds, one for each reading of its call; none for a view of another node."""
        own = self.own(node)
        return () if own is None else tuple([Step(node, term) for term in own.shape.last])

    def source(self, operand: Term, owner: Node) -> Source:
        """The source of ``operand``, an operand of a step of ``owner`` without its views."""
        own = self._own[owner]  # known, because it has this step
        assert own is not None
        if operand.name == LEAF:
            node = own.operands[operand.value[0]]
            return self._held.get(node) or self._source(node)
        if operand.name in KNOWN:
            return _NUMBER
        inner = negated(operand)
        if inner is not None and inner.name == LEAF and (twice := self.negation(own.operands[inner.value[0]])):
            value = self._source(twice)
            return Source((Step(owner, operand), *value.steps), False, value.nodes)
        return Source((Step(owner, operand),), False, ())

    def negation(self, node: Node) -> Node | None:
        """The node that ``node`` negates; None if it is no negation."""
        own = self.own(node)
        inner = None if own is None else negated(own.shape.term)
        return None if own is None or inner is None or inner.name != LEAF else own.operands[inner.value[0]]

    def _source(self, node: Node) -> Source:
        """The source of the value of ``node``."""
        views = []
        while (known := self._held.get(node)) is None:
            own = self.own(node)
            if own is None or own.shape.viewed < 0:
                number = own is not None and stripped(own.shape.term).name in KNOWN
                held = (node,) if isinstance(node.meta.get("val"), Tensor) else ()  # several results are no input
                known = self._held[node] = Source(self.last_steps(node), number, held)
                break
            views.append(node)
            node = own.operands[own.shape.viewed]
        for view in reversed(views):
            known = self._held[view] = Source(known.steps, known.number, (view, *known.nodes))
        return known

    def readers(self, step: Step) -> Iterator[Step]:
        """The first steps that read ``step``, directly or through views; then those that read a duplicate of it."""
        yield from self._readers_here(step)
        for other in self._computed_alike(step):
            if self.duplicates(step, other) is not None:
                yield from self._readers_here(other)

    def _readers_here(self, step: Step) -> Iterable[Step]:
        own = self.own(step.node)
        assert own is not None
        if step.term in own.shape.last:
            return self.readers_of(step.node)
        return [Step(step.node, term) for term in own.shape.within[step.term]]

    def _computed_alike(self, step: Step) -> Iterator[Step]:
        """Steps of other nodes that may be duplicates of ``step``: in ``x - m`` and ``y - m``, both negate ``m``."""
        sources = (self.source(stripped(operand), step.node) for operand in step.term.operands)
        given = next((one.nodes[0] for one in sources if one.nodes), None)
        for user in () if given is None else islice(given.users, MAX_READERS):
            if user is not step.node:
                yield from (other for other in self.steps_of(user) if _alike(other.term, step.term))

    def readers_of(self, node: Node) -> Sequence[Step]:
        """The first steps that read ``node``, directly or through views."""
        known = self._read_by.get(node)
        if known is None:
            known = self._read_by[node] = list(islice(self._readers(node), MAX_READERS))
        return known

    def _readers(self, node: Node) -> Iterator[Step]:
        for user in node.users:
            own = self.own(user)
            if own is None:
                continue
            position = own.operands.index(node)
            for term in own.shape.reading[position]:
                yield Step(user, term)
            if own.shape.viewed == position:
                yield from self._readers(user)
            if self.negation(user) is node:
                yield from self._readers_of_negative(user)

    def _readers_of_negative(self, node: Node) -> Iterator[Step]:
        """The steps of calls that negate ``node`` themselves, and read its negative."""
        for user in node.users:
            own = self.own(user)
            if own is None:
                continue
            for term in own.shape.reading[own.operands.index(node)]:
                if (inner := negated(term)) is not None and inner.name == LEAF:
                    yield from [Step(user, reader) for reader in own.shape.within[term]]

    def pairings(self, term: Term, other: Term) -> tuple[Pairs, ...]:
        """The ways to pair the operands of a pattern's step with those of a graph's step, all without their views.

        There is one, in order, unless the operator is commutative.
        """
        known = self._pairings.get((term, other))
        if known is None:
            wanted, found = ([stripped(operand) for operand in step.operands] for step in (term, other))
            orders = permutations(found) if term.commutative else [found]
            known = tuple(dict.fromkeys(tuple(zip(wanted, order, strict=True)) for order in orders))
            self._pairings[term, other] = known
        return known

    def duplicates(self, one: Step, other: Step, depth: int = 0) -> frozenset[Node] | None:
        """The nodes that compute ``other``, if it has the same value as ``one``; otherwise None.

        The calls ``x - m`` and ``y - m`` have a step each that negates ``m``. Steps count as equal if they do the same
        to the same nodes; later the whole match is compared exactly.
        """
        if one.node is other.node and one.term is other.term:
            return frozenset()
        if (
            depth > MAX_DUPLICATE_DEPTH
            or not _alike(one.term, other.term)
            or len(one.term.operands) != len(other.term.operands)
        ):
            return None
        for pairs in self.pairings(one.term, other.term):
            found = frozenset([other.node])
            for first, second in pairs:
                nodes = self._duplicate_operands(first, one.node, second, other.node, depth)
                if nodes is None:
                    break
                found |= nodes
            else:
                return found
        return None

    def _duplicate_operands(
        self, one: Term, owner: Node, other: Term, other_owner: Node, depth: int
    ) -> frozenset[Node] | None:
        if one.name in KNOWN or other.name in KNOWN:
            return frozenset() if (one.name, one.constants) == (other.name, other.constants) else None
        first, second = self.source(one, owner), self.source(other, other_owner)
        if first.nodes and first.nodes[-1:] == second.nodes[-1:]:
            return frozenset()
        if first.step is None or second.step is None:
            return None
        return self.duplicates(first.step, second.step, depth + 1)

    def table(self, key: Hashable, make: Callable[[Table], Known]) -> Known:
        """The result of ``make`` for a new table of terms; made once for each ``key``."""
        if key not in self._tables:
            self._tables[key] = make(Table(self.calls))
        known: Known = self._tables[key]
        return known


def _alike(one: Term, other: Term) -> bool:
    """Whether two steps do the same to equally many elements of one dtype; sizes of 1 depend on ``keepdim``."""
    if (one.name, one.constants) != (other.name, other.constants):
        return False
    if one.type == other.type:
        return True
    single = isinstance(one.type, TensorType) and isinstance(other.type, TensorType)
    return single and one.dtype == other.dtype and math.prod(one.shape) == math.prod(other.shape)


def _names(source: Source) -> tuple[str, ...]:
    """The names of the steps of a source, and ``number`` if it is a number."""
    return (*[one.term.name for one in source.steps], *(NUMBER,) * source.number)


def is_operator(node: Node) -> bool:
    """Whether ``node`` has a term: it is an operator, or one result of an operator."""
    if not isinstance(node.meta.get("val"), (Tensor, tuple, list)):
        return False
    target = node.target
    if target is operator.getitem:
        return is_operator(node.all_input_nodes[0])
    return isinstance(target, OpOverload) and target is not BY_STRIDES[0] and target is not BY_STRIDES[1]
