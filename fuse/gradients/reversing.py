"""Differentiate a loop by differentiating its body once.

    for t: h = tanh(x[t] + h @ w)      forward      the same, and every h is kept
                                       backward     for t backwards: d = (dh + g[t]) * (1 - h[t]²);  dh = d @ wᵀ
                                       behind it    dx = all d,  dw = hsᵀ @ ds  for all steps at once

PyTorch's autograd runs over the body of one step (:mod:`fuse.gradients.step_gradients`), so that cost does not grow
with the number of steps and no derivative is written here. The backward graph of the body becomes a loop from the last
step to the first. Its states are the gradients of the states. Each step reads the tensors saved by the forward step,
and the gradients of collected outputs. The gradient of an invariant (a weight) is a sum over steps:
:mod:`fuse.gradients.contracting`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fuse import ops
from fuse.gradients.absent import without
from fuse.gradients.contracting import Contraction, GradientTerm, base_of_all, contraction, terms_of
from fuse.gradients.step_gradients import Differentiable
from fuse.graph.backward.backward_graph import BackwardInput
from fuse.graph.fakes.fake_operators import fake_like, mode_of
from fuse.graph.loop import Loop, LoopSpec, StepInput, of_all_steps
from fuse.graph.outputs import add_placeholder, cone, finished, outputs_of

aten = torch.ops.aten

MOST_KEPT = 2**24
"""The most elements, over all steps, that are collected only to be summed at once: 64 MiB of float32."""


@dataclass(frozen=True)
class Zeros:
    """An operand that is zero everywhere."""

    size: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Prepared:
    """An operand that is computed once, in front of the loop: the last of ``nodes``, from the ``given`` tensors."""

    nodes: tuple[Node, ...]
    given: Mapping[Node, Tensor]

    def value(self) -> Tensor:
        known: dict[Node, Any] = dict(self.given)
        for node in self.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # FX types targets loosely
        made: Tensor = known[self.nodes[-1]]
        return made


@dataclass
class Reversed:
    """The loop that takes gradients from the last step to the first.

    ``operands``: its operands; ``values``: metadata of its results. ``states`` and ``reads`` map an operand of the
    forward loop to the result with its gradient, or with the gradients of the parts that steps read. ``sums``: the
    parts of the gradients of other operands, computed from its results.
    """

    loop: Loop
    operands: list[Tensor | Zeros | Prepared]
    values: list[Tensor]
    states: dict[int, int] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    sums: dict[int, list[GradientPart]] = field(default_factory=dict)


@dataclass(frozen=True)
class AddedTerm:
    """A ``node`` added up from step to step. ``rule`` computes ``term``, a part of the gradient of operand
    ``position``, from the sum; without a rule, the term is the sum itself."""

    position: int
    term: GradientTerm
    node: Node
    rule: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class GradientPart:
    """A part of a gradient, summed over steps.

    ``rule`` computes it from ``sources``: positions of the reversed loop's results, or tensors that exist before it.
    """

    sources: tuple[int | Tensor, ...]
    term: GradientTerm
    rule: Callable[..., Tensor] | None = None

    def total(self, results: Sequence[Tensor], made: dict[Hashable, Tensor]) -> Tensor:
        """The part, for all steps. One already ``made`` from equal sources is copied: gradients share no memory."""
        given = [results[source] if isinstance(source, int) else source for source in self.sources]
        if self.rule is None:
            return self.term.viewed(given[0])
        key = self.rule, *map(id, given)
        if key in made:
            return self.term.viewed(made[key].clone())
        made[key] = self.rule(*given)
        return self.term.viewed(made[key])


def reversed_loop(
    forward: Differentiable, operands: Sequence[Tensor], results: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> Reversed:
    """The reversed loop of ``forward`` for these ``operands`` and ``results``.

    ``tangents`` are the gradients of the original loop's results.
    """
    return _Reversal(forward, operands, results, tangents).made()


class _Reversal:
    """A reversed loop under construction. Its body is the backward graph of a step, with operands in a loop's order."""

    def __init__(
        self,
        forward: Differentiable,
        operands: Sequence[Tensor],
        results: Sequence[Tensor],
        tangents: Sequence[Tensor | None],
    ) -> None:
        self.forward, self.operands, self.results, self.tangents = forward, operands, results, tangents
        self.spec: LoopSpec = forward.loop.spec
        step, backward = forward.step, forward.step.backward
        assert backward is not None
        absent = self._absent()
        self.graph, kept = without(backward, absent)
        given = [what for i, what in enumerate(step.given) if i not in absent]
        self.given = dict(zip(given, self.graph.graph.find_nodes(op="placeholder"), strict=True))
        outputs = outputs_of(self.graph.graph)
        self.gradients: dict[int, Node] = {}
        for position, index in enumerate(step.gradients):
            if index is not None and (result := kept[index]) is not None:
                self.gradients[position] = outputs[result]
        self.body = Graph()
        self.inner: dict[Node, Node] = {}
        self.called: list[Tensor | Zeros | Prepared] = []
        self.stacked: dict[Node, Tensor] = {}  # inputs of a step, stacked over all steps, in order

    def _absent(self) -> list[int]:
        """The tangents of a step that are absent.

        An unused result has no gradient. Nor has a state to which no step passes one. Operands on which only such
        states depend (by ``argmax``, say) get no gradient, as in eager, instead of zeros.
        """
        step, backward = self.forward.step, self.forward.step.backward
        assert backward is not None
        reached = {i for i, tangent in enumerate(self.tangents) if tangent is not None}
        while True:
            tangents = ((i, what) for i, what in enumerate(step.given) if what.kind == "tangent")
            absent = [i for i, what in tangents if what.index not in reached]
            _, kept = without(backward, absent)
            passed = zip(range(self.spec.carries), step.gradients, strict=False)
            more = {i for i, index in passed if index is not None and kept[index] is not None} - reached
            if not more:
                return absent
            reached |= more

    def made(self) -> Reversed:
        spec = self.spec
        states = [i for i in range(spec.carries) if i in self.gradients or BackwardInput("tangent", i) in self.given]
        sums, contracted = self._sums()
        for i in states:
            held = self.operands[i]
            self._give(BackwardInput("tangent", i), f"d_{i}", held, self.tangents[i])
        totals = [self._placeholder(f"sum_{one.position}", one.node.meta["val"], None) for one in sums]
        inputs = self._step_inputs()
        invariants: dict[Node, Tensor] = {}
        for what, node in self.given.items():
            if node not in self.inner:
                value = invariants[node] = self.operands[what.index]
                self.inner[node] = self._placeholder(node.name, value, value)
        first_sum = spec.carries + len(spec.step_inputs)
        wanted = [node for i, node in self.gradients.items() if i < first_sum] + [one.node for one in sums]
        needed = cone([*wanted, *(node for _, _, how in contracted for node in how.operands)])
        needed -= self._prepared(invariants, needed)
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and node in needed:
                self.inner[node] = self.body.node_copy(node, self.inner.__getitem__)
        results = [self._next(i) for i in states]
        results += [self._added(total, one.node) for total, one in zip(totals, sums, strict=True)]
        carries = len(results)
        values = [fake_like(node.meta["val"]) for node in results]
        found = Reversed(self.forward.loop, self.called, values)
        found.states = {i: number for number, i in enumerate(states)}
        for number, one in enumerate(sums, start=len(states)):
            found.sums.setdefault(one.position, []).append(GradientPart((number,), one.term, one.rule))
        for i, node in self.gradients.items():
            if spec.carries <= i < first_sum:
                found.reads[i] = len(results)
                results.append(self.inner[node])
                values.append(of_all_steps(node.meta["val"], spec.trip_count, spec.step_inputs[i - spec.carries].dim))
        sources: dict[Node, int | Tensor] = {}
        for i, term, how in contracted:
            for node in how.operands:
                if node in sources:
                    continue
                if (stacked := self.stacked.get(node)) is not None:
                    sources[node] = stacked
                    continue
                sources[node] = len(results)
                results.append(self.inner[node])
                values.append(of_all_steps(node.meta["val"], spec.trip_count))
            found.sums.setdefault(i, []).append(GradientPart(tuple(sources[n] for n in how.operands), term, how.rule))
        body = finished(self.body, results)
        found.loop = Loop(
            body, LoopSpec(spec.trip_count, carries, inputs, len(results) - carries, spec.source, backwards=True)
        )
        found.loop.strides = tuple(value.stride() for value in values)
        return found

    def _prepared(self, invariants: Mapping[Node, Tensor], needed: Set[Node]) -> set[Node]:
        """Prepare rearranged invariants once, in front of the loop, instead of in each step; returns the nodes
        that the body need not run."""
        cones: dict[Node, dict[Node, None]] = {node: {} for node in invariants}
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and node.all_input_nodes and cones.keys() >= set(node.all_input_nodes):
                if not (ops.is_view(node.target) or ops.kind(node.target) == "movement"):
                    continue
                cones[node] = {n: None for operand in node.all_input_nodes for n in cones[operand]} | {node: None}
        moved = {node for node, made in cones.items() if not all(ops.is_view(n.target) for n in made)}
        for node in sorted(moved & needed):
            if any(user not in cones for user in node.users):
                made = cones[node]
                self.inner[node] = self._placeholder(node.name, node.meta["val"], Prepared(tuple(made), invariants))
        return moved

    def _placeholder(self, name: str, held: Tensor, value: Tensor | Prepared | None) -> Node:
        node = add_placeholder(self.body, name)
        node.meta.update(val=held, source="")
        self.called.append(Zeros(held.shape, held.dtype) if value is None else value)
        return node

    def _give(self, what: BackwardInput, name: str, held: Tensor, value: Tensor | None) -> None:
        node = self._placeholder(name, held if value is None else value, value)
        if what in self.given:
            self.inner[self.given[what]] = node

    def _step_inputs(self) -> tuple[StepInput, ...]:
        spec, last = self.spec, self.spec.trip_count - 1
        found = []
        for what, node in self.given.items():
            if what in self.forward.saved:
                source, how = self.results[self.forward.saved[what]], StepInput(0, last, -1)
            elif what.kind == "tangent" and what.index >= spec.carries:
                tangent = self.tangents[what.index]
                assert tangent is not None
                source, how = tangent, StepInput(0, last, -1)
            elif what.kind == "input" and 0 <= what.index - spec.carries < len(spec.step_inputs):
                read = spec.step_inputs[what.index - spec.carries]
                source, how = self.operands[what.index], StepInput(read.dim, read.start + read.step * last, -read.step)
            else:
                continue
            with mode_of(source), torch.no_grad():
                held = source.detach().select(how.dim, how.start)
            self.inner[node] = self._placeholder(node.name, held, source)
            if how == StepInput(0, last, -1) and source.shape[0] == spec.trip_count:
                self.stacked[node] = source
            found.append(how)
        return tuple(found)

    def _next(self, i: int) -> Node:
        """The gradient of state ``i`` for the step before."""
        if i in self.gradients:
            return self.inner[self.gradients[i]]
        held = self.operands[i]
        return self._insert(aten.zeros.default, list(held.shape), dtype=held.dtype, device=held.device)

    def _added(self, total: Node, node: Node) -> Node:
        return self._insert(aten.add.Tensor, total, self.inner[node], like=node)

    def _insert(self, target: Any, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        node = self.body.call_function(target, args, kwargs)
        fake_args = map_arg(args, lambda operand: operand.meta["val"])
        with mode_of(self.operands[0]), torch.no_grad():
            node.meta["val"] = target(*fake_args, **kwargs)
        node.meta["source"] = like.meta.get("source", "") if like else self.spec.source
        return node

    def _sums(self) -> tuple[list[AddedTerm], list[tuple[int, GradientTerm, Contraction]]]:
        """Gradients of invariants that are summed from step to step, and those contracted after the loop."""
        first = self.spec.carries + len(self.spec.step_inputs)
        terms = [(i, term) for i, node in self.gradients.items() if i >= first for term in terms_of(node)]
        found = [(i, term, contraction(term.base)) for i, term in terms]
        kept = {_whole(node) for i, node in self.gradients.items() if self.spec.carries <= i < first}
        kept |= {_whole(node) for _, _, how in found if how is not None and not how.of_sum for node in how.operands}
        added: list[AddedTerm] = []
        contracted: list[tuple[int, GradientTerm, Contraction]] = []
        for i, term, how in found:
            if how is not None and how.of_sum is not None and self._is_added(how.operands[0], kept):
                added.append(AddedTerm(i, term, how.operands[0], how.of_sum))
            elif how is not None and self._pays(how, term.base):
                contracted.append((i, term, how))
            else:
                added.append(AddedTerm(i, term, term.base))
        return added, contracted

    def _is_added(self, rows: Node, kept: set[Node]) -> bool:
        """Whether the sum of ``rows`` is added up from step to step, so that each step writes to the same memory: they
        are not collected anyway, and their dtype is wide enough to add up many of them."""
        whole, dtype = _whole(rows), rows.meta["val"].dtype
        return whole.op == "call_function" and whole not in kept and dtype.itemsize >= 4

    def _pays(self, how: Contraction, base: Node) -> bool:
        elements = sum(node.meta["val"].numel() for node in how.operands) * self.spec.trip_count
        return base.target is aten.mm.default or elements <= MOST_KEPT


def _whole(node: Node) -> Node:
    """The node that ``node`` is a view of, with all its elements; or ``node`` itself."""
    while (base := base_of_all(node)) is not None:
        node = base
    return node
