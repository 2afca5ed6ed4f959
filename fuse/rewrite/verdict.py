"""Verdict of a pass on a candidate: a rewrite that it offers, or the reason why not.

A pass is a generator of verdicts. An offered rewrite carries the work as a function that is not yet called: the
pipeline numbers it, looks at the fuel and then calls it, or leaves the graph as it was. Either way the pass goes on.

    for node in candidates(graph):
        if reason := obstacle(node):
            yield declined(node, reason)
        else:
            yield rewrite(node, build, node)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVarTuple

from torch.fx import Node

Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class Rewrite:
    """An offer to rewrite ``nodes``; ``build`` does it when called, once."""

    nodes: tuple[Node, ...]
    build: Callable[[], object] = field(compare=False)
    pattern: str | None = None


@dataclass(frozen=True)
class Rejection:
    """``nodes`` looked like a candidate and stay as they are, for ``reason``."""

    nodes: tuple[Node, ...]
    reason: str
    pattern: str | None = None


Verdict = Rewrite | Rejection


def rewrite(
    nodes: Node | Sequence[Node],
    build: Callable[[*Arguments], object],
    *arguments: *Arguments,
    pattern: str | None = None,
) -> Rewrite:
    """Offer to rewrite ``nodes`` by ``build(*arguments)``.

    ``build`` runs at once when the pipeline accepts the offer, before the pass continues. Without fuel it never runs,
    so a pass offers each candidate once and does not wait for it to disappear. ``pattern`` names the rule where a pass
    has several.

    >>> from torch.fx import Graph
    >>> node = Graph().placeholder("x")
    >>> offer = rewrite(node, list.append, [], 1)
    >>> offer.nodes
    (x,)
    """
    return Rewrite(_as_tuple(nodes), lambda: build(*arguments), pattern)


def declined(nodes: Node | Sequence[Node], reason: str, *, pattern: str | None = None) -> Rejection:
    """Say why ``nodes`` stay as they are; the user reads ``reason`` as it stands.

    >>> from torch.fx import Graph
    >>> declined(Graph().placeholder("x"), "results differ in dtype").reason
    'results differ in dtype'
    """
    return Rejection(_as_tuple(nodes), reason, pattern)


def _as_tuple(nodes: Node | Sequence[Node]) -> tuple[Node, ...]:
    return (nodes,) if isinstance(nodes, Node) else tuple(nodes)
