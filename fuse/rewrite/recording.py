"""Record the changes of each rewrite while the passes run, at a cost proportional to the changes.

    with recording(graph) as recorder:      torch.fx and torch.nn note the nodes that they change
        build()                             nodes 21, 9, 7, 8 changed
        recorder.rewritten(1, ...)          the rows of these four are made again, and compared with the earlier ones

A graph changes in few ways: nodes are created, erased, moved, and get other arguments, attributes or metadata; modules
get other submodules. During a recording, the methods of torch that do these things note the nodes that they change. At
any other time they are torch's own, and cost nothing.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.nn import Module

from fuse.graph.locks import ForkedLock
from fuse.graph.loop_with_ends import graph_in
from fuse.graph.patches.patched import patched
from fuse.rewrite.deltas import Candidate, CreatedNode, Delta, GraphState, Recording, Row
from fuse.rewrite.node_rows import row_of

_RECORDING = ForkedLock()
"""Held by the recording thread, because methods of torch are wrapped during a recording."""


@contextlib.contextmanager
def recording(graph: GraphModule) -> Iterator[PassRecorder]:
    """A context with a recorder that notes every change of ``graph``.

    >>> import torch, fuse
    >>> graph = fuse.capture(torch.nn.Tanh(), (torch.zeros(3),))
    >>> with recording(graph) as recorder:
    ...     graph.graph.output_node().prepend(next(iter(graph.graph.nodes)))
    ...     recorder.settled("some_pass")
    >>> [delta.placed for delta in recorder.recording().deltas]
    [((0, 1),)]
    """
    with _RECORDING, contextlib.ExitStack() as wrapped:
        recorder = PassRecorder(graph)
        for owner, name, tells in recorder.watched_methods():
            _wrap(wrapped, owner, name, tells)
        try:
            yield recorder
        finally:
            recorder.unwatch()


def _wrap(until: contextlib.ExitStack, owner: type, name: str, tells: Callable[..., None]) -> None:
    """Make the method ``owner.name`` call ``tells`` after each call, if this version of torch has the method."""
    original: Callable[..., Any] | None = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        tells(result, *args, **kwargs)
        return result

    until.enter_context(patched(owner, {name: method}))


class _Meta(dict[str, Any]):
    """A node's metadata, which notes its changes in ``touched``. A copy of it is a plain dictionary."""

    def __init__(self, held: dict[str, Any], node: Node, touched: dict[Node, None]) -> None:
        super().__init__(held)
        self.node, self.touched = node, touched

    def __setitem__(self, key: str, value: Any) -> None:
        self.touched[self.node] = None
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.touched[self.node] = None
        super().__delitem__(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.touched[self.node] = None
        super().update(*args, **kwargs)

    def pop(self, *args: Any) -> Any:
        self.touched[self.node] = None
        return super().pop(*args)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.touched[self.node] = None
        return super().setdefault(key, default)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        import copy

        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class PassRecorder:
    """Makes the rows, ids and deltas of one graph and of the graphs in it."""

    def __init__(self, graph: GraphModule) -> None:
        self.state = GraphState()
        self._ids: dict[Node, int] = {}
        self._graphs: dict[Graph, int] = {}
        self._owned: dict[GraphModule, Graph] = {}
        self._callers: dict[Module, dict[str, Node]] = {}
        self._touched: dict[Node, None] = {}
        self._moved: dict[Node, None] = {}
        self._exchanged: dict[tuple[Module, str], None] = {}
        self._waiting: list[Graph] = []
        self._deltas: list[Delta] = []
        self._declined: list[Candidate] = []
        self._next = 0
        self._number_of(graph)
        self.start = self._delta(0, "", 0, ())

    def watched_methods(self) -> Iterator[tuple[type, str, Callable[..., None]]]:
        """The methods that change graphs, each with the function that notes the changed nodes."""
        touched, moved, exchanged = self._touched, self._moved, self._exchanged

        def of_result(result: Node, *_args: Any, **_kwargs: Any) -> None:
            touched[result] = None

        def of_self(_result: Any, node: Node, *_args: Any, **_kwargs: Any) -> None:
            touched[node] = None

        def of_argument(_result: Any, _graph: Graph, node: Node, *_args: Any, **_kwargs: Any) -> None:
            touched[node] = None

        def of_moved(_result: Any, _place: Node, node: Node, *_args: Any, **_kwargs: Any) -> None:
            moved[node] = None

        def of_module(_result: Any, module: Module, name: str, value: Any = None, *_args: Any) -> None:
            if isinstance(value, Module) or name in ("spec", "graph"):
                exchanged[module, name] = None

        yield Graph, "create_node", of_result
        yield Graph, "erase_node", of_argument
        for name in ("prepend", "append", "_prepend"):
            yield Node, name, of_moved
        for name in ("__setattr__", "_update_args_kwargs", "_replace_input_with"):
            yield Node, name, of_self
        for name in ("__setattr__", "add_module"):
            yield Module, name, of_module

    def rewritten(self, number: int, pass_name: str, graph: GraphModule, nodes: Sequence[int]) -> None:
        """Record rewrite ``number`` of ``nodes``, which was just made in ``graph``."""
        self._deltas.append(self._delta(number, pass_name, self._graphs[graph.graph], nodes))

    def settled(self, pass_name: str) -> None:
        """Record the changes since the last rewrite, as part of no rewrite."""
        if self._touched or self._moved or self._exchanged:
            delta = self._delta(0, pass_name, 0, ())
            if not delta.is_empty:
                self._deltas.append(delta)

    def declined(self, pass_name: str, pattern: str | None, reason: str, source: str, nodes: Iterable[Node]) -> None:
        """Record a declined candidate."""
        candidate = Candidate(pass_name, pattern, reason, source, self.ids(nodes), self.state.rewrites)
        self._declined.append(candidate)

    def ids(self, nodes: Iterable[Node]) -> tuple[int, ...]:
        """The ids of those ``nodes`` that are in a recorded graph."""
        return tuple(self._ids[node] for node in nodes if node in self._ids)

    def recording(self) -> Recording:
        """Everything recorded so far."""
        return Recording(self.start, tuple(self._deltas), tuple(self._declined))

    def unwatch(self) -> None:
        """Give all nodes plain metadata again."""
        for node in self._ids:
            if isinstance(node.meta, _Meta):
                object.__setattr__(node, "meta", dict(node.meta))

    # ---- deltas ------------------------------------------------------------------------------------------------------

    def _delta(self, number: int, pass_name: str, graph: int, nodes: Sequence[int]) -> Delta:
        """The changes since the last delta; the recorder's state is updated, too."""
        gone = self._settle_exchanged()
        touched, moved = dict(self._touched), dict(self._moved)
        self._touched.clear()
        self._moved.clear()
        erased = [
            self._ids.pop(node) for node in (*touched, *gone) if node in self._ids and (node._erased or node in gone)
        ]
        alive = [node for node in touched if not node._erased and node.graph in self._graphs]
        for old in erased:
            self.state.order.remove(old)
        new = [node for node in alive if node not in self._ids]
        made: list[CreatedNode] = []
        changed: list[tuple[int, dict[str, Any]]] = []
        fresh: dict[Node, None] = {}
        while new or self._waiting:
            fresh |= dict.fromkeys(new)
            self._name(new)
            made += [self._made(node) for node in new]
            new = [node for graph in self._taken() for node in graph.nodes if node not in self._ids]
        for node in alive:
            if node not in fresh:
                changed += self._changed(node)
                made += self._made_inside(fresh)
        placed = self._placed([*(node for node in moved if node in self._ids and node not in fresh), *fresh])
        delta = Delta(number, pass_name, graph, tuple(nodes), tuple(made), tuple(erased), tuple(changed), tuple(placed))
        for old in erased:
            del self.state.rows[old], self.state.graph_of[old]
        self.state.rewrites = max(self.state.rewrites, number)
        return delta

    def _made_inside(self, fresh: dict[Node, None]) -> Iterator[CreatedNode]:
        """The nodes of graphs that changed nodes newly call."""
        while self._waiting:
            new = [node for graph in self._taken() for node in graph.nodes if node not in self._ids]
            fresh |= dict.fromkeys(new)
            self._name(new)
            yield from [self._made(node) for node in new]

    def _settle_exchanged(self) -> set[Node]:
        """Note the nodes that call a replaced module, and return the nodes of graphs that were replaced."""
        gone: set[Node] = set()
        for module, name in self._exchanged:
            callers = self._callers.get(module, {})
            self._touched |= dict.fromkeys(callers[key] for key in (name, "") if key in callers)
            if isinstance(module, GraphModule) and self._owned.get(module, module.graph) is not module.graph:
                old = self._owned[module]
                self._graphs[module.graph] = self._graphs.pop(old)
                self._owned[module] = module.graph
                self._waiting.append(module.graph)
                gone.update(old.nodes)
        self._exchanged.clear()
        return gone

    def _name(self, nodes: Iterable[Node]) -> None:
        """Give ids to nodes, and watch their metadata."""
        for node in nodes:
            self._ids[node] = self._next
            self._next += 1
            object.__setattr__(node, "meta", _Meta(node.meta, node, self._touched))

    def _made(self, node: Node) -> CreatedNode:
        made = CreatedNode(self._ids[node], self._graphs[node.graph], self._row(node))
        self.state.rows[made.id], self.state.graph_of[made.id] = made.row, made.graph
        return made

    def _changed(self, node: Node) -> Iterator[tuple[int, dict[str, Any]]]:
        number, row = self._ids[node], self._row(node)
        old = self.state.rows[number]
        if row != old:
            self.state.rows[number] = row
            values = [(one.name, getattr(row, one.name), getattr(old, one.name)) for one in fields(row)]
            yield number, {name: new for name, new, before in values if new != before}

    def _row(self, node: Node) -> Row:
        if node.op == "call_module" and (owner := node.graph.owning_module) is not None:
            self._callers.setdefault(owner, {})[str(node.target)] = node
            module = owner.get_submodule(str(node.target))
            if graph_in(module) is not module:
                self._callers.setdefault(module, {})[""] = node
        return row_of(node, self._ids, self._number_of)

    def _number_of(self, module: GraphModule) -> int:
        """The number of a graph; the nodes of a new graph become part of the current delta."""
        if module.graph not in self._graphs:
            self._graphs[module.graph] = len(self._graphs)
            self._owned[module] = module.graph
            self._waiting.append(module.graph)
        return self._graphs[module.graph]

    def _taken(self) -> list[Graph]:
        taken, self._waiting = self._waiting, []
        return taken

    def _placed(self, nodes: Iterable[Node]) -> Iterator[tuple[int, int]]:
        """The new positions of those nodes that moved."""
        by_graph: dict[Graph, list[Node]] = {}
        for node in nodes:
            by_graph.setdefault(node.graph, []).append(node)
        order = self.state.order
        for graph, some in by_graph.items():
            number = self._graphs[graph]
            old = [node for node in some if order.before(self._ids[node]) != -2]
            if len(old) > FEW:  # a pass has sorted the graph, and most nodes did not move
                stay = self._staying(graph, number)
                some = [node for node in some if self._ids[node] not in stay]
            for node in sorted(some):
                before = self._ids.get(node._prev, -1)
                if order.before(self._ids[node]) != before:
                    order.place(self._ids[node], before, number)
                    yield self._ids[node], before

    def _staying(self, graph: Graph, number: int) -> set[int]:
        """The largest set of nodes whose relative order did not change."""
        places = {node: at for at, node in enumerate(self.state.order.of(number))}
        now = [self._ids[node] for node in graph.nodes if self._ids[node] in places]
        tails: list[int] = []
        ends: list[int] = []
        back: dict[int, int] = {}
        for node in now:
            at = bisect_left(tails, places[node])
            back[node] = ends[at - 1] if at else -1
            tails[at : at + 1], ends[at : at + 1] = [places[node]], [node]
        stay: set[int] = set()
        node = ends[-1] if ends else -1
        while node >= 0:
            stay.add(node)
            node = back[node]
        return stay


FEW = 64
"""The most nodes that are placed one by one."""
