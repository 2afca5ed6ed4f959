"""Roll an unrolled loop up and run it as one kernel, time inside.

    h1 = tanh(xs[0] + h0 @ w)
    h2 = tanh(xs[1] + h1 @ w)      ->      h, hs = loop(h0, xs, w)        one launch, whatever the number of steps
    ...
    out = stack([h1, h2, ...])             out = hs

Capture unrolls a Python loop. Repeated stretches are found in linear time, proved step by step
(:mod:`fuse.rewrite.rolling`), and become a ``Loop`` whose body is one step. What does not depend on the carried state
has left the steps before (products with a shared weight became one).

Declined where the steps do not correspond, or where the body has no persistent kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fuse.graph.periods import find_runs
from fuse.kernel.loop_kernel import lower_loop
from fuse.kernel.lower import Declined
from fuse.rewrite import regions, rolling, surgery
from fuse.rewrite.collectors import dimension_of, pieces_of
from fuse.rewrite.registry import register_pass
from fuse.rewrite.rolling import Built, Rolled
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten
LEAST_STEPS = 4


@register_pass(
    after=(
        "merge_shared_weight_gemms",
        "merge_sibling_gemms",
        "collect_writes",
        "constant_folding",
        "no_ops",
        "dead_code",
    ),
    before="fuse_pointwise",
)
def roll_loops(graph: GraphModule) -> Iterator[Verdict]:
    """Roll an unrolled loop up and run it as one kernel."""
    nodes = rolling.anchors(graph.graph)
    for run in find_runs([rolling.letter(node) for node in nodes], LEAST_STEPS):
        period = run.period
        steps = [nodes[at : at + period] for at in range(run.start, run.end, period)]
        proved = rolling.prove(steps)
        if isinstance(proved, str):
            yield declined(steps[0], proved)
            continue
        built = rolling.build(proved)
        values = result_values(proved, built)
        kernel = lower_loop(built.loop, [n.meta["val"] for n in built.operands], values)
        if isinstance(kernel, Declined):
            yield declined(steps[0], kernel.reason)
        else:
            yield rewrite([n for step in steps for n in step], insert_loop, graph, proved, built, values)
    regions.sort(graph.graph)


def result_values(rolled: Rolled, built: Built) -> list[torch.Tensor]:
    """Metadata of the loop's results: last states, then what is collected, laid out as its collector wants it."""
    body_values = built.loop.body.graph.output_node().meta["val"]
    carries = built.loop.spec.carries
    values = list(body_values[:carries])
    for position, value in zip(built.collected, body_values[carries:], strict=True):
        _, dim = collector_of(rolled, position) or (None, 0)
        values.append(_collected(value, built.loop.trip_count, dim))
    return values


def _collected(value: torch.Tensor, steps: int, dim: int) -> torch.Tensor:
    """A tensor ``[steps, *shape]`` that is contiguous once the steps are moved to dimension ``dim``."""
    with value.fake_mode:  # type: ignore[attr-defined]
        shape = list(value.shape)
        stacked = torch.empty((*shape[:dim], steps, *shape[dim:]), dtype=value.dtype, device=value.device)
        return stacked.movedim(dim, 0)


def collector_of(rolled: Rolled, position: int) -> tuple[Node, int] | None:
    """The ``stack`` (or ``cat`` of unsqueezed pieces) of one value over all steps in order, and its dimension."""
    values = [step[position] for step in rolled.steps]
    for user in list(values[0].users):
        if user.target is aten.stack.default and pieces_of(user) == values:
            return user, dimension_of(user)
        if user.target is aten.unsqueeze.default:
            for collector in user.users:
                if collector.target is aten.cat.default and _pieces_are(collector, values):
                    return collector, dimension_of(collector)
    return None


def _pieces_are(collector: Node, values: list[Node]) -> bool:
    dim, pieces = dimension_of(collector), pieces_of(collector)
    return len(pieces) == len(values) and all(
        p.target is aten.unsqueeze.default and p.args[0] is v and p.args[1] % p.meta["val"].dim() == dim
        for p, v in zip(pieces, values, strict=True)
    )


def insert_loop(graph: GraphModule, rolled: Rolled, built: Built, values: list[torch.Tensor]) -> None:
    """Put the loop where the last step stands and let readers of the steps read its results."""
    parts = _call(graph, rolled, built, values)
    spec = built.loop.spec
    place = {node: (k, j) for k, step in enumerate(rolled.steps) for j, node in enumerate(step)}
    after = parts[-1]
    collected = dict(zip(built.collected, parts[spec.carries :], strict=True))
    for position, part in collected.items():
        if found := collector_of(rolled, position):
            after = _replace_collector(graph, after, part, *found)
    for part, carry in zip(parts, rolled.carries, strict=False):
        if not carry.links:
            _replace_outside(rolled.steps[-1][carry.position], part, place)
    for position, part in collected.items():
        for k, step in enumerate(rolled.steps):
            if rolling.outside_users(step[position], place):
                after = _read_step(graph, after, part, k, step[position], place)
    for step in reversed(rolled.steps):
        for node in reversed(step):
            regions.erase_with_users(node)


def _replace_collector(graph: GraphModule, after: Node, part: Node, collector: Node, dim: int) -> Node:
    """The collected steps, moved to the dimension where the collector stacked them: a view laid out like it."""
    order = [*range(1, dim + 1), 0, *range(dim + 1, part.meta["val"].dim())]
    with graph.graph.inserting_after(after):
        moved = graph.graph.call_function(aten.permute.default, (part, order))
    moved.meta.update(val=collector.meta["val"], source=collector.meta.get("source", ""))
    surgery.replace(collector, moved)
    return moved


def _call(graph: GraphModule, rolled: Rolled, built: Built, values: list[torch.Tensor]) -> list[Node]:
    """Call the loop where the last step stands; returns its results."""
    number = graph.meta.get("loops_made", 0)
    graph.meta["loops_made"] = number + 1
    name = f"loop_{number}"
    graph.add_submodule(name, built.loop)
    with graph.graph.inserting_after(rolled.steps[-1][-1]):
        call = graph.graph.call_module(name, built.operands)
    call.meta.update(val=tuple(values), source=built.loop.spec.source)
    parts: list[Node] = []
    for position, value in enumerate(values):
        with graph.graph.inserting_after(parts[-1] if parts else call):
            part = graph.graph.call_function(operator.getitem, (call, position))
        part.meta.update(val=value, source=built.loop.spec.source)
        parts.append(part)
    return parts


def _read_step(
    graph: GraphModule, after: Node, part: Node, k: int, node: Node, place: dict[Node, tuple[int, int]]
) -> Node:
    with graph.graph.inserting_after(after):
        step = graph.graph.call_function(aten.select.int, (part, 0, k))
    value = part.meta["val"]
    with value.fake_mode:
        step.meta["val"] = value.select(0, k)
    step.meta["source"] = node.meta.get("source", "")
    wanted = node.meta["val"]
    if step.meta["val"].stride() != wanted.stride():
        with graph.graph.inserting_after(step):
            step = graph.graph.call_function(aten.clone.default, (step,), {"memory_format": torch.contiguous_format})
        step.meta.update(val=wanted, source=node.meta.get("source", ""))
    _replace_outside(node, step, place)
    return step


def _replace_outside(node: Node, new: Node, place: dict[Node, tuple[int, int]]) -> None:
    """Users of ``node`` outside of the loop read ``new``; its views are views of ``new`` then, for readers outside."""
    for user in list(node.users):
        if user not in place:
            user.replace_input_with(node, new)
