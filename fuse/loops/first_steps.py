"""Find operators of a loop's first step, whose initial states are filled with one number.

    h = zeros(3, 8)                       m = mul(zeros, 0.9)       first step
    for t: h = 0.9 * h + x[t]      ->     m = mul(h1, 0.9)          the others

These must not be folded to constants, nor merged with those of another state that begins alike: the first step would
differ from the others and stay outside of the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from torch.fx import GraphModule, Node

from fuse.loops.reads import Read, leaves, read_of, tensors_of, token
from fuse.rewrite import effects
from fuse.rewrite.evaluate import FILLS

FEWEST_OTHERS = 3
"""An operator on a filled tensor may belong to a first step if at least so many equal ones have other operands."""


def first_steps(graph: GraphModule, constants: Collection[Node] = ()) -> set[Node]:
    """Operators on filled tensors with the same token as at least as many, and three, on other tensors. Linear time.

    The others must not be ``constants``, and no two may compute the same: if every step computes a value twice, the
    first step's copies may be merged too.

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
    """Whether two operators on filled tensors may compute the same; otherwise no merge could hurt a first step."""
    tokens = [token(node) for node in _begun(graph)]
    return len(set(tokens)) < len(tokens)


def _reads(node: Node) -> Hashable:
    """The operands of ``node`` as a key: roots with their views, and numbers."""
    reads = (read_of(leaf) if isinstance(leaf, Node) else leaf for leaf in leaves(node))
    return tuple((read.root, read.links) if isinstance(read, Read) else read for read in reads)


def _begun(graph: GraphModule) -> dict[Node, None]:
    """The operators that compute with filled tensors or views of them."""
    found: dict[Node, None] = {}
    stack = [fill for target in FILLS for fill in graph.graph.find_nodes(op="call_function", target=target)]
    while stack:
        for user in stack.pop().users:
            if effects.is_view(user):
                stack.append(user)
            elif user.op == "call_function" and tensors_of(user):
                found[user] = None
    return found
