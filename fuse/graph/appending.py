"""Append calls to a graph, many at once: what ``Graph.create_node`` does, in less than half of its time.

    call = new_call(graph, add)  ...  new_call(graph, tanh)      nodes that others can name as their operands
    append(graph, [(call, (x, y), {}, value, line), ...])         now they are part of the graph

``create_node`` parses names and looks through arguments for symbolic sizes, which a captured graph has none of. In one
loop over many nodes the processor finds the same code and tables in its caches again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch._C import _NodeBase
from torch.fx import Graph, Node

from fuse.graph.naming import new_name

Call = tuple[Node, tuple[Any, ...], dict[str, Any], Any, str]
"""A new node, its arguments, its value and the user's line."""

_set_name: Any = _NodeBase.name.__set__  # type: ignore[attr-defined]  # torch.fx looks for hooks, which no new node has


def new_call(graph: Graph, target: Any) -> Node:
    """A node that calls ``target``, and belongs to ``graph`` as soon as it is appended."""
    node: Node = Node.__new__(Node)
    _NodeBase.__init__(node, graph, "", "call_function", target, None)
    return node


def append(graph: Graph, calls: Iterable[Call]) -> None:
    """Put new nodes at the end of ``graph``.

    >>> graph = Graph()
    >>> first, second = new_call(graph, abs), new_call(graph, abs)
    >>> append(graph, [(first, (graph.placeholder("x"),), {}, 1, "model.py:1"), (second, (first,), {}, 1, "")])
    >>> [(node.name, node.args, len(node.users)) for node in (first, second)]
    [('abs_1', (x,), 1), ('abs_2', (abs_1,), 0)]
    >>> graph.find_nodes(op="call_function", target=abs) == [first, second], first.meta
    (True, {'val': 1, 'source': 'model.py:1'})
    """
    names, insert, table = graph._graph_namespace._obj_to_name, graph._insert, graph._find_nodes_lookup_table
    for node, args, kwargs, value, source in calls:
        node._update_args_kwargs(args, kwargs)
        meta = node.meta
        meta["val"], meta["source"] = value, source
        name = new_name(graph, node.target.__name__.partition(".")[0])  # type: ignore[union-attr]  # it can be called
        _set_name(node, name)
        names[node] = name
        insert(node)
        table.insert(node)
        graph._len += 1
