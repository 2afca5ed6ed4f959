"""Append calls to a graph in less than half the time of ``Graph.create_node``.

    append = Appender(graph)
    y = append(add, (x, 1), {}, value, "model.py:1")

``create_node`` parses names, and searches the arguments for symbolic sizes. A captured graph has no symbolic sizes.
"""

from __future__ import annotations

from typing import Any

from torch._C import _NodeBase
from torch.fx import Graph, Node

from fuse.graph.naming import new_name


class Appender:
    """Appends nodes to ``graph``, or inserts them in front of the node ``before``.

    >>> graph = Graph()
    >>> append = Appender(graph)
    >>> first = append(abs, (graph.placeholder("x"),), {}, 1, "model.py:1")
    >>> second = append(abs, (first,), {}, 1, "")
    >>> [(node.name, node.args, len(node.users)) for node in (first, second)]
    [('abs_1', (x,), 1), ('abs_2', (abs_1,), 0)]
    >>> graph.find_nodes(op="call_function", target=abs) == [first, second], first.meta
    (True, {'val': 1, 'source': 'model.py:1'})
    """

    def __init__(self, graph: Graph, before: Node | None = None) -> None:
        self._graph = graph
        self._names = graph._graph_namespace._obj_to_name
        place = graph._root if before is None else before
        self._put = getattr(place, "_prepend", place.prepend)
        self._targets: dict[int, tuple[str, dict[Node, None]]] = {}
        """``id`` of a target -> the base name of its nodes, and torch.fx's table of these nodes."""

    def __call__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, source: str) -> Node:
        """Append a call of ``target``; its metadata is the ``value`` and the user's line ``source``."""
        graph, known = self._graph, self._targets.get(id(target))
        if known is None:
            alike = graph._find_nodes_lookup_table.table["call_function", target]
            known = self._targets[id(target)] = target.__name__.partition(".")[0], alike
        name = new_name(graph, known[0])
        node: Node = Node.__new__(Node)
        _NodeBase.__init__(node, graph, name, "call_function", target, None)
        node._update_args_kwargs(args, kwargs)
        meta = node.meta
        meta["val"], meta["source"] = value, source
        self._names[node] = name
        self._put(node)
        known[1][node] = None
        graph._len += 1
        return node
