"""Draw the random numbers of all steps before the loop.

    for t: m = bernoulli(empty_like(h), 0.9)             ms = stack([bernoulli(empty), bernoulli(empty), ...])
           h = f(h * m)                         ->       for t: h = f(h * ms[t])

The drawn numbers depend on sizes alone, and nothing else draws in between. So the generator gives the same numbers in
the same order, and masks are eager's. The draws come first in the graph, or behind an earlier draw: within the first
step, they would make it unlike the others. Steps that only read the numbers can become one loop; if they do not,
``draw_apart`` removes the stack again. Declined where the strides of the draws differ, and where the caller receives
the numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.patches.seeding import OF_A_LAYOUT
from fuse.loops.rolling import LEAST_STEPS
from fuse.rewrite import effects, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten


@register_pass(stage="clean", after="classes_by_argmax")
def draw_ahead(graph: GraphModule) -> Iterator[Verdict]:
    """Draw the random numbers of all steps before the loop."""
    draws = [n for n in graph.graph.nodes if ops.is_random(n.target)]
    escaping: set[Node] | None = None
    for stretch in stretches(draws):
        groups = [group for group in alike(stretch) if len(group) >= LEAST_STEPS and not is_stacked(group[0])]
        if not groups:
            continue
        if escaping is None:
            escaping = effects.escaping(graph)
        if any(draw in escaping for group in groups for draw in group):
            yield declined(stretch[0], "the caller receives the drawn numbers")
        elif odd := next((draw for draw in stretch if not draw.meta["val"].is_contiguous()), None):
            yield declined(odd, "the drawn tensors differ in strides")
        else:
            yield rewrite(stretch[0], gather, stretch, groups)


def stretches(draws: Sequence[Node]) -> list[list[Node]]:
    """Consecutive draws into tensors whose old values nothing reads."""
    found: list[list[Node]] = [[]]
    for draw in draws:
        if draw.target in OF_A_LAYOUT and isinstance(draw.meta["val"], Tensor):
            found[-1].append(draw)
        else:
            found.append([])
    return [stretch for stretch in found if stretch]


def alike(stretch: Sequence[Node]) -> list[list[Node]]:
    """The draws grouped by user line, arguments and sizes."""
    groups: dict[Hashable, list[Node]] = {}
    for draw in stretch:
        held = draw.meta["val"]
        numbers = surgery.constant_key([None if isinstance(a, Node) else a for a in draw.args])
        key = (
            draw.target,
            numbers,
            surgery.constant_key(draw.kwargs),
            held.dtype,
            tuple(held.shape),
            draw.meta.get("source", ""),
        )
        groups.setdefault(key, []).append(draw)
    return list(groups.values())


def is_stacked(draw: Node) -> bool:
    """Whether ``draw`` is part of a stack already."""
    return all(user.target is aten.stack.default for user in draw.users)


def gather(stretch: Sequence[Node], groups: Sequence[Sequence[Node]]) -> None:
    """Move the draws in front of everything that draws nothing, stack those of each group, and let each step read its
    part."""
    last = stretch[0].prev
    while last.op not in ("placeholder", "root") and not ops.is_random(last.target):
        last = last.prev
    for draw in stretch:
        held, before = draw.meta["val"], list(draw.all_input_nodes)
        last.append(draw)
        for operand in before:
            place = surgery.insert(
                draw, aten.empty.memory_format, list(held.shape), dtype=held.dtype, device=held.device, like=draw
            )
            draw.replace_input_with(operand, place)
            if not operand.users and operand.op == "call_function":
                surgery.erase(operand)
        last = draw
    after = last.next
    for group in groups:
        users = [list(draw.users) for draw in group]
        stack = surgery.insert(after, aten.stack.default, list(group), 0, like=group[0])
        for step, draw in enumerate(group):
            part = surgery.insert(after, aten.select.int, stack, 0, step, like=draw)
            for user in users[step]:
                user.replace_input_with(draw, part)
