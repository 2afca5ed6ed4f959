"""Loops of which only the first steps are in the graph: stand-ins tell how many steps are left out.

    16 steps, closing(h16), remaining(h16)      ->      the steps are a loop, and 1,008 are left out

The steps in the graph are rolled, and the loop gets the number of all steps. Operators after the loop must read its
results through stand-ins: the last states, and results of all steps in a ``stack`` or ``cat``.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from fuse.graph.functional import short_graphs
from fuse.graph.functional.short_graphs import LATER, STEPS_KEPT, closing, is_short, opening, remaining
from fuse.graph.outputs import cone
from fuse.loops.reads import is_link
from fuse.loops.rolling import Rolled
from fuse.rewrite import surgery

MOST_BEFORE = 4
"""The most steps before those that a repeat begins with: the first step is recorded in another way."""

COLLECTORS = frozenset(short_graphs.COLLECTORS.values())


def steps_left_out(graph: GraphModule, rolled: Rolled) -> int | str:
    """The number of steps left out behind those of a proved loop, or why the loop cannot take them."""
    if not is_short(graph):
        return 0
    place = {node: k for k, step in enumerate(rolled.steps) for node in step}
    last = len(rolled.steps) - 1
    found: set[tuple[object, ...]] = set()
    for node, k in place.items():
        for reader in _readers(node, place):
            if reader.target is closing:
                _, loop, back, left_out = reader.args
            elif reader.target is remaining:
                _, loop, left_out = reader.args
                back = 0
            else:
                continue
            if last - k != back:
                return "some of the steps in the graph come after the stand-in for the others"
            found.add((loop, left_out))
    if not found:
        return 0
    if len(found) > 1:
        return "stand-ins of two loops are read"
    if rolled.constants or any(moved.windows for moved in rolled.inputs):
        return "the loop reads a table or windows"
    if not STEPS_KEPT // 2 < len(rolled.steps) <= STEPS_KEPT + MOST_BEFORE:
        return "the loop has other steps than those left out"
    if not _reads_inputs(graph, rolled):
        return "the steps can be computed before any call"
    ((_, left),) = found
    assert isinstance(left, int)
    return left


def _reads_inputs(graph: GraphModule, rolled: Rolled) -> bool:
    """Whether the loop depends on anything but constants."""
    needed = cone(rolled.reads)
    inputs = zip(graph.graph.find_nodes(op="placeholder"), graph.meta["signature"].inputs, strict=True)
    return any(node in needed for node, spec in inputs if spec.kind != "constant")


def _readers(node: Node, place: dict[Node, int]) -> Iterator[Node]:
    """The nodes outside of the loop that read ``node``, or a view or part of it."""
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user in place:
                continue
            if is_link(user):
                stack.append(user)
            else:
                yield user


def remainder(values: list[Node]) -> list[Node]:
    """The stand-in for what the last of ``values``, a result of each step at hand, is in those left out, if any."""
    return [user for user in values[-1].users if user.target is remaining][:1]


def closings(rolled: Rolled) -> list[Node]:
    """The stand-ins for single results of steps that are left out."""
    place = {node: k for k, step in enumerate(rolled.steps) for node in step}
    readers = dict.fromkeys(reader for node in place for reader in _readers(node, place))
    return [reader for reader in readers if reader.target is closing]


def opened(graph: GraphModule) -> bool:
    """Let the steps read what is behind openings; whether there are any."""
    openings = graph.graph.find_nodes(op="call_function", target=opening)
    for node in openings:
        (value, _) = node.args
        assert isinstance(value, Node)
        surgery.replace(node, value)
    return bool(openings)


def needs_steps(graph: GraphModule) -> bool:
    """Whether the graph still reads steps that are left out."""
    return any(node.target in LATER for node in graph.graph.nodes)
