"""A graph as a sequence of tokens, in which unrolled loops are repeats.

    mm(h0, w)  k = exp(v)  add(k)  tanh  mm(h1, w)  add(k)  tanh     ->     mm add tanh  mm add tanh

The sequence leaves out nodes that no step owns, because they may come between the operators of some steps only:

    shared      computed once and read by many steps
    ambient     computed for each step from values outside of the loop: mul(time, 0.1), mul(time, 0.2)
                (once only, if two steps need the same)
    behind      computed from steps, and read by nothing but results: a tensor that grows by each step's result
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch.fx import Graph, Node

from fuse.loops.reads import DEEPEST_AMBIENT, anchors, may_be_ambient, token
from fuse.rewrite import effects


def spelled(graph: Graph, least: int) -> tuple[list[Node], list[int]]:
    """The anchors in which to search for loops of at least ``least`` steps, and their tokens, as numbers."""
    nodes = anchors(graph)
    alphabet: dict[object, int] = {}
    tokens = {node: alphabet.setdefault(token(node), len(alphabet)) for node in nodes}
    often = Counter(tokens.values())
    readers = {node: set(effects.readers(node)) for node in nodes}
    ambient = {key for key, count in often.items() if count >= least} - _owned(graph, tokens, readers, often, least)
    left_out: set[Node] = {node for node in nodes if tokens[node] in ambient}
    behind = {graph.output_node()}
    for node in reversed(nodes):
        if often[tokens[node]] < least and effects.is_pure(node) and readers[node]:
            alike = Counter(tokens[reader] for reader in readers[node] if reader in tokens)
            if readers[node] <= behind:
                behind.add(node)
            if readers[node] <= left_out or max(alike.values(), default=0) >= least:
                left_out.add(node)
    left_out |= behind
    found = [node for node in nodes if node not in left_out]
    return found, [tokens[node] for node in found]


def _owned(
    graph: Graph, tokens: Mapping[Node, int], readers: Mapping[Node, set[Node]], often: Counter[int], least: int
) -> set[int]:
    """The tokens that belong to steps.

    These are tokens of operators that follow long chains of frequent ones, that have other readers than steps, or that
    cannot be ambient; and frequent tokens that read one of these.
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
