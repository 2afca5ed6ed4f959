"""Group nodes into kernels, in linear time and without closing a cycle.

Every group has a depth. An edge between two groups always leads to a greater depth. So groups cannot form a cycle, and
any two groups of equal depth may be merged:

    depth 1      2         3         a node joins the deepest groups among those of its operands, if it may;
    mm  ->  [add, tanh] -> mm        otherwise it opens a group one deeper

Afterwards a group merges into its shallowest reader if all its other readers are deeper. The caller's rule decides
which groups may join, by the facts of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch.fx import Graph, Node

from fuse.rewrite import effects
from fuse.rewrite.regions import is_constructor, owner

Facts = TypeVar("Facts")


@dataclass(eq=False)
class Group(Generic[Facts]):
    """Nodes that are to run as one kernel. ``facts``: the input of the caller's rule; None if nothing may join."""

    depth: int
    facts: Facts | None
    members: list[Node] = field(default_factory=list)
    merged_into: Group[Facts] | None = None

    def find(self) -> Group[Facts]:
        """The group that this one was merged into; itself if it was not."""
        group = self
        while group.merged_into is not None:
            group = group.merged_into
        if self is not group:
            self.merged_into = group
        return group


Join = Callable[[Facts, Facts], "Facts | str"]
"""``join(earlier, later)``: the facts of the merged group, or the reason why they stay apart."""


@dataclass(frozen=True)
class Apart:
    """Two connected groups that were not merged, and why."""

    earlier: Node
    later: Node
    reason: str


@dataclass(frozen=True)
class Partition(Generic[Facts]):
    """The groups of a graph, in the order of their last members, and the groups that were not merged."""

    groups: tuple[Group[Facts], ...]
    apart: tuple[Apart, ...]


def partition(graph: Graph, facts_of: Callable[[Node], Facts | None], join: Join[Facts]) -> Partition[Facts]:
    """Group the nodes for which ``facts_of`` returns facts; each other node stays alone.

    Views, and single results of an operator, belong to the group of their base. Nodes with effects keep their order.
    """
    groups: dict[Node, Group[Facts]] = {}
    apart: list[Apart] = []
    last_effect: Group[Facts] | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or owner(node) is not node or is_constructor(node):
            continue
        owners = [owner(argument) for argument in node.all_input_nodes]
        above = {id(g): g for g in (groups[o].find() for o in owners if o in groups)}
        if effects.is_pure(node):
            facts = facts_of(node)
        else:
            facts = None
            if last_effect is not None:
                above[id(last_effect)] = last_effect
        group = Group(0, facts, [node])
        _place(group, list(above.values()), join, apart)
        groups[node] = group
        if not effects.is_pure(node):
            last_effect = group
    roots = list(dict.fromkeys(g.find() for g in groups.values()))
    _sink(roots, groups, join)
    roots = [g for g in roots if g.merged_into is None]
    for group in roots:
        group.members.sort()
    return Partition(tuple(roots), tuple(apart))


def _place(group: Group[Facts], above: list[Group[Facts]], join: Join[Facts], apart: list[Apart]) -> None:
    """Join ``group`` (one node) with the deepest groups ``above`` it, or make it one deeper than they are."""
    depth = max((g.depth for g in above), default=0)
    deepest = [g for g in above if g.depth == depth]
    group.depth = depth + 1
    if group.facts is None or not deepest:
        return
    facts = group.facts
    for candidate in deepest:
        if candidate.facts is None:
            return
        joined = join(candidate.facts, facts)
        if isinstance(joined, str):
            apart.append(Apart(candidate.members[-1], group.members[0], joined))
            return
        facts = joined
    target, *others = sorted(deepest, key=lambda g: -len(g.members))
    for other in (*others, group):
        _merge(other, target)
    target.facts = facts


def _merge(group: Group[Facts], into: Group[Facts]) -> None:
    into.members += group.members
    group.merged_into = into


def _sink(roots: list[Group[Facts]], groups: dict[Node, Group[Facts]], join: Join[Facts]) -> None:
    """Merge each group into its shallowest reader, if all its other readers are deeper."""
    for group in sorted(roots, key=lambda g: -g.depth):
        if group.facts is None or group.merged_into is not None:
            continue
        readers = {id(r): r for m in group.members for r in _readers(m, groups) if r is not group}
        if not readers:
            continue
        depth = min(r.depth for r in readers.values())
        first = [r for r in readers.values() if r.depth == depth]
        if len(first) != 1 or first[0].facts is None:
            continue
        joined = join(group.facts, first[0].facts)
        if not isinstance(joined, str):
            first[0].facts = joined
            _merge(group, first[0])


def _readers(member: Node, groups: dict[Node, Group[Facts]]) -> list[Group[Facts]]:
    """The groups that read ``member``, directly or through views and parts."""
    found = []
    stack = list(member.users)
    while stack:
        user = stack.pop()
        if user in groups:
            found.append(groups[user].find())
        elif user.op != "output":
            stack.extend(user.users)
    return found
