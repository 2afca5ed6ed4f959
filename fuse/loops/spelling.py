"""A graph as a sequence of tokens, in which loops are stretches that repeat.

    mm(h0, w)  k = exp(v)  add(k)  tanh  mm(h1, w)  add(k)  tanh     ->     mm add tanh  mm add tanh

Left out is what no step owns, because it may stand between the operators of one step and not of another:

    shared      computed once and read by many steps
    ambient     computed for each step, of what lies outside of the loop: mul(time, 0.1), mul(time, 0.2)
                (where two steps want the same, it is there once)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch.fx import Graph, Node

from fuse.loops.reads import DEEPEST_AMBIENT, anchors, may_be_ambient, token
from fuse.rewrite import effects


def spelled(graph: Graph, least: int) -> tuple[list[Node], list[int]]:
    """The anchors among which loops of at least ``least`` steps are looked for, and their tokens, as numbers."""
    nodes = anchors(graph)
    alphabet: dict[object, int] = {}
    tokens = {node: alphabet.setdefault(token(node), len(alphabet)) for node in nodes}
    often = Counter(tokens.values())
    readers = {node: set(effects.readers(node)) for node in nodes}
    ambient = {key for key, count in often.items() if count >= least} - _owned(graph, tokens, readers, often, least)
    left_out: set[Node] = {node for node in nodes if tokens[node] in ambient}
    for node in reversed(nodes):
        if often[tokens[node]] < least and effects.is_pure(node) and readers[node]:
            alike = Counter(tokens[reader] for reader in readers[node] if reader in tokens)
            if readers[node] <= left_out or max(alike.values(), default=0) >= least:
                left_out.add(node)
    found = [node for node in nodes if node not in left_out]
    return found, [tokens[node] for node in found]


def _owned(
    graph: Graph, tokens: Mapping[Node, int], readers: Mapping[Node, set[Node]], often: Counter[int], least: int
) -> set[int]:
    """The tokens that belong to steps: of operators behind others of their kind, or behind others that belong there.

    And of those that something else reads too.
    """
    depth: dict[Node, int] = {}
    found: set[int] = set()
    for node in graph.nodes:
        depth[node] = max((depth[operand] for operand in node.all_input_nodes), default=0)
        if node in tokens and often[tokens[node]] >= least:
            depth[node] += 1
            by_steps = all(reader in tokens and often[tokens[reader]] >= least for reader in readers[node])
            if depth[node] > DEEPEST_AMBIENT or not by_steps or not may_be_ambient(node):
                found.add(tokens[node])
    reads = {(tokens[reader], tokens[node]) for node in tokens for reader in readers[node] if reader in tokens}
    known = 0
    while known < len(found):
        known = len(found)
        found |= {later for later, earlier in reads if earlier in found and often[later] >= least}
    return found
