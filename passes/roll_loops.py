"""Roll an unrolled loop into one kernel.

    h1 = tanh(xs[0] + h0 @ w)
    h2 = tanh(xs[1] + h1 @ w)      ->      h, hs = loop(h0, xs, w)        one launch, whatever the number of steps
    ...
    out = stack([h1, h2, ...])             out = hs

Capture unrolls a Python loop. Repeated sequences are found in linear time, proved step by step
(:mod:`fuse.loops.rolling`), and become a ``Loop`` whose body is one step. Earlier passes have moved work that does not
depend on the carried state out of the steps (products with a shared weight are merged).

Declined where the steps do not correspond.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fuse import ops
from fuse.graph.fakes.fake_operators import mode_of
from fuse.graph.functional.left_out import LAST_STEPS
from fuse.graph.functional.short_graphs import StepsNeeded, cat_of_steps, remaining, stack_of_steps
from fuse.graph.loop import of_all_steps
from fuse.graph.periods import RepeatedStretch, find_repetitions
from fuse.graph.strides import contiguous_strides
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.loops.lower_loops import lower_loop
from fuse.loops import loop_programs
from fuse.loops.body_operands import StepResult
from fuse.loops.building import Built, build, call_loop, last_states, operand_node, outside_reads
from fuse.loops.collectors import dimension_of, pieces_of
from fuse.loops.distributing import Split, call_split, lowered, split
from fuse.loops.loop_boundaries import segments
from fuse.loops.reads import Obstacle
from fuse.loops.rolling import LEAST_STEPS, Rolled, RolledPart, bytes_carried, find_loop
from fuse.loops.short_loops import closings, remainder, steps_left_out
from fuse.loops.stopping import stop_of
from fuse.loops.tokens import spelled
from fuse.passes.common_subexpressions import common_subexpressions
from fuse.passes.no_ops import no_ops
from fuse.rewrite import effects, regions, surgery
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten
_STACKS, _CATS = (aten.stack.default, stack_of_steps), (aten.cat.default, cat_of_steps)
_ALL_COLLECTORS = (*_STACKS, *_CATS)
MOST_WIDER = 8
"""Limit on the carried bytes of a step, as a multiple of the least possible, if no step stays outside."""
_SIMPLIFYING = (common_subexpressions.__name__, no_ops.__name__)
MOST_FUSED = 2_000
"""The most elementwise operators of one kernel that still compiles fast."""


@register_pass(stage="loops", after="merge_shared_weight_gemms")
def roll_loops(graph: GraphModule) -> Iterator[Verdict]:
    """Roll an unrolled loop into one kernel."""
    yield from roll(graph, step_by_step=True)


def roll(
    graph: GraphModule,
    obstacle: Callable[[Rolled], str | None] = lambda rolled: None,
    *,
    step_by_step: bool = False,
) -> Iterator[Verdict]:
    """Roll the loops that meet no ``obstacle``; with ``step_by_step``, also those without a kernel."""
    nodes, tokens = spelled(graph.graph, LEAST_STEPS)
    position_of = {node: at for at, node in enumerate(nodes)}
    stretches = [(0, len(nodes), len(nodes))]  # start, end, and an upper bound of the period of loops in it
    while stretches:
        start, end, below = stretches.pop()
        for run in find_repetitions(tokens[start:end], LEAST_STEPS, below):
            last = end_of_run = nodes[0]
            for steps, found in loops_in(aligned(nodes, tokens, start + run.start, run)):
                last = end_of_run = steps[-1][-1]
                if isinstance(found, Obstacle):
                    yield declined(steps[0], found.reason)
                    # layers that differ may each hold a loop
                    stretches.append((position_of[steps[0][0]], position_of[last] + 1, run.period))
                else:
                    for outside, reason in found.peeled:
                        yield declined(outside, reason)
                    last = found.rolled.steps[-1][-1]
                    yield from judged(graph, found.rolled, obstacle(found.rolled), step_by_step)
            if last is not end_of_run:  # a peeled last step may be the first one of the next loop
                stretches.append((position_of[last] + 1, end, below))
                break
    regions.sort(graph.graph)


def loops_in(steps: list[list[Node]]) -> Iterator[tuple[list[list[Node]], RolledPart | Obstacle]]:
    """The loop whose steps are ``steps``, or several consecutive loops; or the reason why there is none."""
    found = find_loop(steps)
    following = segments(steps, LEAST_STEPS) if isinstance(found, Obstacle) else []
    for some in following:
        yield from loops_in(some)
    if not following:
        yield steps, found


def aligned(nodes: Sequence[Node], tokens: Sequence[object], start: int, run: RepeatedStretch) -> list[list[Node]]:
    """The steps of a repeat that begins at ``start``, shifted so that they carry few bytes.

    A repeat may begin in the middle of the user's step, because the first step differs. If the tokens do not continue
    to the end of the last shifted step, a whole step stays outside, in pieces: such a shift must carry far fewer bytes.
    """
    period = run.period
    end = start + period * run.count
    whole = 0  # tokens that continue the repeat behind the last step
    while whole < period - 1 and tokens[end + whole : end + whole + 1] == tokens[start + whole : start + whole + 1]:
        whole += 1
    carried = bytes_carried([nodes[at : at + period] for at in range(start, end, period)])
    cut = min(range(period), key=lambda k: (carried[k], k))
    free = min(range(whole + 1), key=lambda k: (carried[k], k))
    if carried[free] <= MOST_WIDER * carried[cut]:
        cut = free
    count = run.count if cut <= whole else run.count - 1
    if count < LEAST_STEPS:
        cut, count = 0, run.count
    first = start + cut
    return [list(nodes[at : at + period]) for at in range(first, first + period * count, period)]


def judged(graph: GraphModule, proved: Rolled, reason: str | None, step_by_step: bool) -> Iterator[Verdict]:
    """The verdict on a proved loop: rolled into a kernel, or with ``step_by_step`` into a program, or declined."""
    left = steps_left_out(graph, proved)
    if isinstance(left, int):
        proved.left_out = left
    else:
        reason = left
    if reason := reason or _better_unrolled(proved):
        yield declined(proved.steps[0], reason)
        return
    built = build(proved)
    run_passes(built.loop.body, _SIMPLIFYING)  # of a loop with a kernel, no later pass sees the body
    values = result_values(proved, built)
    built.loop.strides = tuple(value.stride() for value in values)
    nodes = [node for step in proved.steps for node in step]
    if not left and (stopping := stop_of(graph, proved, built.collected)) is not None:
        usual, built.loop.spec = built.loop.spec, replace(built.loop.spec, stop=stopping[0])
        if isinstance(lower_loop(built.loop, built.values, values), Kernel):
            built.loop.truths = stopping[1]
            yield rewrite(nodes, insert_loop, graph, proved, built, values)
            return
        built.loop.spec = usual
    found = lowered(built.loop, built.values, values)
    if not isinstance(found, Declined):
        yield rewrite(nodes, insert_loop, graph, proved, built, values, found if isinstance(found, Split) else None)
        return
    if step_by_step:
        yield from as_program(graph, proved, found.reason)
    else:
        yield declined(proved.steps[0], found.reason)


def as_program(graph: GraphModule, proved: Rolled, reason: str) -> Iterator[Verdict]:
    """The verdict on a loop without a kernel: run step by step, or declined.

    Steps begin where a step has the fewest launches.
    """
    least: int | None = None
    for rolled in loop_programs.cuts(proved):
        built = build(rolled, persistent=False)
        if why := loop_programs.obstacle(built.loop):
            yield declined(proved.steps[0], f"{reason}; {why}")
            return
        _, parts = _stepwise(built)
        launches = loop_programs.launches_of_step(parts.loop if parts else built.loop)
        if least is None or launches < least:
            least, chosen = launches, rolled
    yield declined(proved.steps[0], f"{reason}: the loop has no kernel, its steps run one after another")
    built = build(chosen, persistent=False)
    values, parts = _stepwise(built)
    nodes = [node for step in chosen.steps for node in step]
    yield rewrite(nodes, insert_loop, graph, chosen, built, values, parts)


def _stepwise(built: Built) -> tuple[list[torch.Tensor], Split | None]:
    """Metadata of the results of a loop that runs as a program, and its split, if any; settles its body."""
    values = list(loop_programs.native_values(built.loop))
    built.loop.strides = tuple(value.stride() for value in values)
    parts = split(built.loop, built.values, values, all_of_it=True)
    loop_programs.settle(parts.loop if parts else built.loop)
    return values, parts


def _better_unrolled(rolled: Rolled) -> str | None:
    """Why steps that could roll should rather fuse unrolled, or None."""
    operators = rolled.count * len(rolled.typical)
    if rolled.inputs or operators > MOST_FUSED or not all(ops.is_pointwise(n.target) for n in rolled.typical):
        return None
    return "the steps are elementwise and read no parts of a tensor: they fuse without a loop"


def result_values(rolled: Rolled, built: Built) -> list[torch.Tensor]:
    """Metadata of the loop's results: last states, then collected outputs in the layout of their collector."""
    values = list(built.loop.body.graph.output_node().meta["val"])
    for (result, k), number in last_states(rolled).items():
        values[number] = next((n.meta["val"] for n in result.of(rolled.steps[k])), values[number])
    for number, result in enumerate(built.collected, start=len(rolled.carries)):
        _, dim = collector_of(rolled, result) or (None, 0)
        values[number] = of_all_steps(values[number], built.loop.trip_count, dim)
    return values


def collector_of(rolled: Rolled, result: StepResult) -> tuple[Node, int] | None:
    """The contiguous ``stack`` or ``cat`` (perhaps of unsqueezed pieces) of one result of all steps in order, and its
    dimension of steps."""
    values = _of_every_step(rolled, result)
    for user in list(values[0].users) if values else ():
        if user.target in _ALL_COLLECTORS and pieces_of(user) == values and _is_contiguous(user):
            return user, dimension_of(user)
        if user.target is aten.unsqueeze.default:
            for collector in user.users:
                if collector.target in _CATS and _pieces_are(collector, values):
                    return (collector, dimension_of(collector)) if _is_contiguous(collector) else None
    return None


def _of_every_step(rolled: Rolled, result: StepResult) -> list[Node]:
    """The node of a result in each step, and of those left out; empty if a step lacks it (a view that only earlier
    steps take)."""
    values = [result.of(step) for step in rolled.steps]
    if not all(len(nodes) == 1 for nodes in values):
        return []
    found = [node for (node,) in values]
    return [*found, *remainder(found)] if rolled.left_out else found


def _is_contiguous(node: Node) -> bool:
    held = node.meta["val"]
    return bool(held.stride() == contiguous_strides(held.shape))


def _pieces_are(collector: Node, values: list[Node]) -> bool:
    dim, pieces = dimension_of(collector), pieces_of(collector)
    if collector.target is cat_of_steps and pieces[-1].target is remaining and pieces[-1].args[0] is pieces[-2]:
        pieces = pieces[:-1]  # what remains are equal pieces of the steps left out
    return len(pieces) == len(values) and all(
        p.target is aten.unsqueeze.default and p.args[0] is v and p.args[1] % p.meta["val"].dim() == dim
        for p, v in zip(pieces, values, strict=True)
    )


def insert_loop(
    graph: GraphModule, rolled: Rolled, built: Built, values: list[torch.Tensor], distributed: Split | None = None
) -> None:
    """Insert the loop (or its two parts) at the last step, and let readers of the steps read its results."""
    last = rolled.steps[-1][-1]
    operands = [operand_node(graph, operand, last) for operand in built.operands]
    for number, state in enumerate(operands[: 0 if built.loop.persistent else len(rolled.carries)]):
        if state.meta["val"].stride() != values[number].stride():
            operands[number] = loop_programs.copied(state, last, values[number].stride())
    if distributed is None:
        parts = call_loop(graph, built.loop, operands, values, last)
    else:
        parts = call_split(graph, distributed, operands, last)
    position_of = {node: (k, j) for k, step in enumerate(rolled.steps) for j, node in enumerate(step)}
    escaping = effects.escaping(graph)
    after = parts[-1]
    collected = dict(zip(built.collected, parts[len(rolled.carries) :], strict=True))
    for result, part in collected.items():
        if found := collector_of(rolled, result):
            after = _replace_collector(after, part, *found)
        _replace_other_collectors(rolled, result, part)
    lasts = {last: parts[n] for (result, k), n in last_states(rolled).items() for last in result.of(rolled.steps[k])}
    for state, part in lasts.items():  # layouts of states may alternate: the last step's may not be the typical step's
        wanted = state.meta["val"].stride()
        if part.meta["val"].stride() != wanted and outside_reads(state, position_of):
            after = lasts[state] = loop_programs.copied(part, after.next, wanted)
    if rolled.left_out:
        after = _replace_closings(graph, rolled, lasts, collected, after, escaping)
        if any(outside_reads(state, position_of) for state in lasts):  # the last at hand, which is not the last
            raise StepsNeeded
        lasts = {}
    _replace_outside(lasts, position_of, lambda user: _returns(user, escaping))
    reads: dict[Node, Node] = {}
    for result, part in collected.items():
        for k, step in enumerate(rolled.steps):
            for value in result.of(step):
                if outside_reads(value, position_of):
                    escapes = value in escaping and value not in lasts
                    after = reads[value] = _read_step(graph, after, part, k, value, escapes)
    _replace_outside(reads, position_of)
    _replace_outside(lasts, position_of)
    for step in reversed(rolled.steps):
        for node in reversed(step):
            regions.erase_with_users(node)
            if effects.only_raises(node) and not node.users and not node._erased:  # the loop raises instead of it
                operands = node.all_input_nodes
                graph.graph.erase_node(node)
                surgery.erase(*operands)
    surgery.erase(*(part for part in parts if part.target is aten.clone.default))  # of unread last states


def _replace_closings(
    graph: GraphModule,
    rolled: Rolled,
    lasts: Mapping[Node, Node],
    collected: Mapping[StepResult, Node],
    after: Node,
    escaping: set[Node],
) -> Node:
    """Let readers of stand-ins for late results read these from the loop, as readers of the last steps do."""
    of_collected = {
        value: (part, k)
        for result, part in collected.items()
        for k, step in enumerate(rolled.steps[-LAST_STEPS:], start=rolled.count - LAST_STEPS)
        for value in result.of(step)
    }
    for stand_in in closings(rolled):
        value: Node = stand_in.args[0]  # type: ignore[assignment]
        if value in lasts:
            chosen = {user for user in stand_in.users if value not in of_collected or _returns(user, escaping)}
            stand_in.replace_all_uses_with(lasts[value], chosen.__contains__)
        if stand_in.users:
            if value not in of_collected:
                raise StepsNeeded
            part, k = of_collected[value]
            after = read = _read_step(graph, after, part, k, value, stand_in in escaping and value not in lasts)
            stand_in.replace_all_uses_with(read)
        graph.graph.erase_node(stand_in)
    return after


def _returns(user: Node, escaping: Container[Node]) -> bool:
    """Whether a reader of a step is the graph's output, or a result of the graph."""
    return user.op == "output" or user in escaping


def _replace_collector(after: Node, part: Node, collector: Node, dim: int) -> Node:
    """Let a view of the collected steps with the layout of ``collector``, behind ``after``, stand for it: time moved to
    dimension ``dim``."""
    before, shape = after.next, list(collector.meta["val"].shape)
    order = [*range(1, dim + 1), 0, *range(dim + 1, part.meta["val"].dim())]
    moved = surgery.insert(before, aten.permute.default, part, order, like=collector)
    if not moved.meta["val"].is_contiguous():
        moved = surgery.insert(before, aten.clone.default, moved, memory_format=torch.contiguous_format, like=collector)
    if list(moved.meta["val"].shape) != shape:  # ``cat`` merges steps and their rows into one dimension
        moved = surgery.insert(before, aten.view.default, moved, shape, like=collector)
    surgery.replace(collector, moved)
    return moved


def _replace_other_collectors(rolled: Rolled, result: StepResult, part: Node) -> None:
    """Let collectors of all steps with other pieces, reversed or in another layout, read them as one piece."""
    values = _of_every_step(rolled, result)
    collectors = [user for user in (values[0].users if values else ()) if user.target in _ALL_COLLECTORS]
    for collector in filter(_is_contiguous, collectors):
        if collector._erased:  # a collector inside a step: nothing reads the steps once another one is replaced
            continue
        pieces, dim = pieces_of(collector), dimension_of(collector)
        at, back = pieces.index(values[0]), values[::-1]
        backwards = at + 1 >= len(values) and pieces[at + 1 - len(values) : at + 1] == back
        if not backwards and pieces[at : at + len(values)] != values:
            continue
        start = at + 1 - len(values) if backwards else at
        order = [*range(1, dim + 1), 0, *range(dim + 1, part.meta["val"].dim())]
        joined = surgery.insert(collector, aten.permute.default, part, order)
        if backwards:
            joined = surgery.insert(collector, aten.flip.default, joined, [dim])
        around = [*pieces[:start], *pieces[start + len(values) :]]
        if collector.target in _STACKS:
            around = [surgery.insert(collector, aten.unsqueeze.default, piece, dim) for piece in around]
        else:
            if not joined.meta["val"].is_contiguous():
                joined = surgery.insert(collector, aten.clone.default, joined, memory_format=torch.contiguous_format)
            sizes = list(joined.meta["val"].shape)
            joined = surgery.insert(collector, aten.view.default, joined, [*sizes[:dim], -1, *sizes[dim + 2 :]])
        all_pieces = [*around[:start], joined, *around[start:]]
        collected = surgery.insert(collector, aten.cat.default, all_pieces, dim, like=collector)
        if collected.meta["val"].stride() == collector.meta["val"].stride():
            surgery.replace(collector, collected)
        else:
            surgery.erase(collected)


def _read_step(graph: GraphModule, after: Node, part: Node, k: int, node: Node, escapes: bool) -> Node:
    """Step ``k`` of a collected output; a copy if the caller receives it or its layout differs."""
    with graph.graph.inserting_after(after):
        step = graph.graph.call_function(aten.select.int, (part, 0, k))
    value = part.meta["val"]
    with mode_of(value):
        step.meta["val"] = value.select(0, k)
    step.meta["source"] = node.meta.get("source", "")
    wanted = node.meta["val"]
    if escapes or step.meta["val"].stride() != wanted.stride():
        with graph.graph.inserting_after(step):
            step = graph.graph.call_function(aten.clone.default, (step,), {"memory_format": torch.contiguous_format})
        step.meta.update(val=wanted, source=node.meta.get("source", ""))
    return step


def _replace_outside(
    replaced: Mapping[Node, Node],
    position_of: Mapping[Node, tuple[int, int]],
    chosen: Callable[[Node], bool] = lambda user: True,
) -> None:
    """Let users outside of the loop read a node's replacement, and views of it in place of the node's views."""
    users = {user for node in replaced for user in node.users if user not in position_of and chosen(user)}
    for user in users:
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda node: replaced.get(node, node))
