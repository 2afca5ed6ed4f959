"""Move operators that the next step does not need behind the loop, for all steps at once (loop distribution).

    for t: h = tanh(x[t] + h @ w)                  for t: h = tanh(x[t] + h @ w)
           ys[t] = softmax(h @ out)       ->       ys = softmax(hs @ out)             one product, one kernel
           loss = loss + f(ys[t])                  loss = loss + sum(f(ys))

One product for all steps reads its weight once. If no norm or softmax is left in the loop, threads can share out its
hidden units. An operator that leaves the loop reads values of all steps, which the loop must collect. A product stays
if collecting its operands would cost more than computing it in the steps. A sum over steps that nothing else reads
becomes one sum of all its terms.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fuse import ops
from fuse.graph.loop import Loop, of_all_steps
from fuse.graph.outputs import add_placeholder, cone, inlined, outputs_of, part_of
from fuse.graph.strides import inverse, memory_order
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.loops.lower_loops import lower_loop
from fuse.loops.batching import ROWS_OF_A_WEIGHT, Batcher, CannotBatchError, can_batch
from fuse.loops.building import call_loop
from fuse.loops.reads import is_link

aten = torch.ops.aten

LEAST_WORK = 16_384
"""Multiplications in a step from which a product leaves it, and from which threads should rather split its units."""
MOST_GROWTH = 8
"""Limit on a moved product's new collected input, as a multiple of its result."""


@dataclass(frozen=True)
class Split:
    """A loop split in two: ``loop`` reads ``operands`` of the whole loop, ``values`` are the metadata of its results.

    The graph ``after`` computes the results of the whole loop, in order. Its placeholders are the operands of the whole
    loop, then the results of ``loop``.
    """

    loop: Loop
    operands: tuple[int, ...]
    values: tuple[Tensor, ...]
    after: Graph


def split(
    loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor], *, all_of_it: bool = False
) -> Split | None:
    """``loop`` without the operators that run better behind it; None if there are none.

    With ``all_of_it``, every product, reduction and other operator that may leave does, with its readers.
    """
    whole = _Whole(loop, operands, results)
    leaving = whole.leaving(all_of_it)
    if stuck := [node for node in leaving if not can_batch(node)]:
        leaving = whole.leaving(all_of_it, staying=whole.behind(stuck))
    if not leaving:
        return None
    try:
        return whole.without(leaving)
    except (CannotBatchError, RuntimeError):  # some rules need values, or reject some shapes
        return None


def lowered(loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor]) -> Split | Kernel | Declined:
    """The split of ``loop`` after which it has a kernel, or the kernel of the whole loop, or why it has none.

    Operators leave that run better behind the loop; all that may leave do where the loop has no kernel otherwise.
    """
    if (parts := split(loop, operands, results)) is not None and _has_kernel(parts, operands):
        return parts
    kernel = lower_loop(loop, operands, results)
    if isinstance(kernel, Declined):
        parts = split(loop, operands, results, all_of_it=True)
        if parts is not None and _has_kernel(parts, operands):
            return parts
    return kernel


def _has_kernel(parts: Split, operands: Sequence[Tensor]) -> bool:
    return isinstance(lower_loop(parts.loop, [operands[i] for i in parts.operands], parts.values), Kernel)


def call_split(graph: GraphModule, split: Split, operands: Sequence[Node], after: Node) -> list[Node]:
    """Insert the split loop's two calls behind ``after``; returns the results of the whole loop."""
    made = call_loop(graph, split.loop, [operands[i] for i in split.operands], split.values, after)
    with graph.graph.inserting_before(made[-1].next):
        return inlined(graph.graph, split.after, (*operands, *made))


class _Whole:
    """A loop that is about to be split.

    ``sums``: the terms added to each state that is only a sum, by position of the carry; ``totals``: these sums.
    """

    def __init__(self, loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self.loop, self.spec = loop, loop.spec
        self.operands, self.results = operands, results
        self.nodes = [node for node in loop.body.graph.nodes if node.op == "call_function"]
        self.given: list[Node] = loop.body.graph.find_nodes(op="placeholder")
        self.outputs = outputs_of(loop.body.graph)
        self.states, self.outside = self.given[: self.spec.carries], self.given[self.spec.carries :]
        chains = {i: self._added(i) for i in range(self.spec.carries)}
        self.sums = {i: terms for i, (terms, _) in chains.items() if terms}
        self.totals = {total for _, totals in chains.values() for total in totals}

    def _added(self, carry: int) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The terms that a step adds to a state that is only a sum, and the partial sums; empty for another state."""
        state, total = self.states[carry], self.outputs[carry]
        terms: list[Node] = []
        totals: list[Node] = []
        node, held = state, state.meta["val"]
        while node is not total:
            readers = list(node.users)
            if len(readers) != 1 or readers[0].target is not aten.add.Tensor or readers[0].kwargs:
                return (), ()
            added = [operand for operand in readers[0].args if operand is not node]
            if len(added) != 1 or not isinstance(added[0], Node) or added[0].op != "call_function":
                return (), ()
            if (added[0].meta["val"].shape, added[0].meta["val"].dtype) != (held.shape, held.dtype):
                return (), ()
            node = readers[0]
            terms.append(added[0])
            totals.append(node)
        if len(total.users) != 1 or list(self.outputs).count(total) > 1:
            return (), ()
        return tuple(terms), tuple(totals)

    def needed(self, carries: Iterable[int]) -> set[Node]:
        """The nodes that the next values of these states depend on."""
        return self.behind(self.outputs[carry] for carry in carries)

    def behind(self, nodes: Iterable[Node]) -> set[Node]:
        """These nodes and all nodes that they depend on."""
        return cone(nodes, lambda node: node.op == "call_function")

    def leaving(self, all_of_it: bool, staying: Set[Node] = frozenset()) -> set[Node]:
        """The nodes that leave, with all that depend on them; ``staying`` and sums of terms that stay do not leave."""
        lasting = self.needed(i for i in range(self.spec.carries) if i not in self.sums)
        work = sum(_multiplications(n) for n in lasting)
        units = work >= LEAST_WORK and not any(_kind(n) == "reduction" for n in lasting)
        found: set[Node] = set()
        for node in self.nodes:
            if node in lasting or node in staying:
                continue
            heavy = all_of_it and _kind(node) in ("gemm", "reduction", "other") and not ops.is_pointwise(node.target)
            starts = heavy or (units and _kind(node) == "reduction") or self._is_large_product(node)
            if node not in self.totals and (starts or any(operand in found for operand in node.all_input_nodes)):
                found.add(node)
        return found

    def _is_large_product(self, node: Node) -> bool:
        if node.target not in ROWS_OF_A_WEIGHT:
            return False
        left, right = node.args[-2:]
        invariants = self.outside[len(self.spec.step_inputs) :]
        if right not in invariants:
            return False
        depth, columns = right.meta["val"].shape  # type: ignore[union-attr]
        kept = left in self.outputs or depth <= MOST_GROWTH * columns
        return bool(kept) and _multiplications(node) >= LEAST_WORK

    # ---- building ----------------------------------------------------------------------------------------------------

    def without(self, leaving: set[Node]) -> Split | None:
        leaving_sums = {i: terms for i, terms in self.sums.items() if not leaving.isdisjoint(terms)}
        carries = [i for i in range(self.spec.carries) if i not in leaving_sums]
        if not carries:
            return None
        kept = [i for i in range(self.spec.carries, len(self.outputs)) if self.outputs[i] not in leaving]
        copied, read = self._read_by(leaving)
        read += [term for terms in leaving_sums.values() for term in terms if term not in leaving and term not in read]
        extra = [node for node in read if node not in [self.outputs[i] for i in kept]]
        results = [self.outputs[i] for i in (*carries, *kept)] + extra
        states = [self.states[i] for i in carries]
        body = part_of(self.loop.body.graph, results, states)
        wanted = cone([*states, *results])
        positions = [i for i, node in enumerate(self.given) if node in wanted]
        inputs = [i - self.spec.carries for i in positions if self.spec.carries <= i]
        step_inputs = tuple(self.spec.step_inputs[i] for i in inputs if i < len(self.spec.step_inputs))
        spec = replace(self.spec, carries=len(carries), step_inputs=step_inputs, collected=len(results) - len(carries))
        values = [self.results[i] for i in (*carries, *kept)]
        values += [of_all_steps(node.meta["val"], self.spec.trip_count) for node in extra]
        loop = Loop(body, spec)
        loop.strides = tuple(value.stride() for value in values)
        after = self._after(leaving | copied, leaving_sums, carries, kept, extra, values)
        return None if after is None else Split(loop, tuple(positions), tuple(values), after)

    def _read_by(self, leaving: set[Node]) -> tuple[set[Node], list[Node]]:
        """Views that leave with their readers, and the values that the loop has to collect for them."""
        copied: set[Node] = set()
        read: dict[Node, None] = {}
        for node in self.nodes:
            for operand in node.all_input_nodes if node in leaving else ():
                while operand not in leaving and operand not in self.outside:
                    base = operand.args[0] if is_link(operand) else None
                    if not isinstance(base, Node) or not isinstance(base.meta["val"], Tensor):
                        break
                    if base not in self.outside and base.meta["val"].numel() > operand.meta["val"].numel():
                        break
                    copied.add(operand)
                    operand = base
                if operand not in leaving and operand not in self.outside:
                    read.setdefault(operand)
        return copied, list(read)

    def _after(
        self,
        leaving: set[Node],
        sums: dict[int, tuple[Node, ...]],
        carries: Sequence[int],
        kept: Sequence[int],
        extra: Sequence[Node],
        values: Sequence[Tensor],
    ) -> Graph | None:
        graph = Graph()
        given = [_placeholder(graph, f"operand_{i}", value) for i, value in enumerate(self.operands)]
        made = [_placeholder(graph, f"result_{i}", value) for i, value in enumerate(values)]
        batcher = Batcher(graph, {}, set())
        results = dict(zip((*carries, *kept), made, strict=False))
        for node, value in zip((*(self.outputs[i] for i in kept), *extra), made[len(carries) :], strict=True):
            batcher.known[node] = value
            batcher.batched.add(node)
        for position, node in enumerate(self.outside):
            operand = given[self.spec.carries + position]
            batcher.known[node] = operand
            if position < len(self.spec.step_inputs):
                batcher.known[node] = self._all_steps(batcher, position, operand)
                batcher.batched.add(node)
        for node in self.nodes:
            if node in leaving:
                batcher.add(node)
        for carry, terms in sums.items():
            if not batcher.batched.issuperset(terms):
                return None
            added = [batcher.known[term] for term in terms]
            results[carry] = _summed(batcher, added, given[carry], self.outputs[carry])
        for i in range(self.spec.carries, len(self.outputs)):
            if i not in results:
                node = self.outputs[i]
                if node not in batcher.batched:
                    return None
                results[i] = _laid_out(batcher, batcher.known[node], self.results[i], node.meta.get("source", ""))
        graph.output(tuple(results[i] for i in range(len(self.outputs))))
        return graph

    def _all_steps(self, batcher: Batcher, position: int, source: Node) -> Node:
        """The parts of an operand that all steps read, in the order of the loop's collected outputs."""
        how, count = self.spec.step_inputs[position], self.spec.trip_count
        low, step = min(how.start, how.start + how.step * (count - 1)), abs(how.step)
        bounds = (source, how.dim, low, low + step * (count - 1) + 1, step)
        rows = batcher.insert(aten.slice.Tensor, bounds, {}, self.spec.source)
        if (how.step < 0) != self.spec.backwards:
            rows = batcher.insert(aten.flip.default, (rows, [how.dim]), {}, self.spec.source)
        order = [how.dim, *(d for d in range(rows.meta["val"].dim()) if d != how.dim)]
        return batcher.insert(aten.permute.default, (rows, order), {}, self.spec.source)


def _kind(node: Node) -> str:
    return "view" if node.target is operator.getitem else ops.kind(node.target)


def _multiplications(node: Node) -> int:
    """Multiplications of a product with a weight; 0 for any other operator."""
    if node.target not in ROWS_OF_A_WEIGHT:
        return 0
    rows, columns = node.meta["val"].shape
    depth: int = node.args[-1].meta["val"].shape[0]  # type: ignore[union-attr]
    return int(rows * columns * depth)


def _placeholder(graph: Graph, name: str, value: Tensor) -> Node:
    node = add_placeholder(graph, name)
    node.meta.update(val=value, source="")
    return node


def _summed(batcher: Batcher, added: Sequence[Node], first: Node, total: Node) -> Node:
    """The last state of a sum: its first state plus all terms."""
    source, dtype = total.meta.get("source", ""), first.meta["val"].dtype
    every = added[0]
    for one in added[1:]:
        every = batcher.insert(aten.add.Tensor, (every, one), {}, source)
    rows = batcher.insert(aten.sum.dim_IntList, (every, [0]), {"dtype": dtype}, source)
    return batcher.insert(aten.add.Tensor, (first, rows), {}, source)


def _laid_out(batcher: Batcher, node: Node, like: Tensor, source: str) -> Node:
    """``node`` with the strides of the dense tensor ``like``: a copy if its own strides differ."""
    if node.meta["val"].stride() == like.stride():
        return node
    order = memory_order(like)
    turned = batcher.insert(aten.permute.default, (node, order), {}, source)
    options = {"memory_format": torch.contiguous_format}
    copied = batcher.insert(aten.clone.default, (turned,), options, source)
    return batcher.insert(aten.permute.default, (copied, inverse(order)), {}, source)
