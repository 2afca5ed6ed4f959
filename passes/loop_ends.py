"""Fuse small regions before and after a loop into its kernel.

    h0 = add(start, x[0])                              out = whole(start, x, end):
    h = loop(h0, x, w)                     ->              h0 = add(start, x[0])             one thread
    out = logsumexp(add(h, end))                           for t: ...                        the threads of the loop
                                                           out = logsumexp(add(h, end))      one thread

One launch replaces three. A region before the loop joins if it computes initial states or invariants of the loop. A
region after it joins if it reads final states, or single steps of stacked outputs. Other operators may read these
values, too.

Declined where another launch must run between region and loop, and where the region's work is worth several threads.
Declined where this work grows with the number of steps: one kernel serves loops of every length, and such a region has
another kernel for each length.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.cost.work import tensors_in
from fuse.graph.loop import Loop
from fuse.graph.signature import Signature
from fuse.kernel.kernel import Declined
from fuse.kernel.loops.lower_loops import lower_end
from fuse.kernel.lower import can_lower
from fuse.loops.ends import join
from fuse.rewrite import effects, nested, regions
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

ASSEMBLE = torch.ops.fuse.assemble.default
MOST = 16
"""The most operators and regions that join at either end, which bounds the time of a compiler call."""


@register_pass(stage="finish")
def loop_ends(graph: GraphModule) -> Iterator[Verdict]:
    """Fuse small regions before and after a loop into its kernel."""
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    for call in graph.graph.find_nodes(op="call_module"):
        loop = nested.called_module(call)
        if not isinstance(loop, Loop) or not loop.persistent:
            continue
        ends = Ends(call, loop, order, fixed_inputs(graph))
        yield from ends.grow(ends.before, ends.starts(), ends.obstacle_before, -1)
        yield from ends.grow(ends.after, effects.readers(call), ends.obstacle_after, 1)
        if ends.members:
            yield rewrite((call, *ends.members), put, graph, call, ends, order)
    regions.sort(graph.graph)


def fixed_inputs(graph: GraphModule) -> set[Node]:
    """The placeholders that stand for parameters and buffers, whose sizes do not follow from a loop's length."""
    signature: Signature | None = graph.meta.get("signature")
    specs = signature.inputs if signature else ()
    nodes = graph.graph.find_nodes(op="placeholder")
    return {node for node, spec in zip(nodes, specs, strict=False) if spec.kind in ("parameter", "buffer")}


@dataclass
class Ends:
    """The prologue and epilogue of the loop ``call``: groups of operators and regions, each group one loop nest or
    several, in program order."""

    call: Node
    loop: Loop
    order: dict[Node, int]
    fixed: set[Node]
    before: list[list[Node]] = field(default_factory=list)
    after: list[list[Node]] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = self.loop.spec
        reads = list(zip(self.call.args[spec.carries :], spec.step_inputs, strict=False))
        # tensors with a time dimension: the stride between steps, and their number
        self.paces = {
            regions.owner(node): (abs(node.meta["val"].stride(read.dim)), node.meta["val"].shape[read.dim])
            for node, read in reads
            if isinstance(node, Node)
        }
        self.lengths = {spec.trip_count, *(steps for _, steps in self.paces.values())} - {1}

    def starts(self) -> list[Node]:
        """The nodes that compute operands which are not read step by step."""
        carries, reads = self.loop.spec.carries, len(self.loop.spec.step_inputs)
        operands = [*self.call.args[:carries], *self.call.args[carries + reads :]]
        return [regions.owner(node) for node in operands if isinstance(node, Node)]

    @property
    def members(self) -> list[Node]:
        """All nodes that join."""
        return [node for group in (*self.before, *self.after) for node in group]

    def grow(
        self, groups: list[list[Node]], first: list[Node], obstacle: Callable[[Node], str | None], direction: int
    ) -> Iterator[Verdict]:
        """Add joining nodes to ``groups``, from the loop outwards; ``direction``: -1 before the loop, 1 after it."""
        waiting = [(direction * self.order[node], node) for node in dict.fromkeys(first) if node.op != "output"]
        heapq.heapify(waiting)
        seen = set(first)
        while waiting:
            _, node = heapq.heappop(waiting)
            if not is_kernel(node):
                continue
            if reason := is_collected(node) or obstacle(node) or self._put(node, groups, direction):
                yield declined((self.call, node), reason)
                continue
            near = effects.readers(node) if direction > 0 else [regions.owner(read) for read in node.all_input_nodes]
            for other in near:
                if other not in seen and other.op != "output":
                    seen.add(other)
                    heapq.heappush(waiting, (direction * self.order[other], other))

    def _put(self, node: Node, groups: list[list[Node]], direction: int) -> str | None:
        """Put ``node`` into the outermost of ``groups``, or into a new group outside of it; returns the reason if it
        cannot."""
        if sum(map(len, groups)) == MOST:
            return f"at most {MOST} operators and regions join a loop at one end"
        outermost = groups[-1 if direction > 0 else 0] if groups else []
        if outermost and not isinstance(lower_end(regions.build_body(sorted([*outermost, node]))[0]), Declined):
            outermost[:] = sorted([*outermost, node])
            return None
        if isinstance(verdict := lower_end(regions.build_body([node])[0]), Declined):
            return verdict.reason
        groups.insert(len(groups) if direction > 0 else 0, [node])
        return None

    def obstacle_before(self, node: Node) -> str | None:
        """Why ``node``, in front of the loop, cannot join it, or None."""
        if not all(map(self._waits, effects.readers(node))):
            return "another launch reads it before the loop"
        spec = self.loop.spec
        stepped = self.call.args[spec.carries : spec.carries + len(spec.step_inputs)]
        if any(isinstance(read, Node) and regions.owner(read) is node for read in stepped):
            return "the loop reads it step by step: several threads compute the values of all steps"
        return self._over_time(node)

    def obstacle_after(self, node: Node) -> str | None:
        """Why ``node``, behind the loop, cannot join it, or None."""
        inside = {self.call, *self.members}
        for read in map(regions.owner, node.all_input_nodes):
            if read not in inside and self.order[read] > self.order[self.call]:
                return "it waits for another launch behind the loop"
        return self._over_time(node)

    def _waits(self, user: Node) -> bool:
        """Whether ``user`` joins the loop, or comes behind it."""
        inside = user is self.call or user in self.members
        return inside or user.op == "output" or self.order[user] > self.order[self.call]

    def _over_time(self, node: Node) -> str | None:
        read = sum(value.meta["val"].numel() for value in node.all_input_nodes)
        spread = [held for held in tensors_in(node.meta["val"]) if self._is_long(held) and held.numel() > read]
        if spread or any(map(self._has_steps, node.all_input_nodes)):
            return "it grows with the number of steps, and the loop's kernel serves any number"
        return None

    def _has_steps(self, value: Node) -> bool:
        """Whether ``value`` holds more than one step."""
        held, root = value.meta["val"], regions.owner(value)
        if root in self.members or root in self.fixed:
            return False
        if root is self.call:
            number = self._result(value)
            if number < self.loop.spec.carries:
                return False
            pace, steps = abs(self.call.meta["val"][number].stride(0)), self.loop.trip_count
        elif root in self.paces:
            pace, steps = self.paces[root]
        else:
            return self._is_long(held)
        reach = [(size - 1, stride) for size, stride in zip(held.shape, held.stride(), strict=True) if size > 1]
        return any(pace <= stride < pace * steps or stride < pace <= last * stride for last, stride in reach)

    def _result(self, value: Node) -> int:
        """The position of the loop's result that ``value`` is a view of."""
        while value.args[0] is not self.call:
            value = value.args[0]  # type: ignore[assignment]  # FX types arguments loosely
        return value.args[1]  # type: ignore[return-value]  # FX types arguments loosely

    def _is_long(self, held: Tensor) -> bool:
        return not self.lengths.isdisjoint(held.shape)


def is_kernel(node: Node) -> bool:
    """Whether ``node`` is a region, or an operator that kernels can compute."""
    if regions.is_region(node):
        return True
    if not can_lower(node) or not effects.is_pure(node) or effects.view_base(node) is not None:
        return False
    return node.target is not ASSEMBLE and not regions.is_constructor(node)


def is_collected(node: Node) -> str | None:
    """Why ``node`` should rather write its results into a concatenation in place, or None."""
    collected = any(user.target is ASSEMBLE for user in effects.readers(node))
    return "it writes a piece of a concatenation in place" if collected else None


def put(graph: GraphModule, call: Node, ends: Ends, order: dict[Node, int]) -> None:
    """Put the loop with its ends in the place of the loop, in the graph and in ``order``."""
    joined = join(call, ends.before, ends.after)
    position = order[call]
    members = [*ends.members, call]
    order[regions.insert_region(graph, members, joined.module, joined.inputs, joined.results)] = position
