"""The verdict of a pass on a candidate: an offered rewrite, or the reason for declining it.

A pass is a generator of verdicts. An offered rewrite contains the function that builds it. The pipeline numbers the
offer, and calls the function if there is fuel left. Then the pass goes on.

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
    """An offer to rewrite ``nodes`` by one call of ``build``."""

    nodes: tuple[Node, ...]
    build: Callable[[], object] = field(compare=False)
    pattern: str | None = None


@dataclass(frozen=True)
class Rejection:
    """A candidate ``nodes`` that stays as it is, for ``reason``."""

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

    If the pipeline accepts the offer, ``build`` runs before the pass goes on. Without fuel it never runs; so a pass
    must offer each candidate once, and not wait for it to disappear. ``pattern`` names the rule, if a pass has several.

    >>> from torch.fx import Graph
    >>> node = Graph().placeholder("x")
    >>> offer = rewrite(node, list.append, [], 1)
    >>> offer.nodes
    (x,)
    """
    return Rewrite(_as_tuple(nodes), lambda: build(*arguments), pattern)


def declined(nodes: Node | Sequence[Node], reason: str, *, pattern: str | None = None) -> Rejection:
    """Decline the candidate ``nodes``; the user reads ``reason`` unchanged.

    >>> from torch.fx import Graph
    >>> declined(Graph().placeholder("x"), "results differ in dtype").reason
    'results differ in dtype'
    """
    return Rejection(_as_tuple(nodes), reason, pattern)


def _as_tuple(nodes: Node | Sequence[Node]) -> tuple[Node, ...]:
    return (nodes,) if isinstance(nodes, Node) else tuple(nodes)
