"""Rewrites as data: the nodes that each created, erased, changed and moved, to reconstruct any intermediate graph.

    start            rows of the captured graph
    rewrite 1        made: 21 silu(%)    erased: 7, 8    changed: 9 uses 21    placed: 21 after 6
    ...              GraphState(start) + deltas 1..k, settled  =  the graph that ``--fuel k`` gives

A *row* describes one node in plain values. A node has one number (its id) as long as it lives, in any graph: the
captured graph (graph 0), the body of a loop, or of a region. ``fuse.rewrite.recording`` makes deltas while the passes
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fuse.rewrite.ordering import program_order


@dataclass(frozen=True)
class Called:
    """The graph that a node calls, as its number (-1: none).

    ``kind`` is ``region``, ``loop``, ``ends`` (a loop with prologue and epilogue), ``matched`` or ``module``. For a
    loop: ``steps``; ``carries``, the number of carried states; ``reads``, the (dimension, start, step) of each operand
    that is read step by step; ``keeps``, the number of collected results; ``persistent``, whether one kernel runs all
    steps.
    """

    kind: str
    graph: int
    steps: int = 1
    carries: int = 0
    reads: tuple[tuple[int, int, int], ...] = ()
    keeps: int = 0
    persistent: bool = False
    backwards: bool = False


@dataclass(frozen=True)
class Row:
    """One node. Each ``%`` in ``args`` stands for a node; ``uses`` has their ids in the same order.

    ``kind``, ``launches``, ``flops`` and ``bytes`` are the node's own, counted once; the cost of a loop body that is
    launched in every step is in the rows of the body. ``effects``: the order among nodes with effects matters.
    """

    name: str
    op: str
    target: str
    args: str
    uses: tuple[int, ...]
    value: str
    source: str
    kind: str = ""
    launches: int = 0
    flops: int = 0
    bytes: int = 0
    effects: bool = False
    called: Called | None = None


@dataclass(frozen=True)
class CreatedNode:
    """A new node and its graph."""

    id: int
    graph: int
    row: Row


@dataclass(frozen=True)
class Delta:
    """The changes of one rewrite. ``number`` is its fuel; 0 for changes of a pass outside of its rewrites.

    ``graph``: the rewritten graph. ``nodes``: the candidate. ``changed``: the new values of changed fields, by node.
    ``placed``: pairs of a node and the node that it now follows (-1: first in its graph), to be applied in order.
    """

    number: int
    pass_name: str
    graph: int
    nodes: tuple[int, ...] = ()
    made: tuple[CreatedNode, ...] = ()
    erased: tuple[int, ...] = ()
    changed: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    placed: tuple[tuple[int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.made or self.erased or self.changed or self.placed)


@dataclass(frozen=True)
class Candidate:
    """A declined candidate; ``after`` is the number of rewrites made before."""

    pass_name: str
    pattern: str | None
    reason: str
    source: str
    nodes: tuple[int, ...]
    after: int


@dataclass(frozen=True)
class Recording:
    """A run of the passes: the first graph, the delta of each rewrite, and the declined candidates."""

    start: Delta
    deltas: tuple[Delta, ...]
    declined: tuple[Candidate, ...]

    def after(self, fuel: int | None = None) -> GraphState:
        """The graph after ``fuel`` rewrites (None: all), in program order.

        >>> made = (CreatedNode(0, 0, Row("x", "placeholder", "x", "", (), "f32[2]", "")),)
        >>> Recording(Delta(0, "", 0, made=made, placed=((0, -1),)), (), ()).after().nodes(0)
        [0]
        """
        state = GraphState()
        state.apply(self.start)
        for delta in self.deltas:
            if fuel is not None and delta.number > fuel:
                break
            state.apply(delta)
        return state.settled()


class GraphState:
    """The graphs at one time: rows by id, and the order of nodes in each graph."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.graph_of: dict[int, int] = {}
        self.order = Order()
        self.rewrites = 0

    def apply(self, delta: Delta) -> None:
        """Apply ``delta``, in time proportional to its size."""
        for gone in delta.erased:
            self.order.remove(gone)
            del self.rows[gone], self.graph_of[gone]
        for made in delta.made:
            self.rows[made.id] = made.row
            self.graph_of[made.id] = made.graph
        for node, different in delta.changed:
            self.rows[node] = replace(self.rows[node], **different)
        for node, after in delta.placed:
            self.order.place(node, after, self.graph_of[node])
        self.rewrites = max(self.rewrites, delta.number)

    def nodes(self, graph: int = 0) -> list[int]:
        """The ids of a graph's nodes, in order."""
        return list(self.order.of(graph))

    def graphs(self) -> list[int]:
        """The graphs that are still called, the captured one first."""
        found, waiting = [0], [0]
        while waiting:
            for node in self.order.of(waiting.pop()):
                called = self.rows[node].called
                if called is not None and called.graph >= 0:
                    found.append(called.graph)
                    waiting.append(called.graph)
        return found

    def settled(self) -> GraphState:
        """The same graphs in program order: passes that group nodes restore it when they end."""
        for graph in self.graphs():
            nodes = self.nodes(graph)
            at = -1
            for node in sorted_nodes(nodes, self.rows):
                self.order.place(node, at, graph)
                at = node
        return self

    def text(self, graph: int = 0) -> tuple[Any, ...]:
        """The contents of a graph, with names in place of ids; equal for equal graphs."""
        return tuple(self._said(self.rows[node]) for node in self.order.of(graph))

    def _said(self, row: Row) -> tuple[Any, ...]:
        values = [getattr(row, one.name) for one in fields(row) if one.name not in ("uses", "called")]
        inside: tuple[Any, ...] = ()
        if row.called is not None:
            inside = (replace(row.called, graph=0), self.text(row.called.graph) if row.called.graph >= 0 else ())
        return (*values, tuple(self.rows[used].name for used in row.uses), inside)


class Order:
    """The order of nodes in graphs, as a linked list. The end of graph ``g`` has the number ``-1 - g``.

    >>> order = Order()
    >>> for node, after in ((5, -1), (6, 5), (7, 5)):
    ...     order.place(node, after, 0)
    >>> list(order.of(0))
    [5, 7, 6]
    """

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def place(self, node: int, after: int, graph: int) -> None:
        """Put ``node`` directly behind ``after`` in ``graph``; first if ``after`` is -1."""
        if node in self._next:
            self.remove(node)
        left = -1 - graph if after < 0 else after
        right = self._next.get(left, left)
        self._next[left], self._next[node] = node, right
        self._before[right], self._before[node] = node, left

    def remove(self, node: int) -> None:
        left, right = self._before.pop(node), self._next.pop(node)
        self._next[left], self._before[right] = right, left

    def before(self, node: int) -> int:
        """The node before ``node``; -1 if it is first, -2 if it is in no graph."""
        return max(self._before[node], -1) if node in self._before else -2

    def of(self, graph: int) -> Iterator[int]:
        """The nodes of ``graph``, in order."""
        node = self._next.get(-1 - graph, -1)
        while node >= 0:
            yield node
            node = self._next[node]


def sorted_nodes(nodes: Sequence[int], rows: Mapping[int, Row]) -> list[int]:
    """The nodes in program order, inputs first, as in :func:`fuse.rewrite.regions.sort`."""
    order = program_order(nodes, lambda node: rows[node].uses, lambda node: rows[node].effects)
    ends = [node for node in order if rows[node].op == "output"]
    first = [node for node in order if rows[node].op == "placeholder"]
    return [*first, *(node for node in order if rows[node].op not in ("placeholder", "output")), *ends]
