"""The first step of a loop whose states begin as tensors of one number.

    h = zeros(3, 8)                       m = mul(zeros, 0.9)       first step
    for t: h = 0.9 * h + x[t]      ->     m = mul(h1, 0.9)          the others

Folded to a constant, or merged with an equal one of another state, the first step would be unlike the others, and stay
outside of the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from torch.fx import GraphModule, Node

from fuse.loops.reads import Read, leaves, read_of, tensors_of, token
from fuse.rewrite import effects
from fuse.rewrite.evaluate import FILLS

FEWEST_OTHERS = 3
"""Alike operators without a filled operand from which one with such an operand may be of a loop's first step."""


def first_steps(graph: GraphModule, constants: Collection[Node] = ()) -> set[Node]:
    """The operators on filled tensors that are like at least as many, and like three, on others. Linear.

    The others must be none of ``constants``, and no two of them equal: what is computed twice in every step is to be
    merged in the first one too.

    >>> import torch, fuse
    >>> class Decay(torch.nn.Module):
    ...     def forward(self, x):
    ...         h = torch.zeros(8)
    ...         for step in x:
    ...             h = 0.9 * h + step
    ...         return h
    >>> graph = fuse.capture(Decay(), (torch.ones(5, 8),))
    >>> sorted(str(node.target) for node in first_steps(graph))
    ['aten.mul.Tensor']
    """
    firsts = _begun(graph)
    alike: dict[object, set[Node]] = {}
    for target in dict.fromkeys(node.target for node in firsts):
        for node in graph.graph.find_nodes(op="call_function", target=target, sort=False):
            if node in firsts or (node not in constants and tensors_of(node)):
                alike.setdefault(token(node), set()).add(node)
    found: set[Node] = set()
    for nodes in alike.values():
        filled, others = nodes & firsts.keys(), nodes - firsts.keys()
        enough = len(others) >= max(FEWEST_OTHERS, len(filled))
        if enough and len({_reads(node) for node in others}) == len(others):
            found |= filled
    return found


def some_alike(graph: GraphModule) -> bool:
    """Whether two operators on filled tensors may come to compute the same thing: otherwise none need be told apart."""
    tokens = [token(node) for node in _begun(graph)]
    return len(set(tokens)) < len(tokens)


def _reads(node: Node) -> Hashable:
    """What ``node`` computes with: views of what, and numbers."""
    reads = (read_of(leaf) if isinstance(leaf, Node) else leaf for leaf in leaves(node))
    return tuple((read.root, read.links) if isinstance(read, Read) else read for read in reads)


def _begun(graph: GraphModule) -> dict[Node, None]:
    """The operators that compute something of filled tensors or views of them."""
    found: dict[Node, None] = {}
    stack = [fill for target in FILLS for fill in graph.graph.find_nodes(op="call_function", target=target)]
    while stack:
        for user in stack.pop().users:
            if effects.is_view(user):
                stack.append(user)
            elif user.op == "call_function" and tensors_of(user):
                found[user] = None
    return found
