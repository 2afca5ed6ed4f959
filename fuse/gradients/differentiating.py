"""Gradients of a call whose loops are rolled, at a cost that does not grow with the number of steps.

    recorded call  ->  plain passes and rolling  ->  operators and loops  ->  autograd over these  ->  forward, backward
                                                         loop             ->  loop, and a reversed loop (reversing.py)

The recorded operators run again under autograd. Each loop is one function of its operands there, and its gradient is a
reversed loop. The operators alone must determine the gradients: calls that stop some of them (``detach``, ``no_grad``)
or define their own (``autograd.Function``) are differentiated step by step instead. So are irreversible loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes

from fuse import ops
from fuse.errors import FuseError
from fuse.gradients import own_gradients
from fuse.gradients.reversing import Prepared, Zeros, reversed_loop
from fuse.gradients.step_gradients import Differentiable, NotReversible, ReplayRecorder, differentiable
from fuse.graph.backward.detaching import any_needs_gradient
from fuse.graph.backward.joint import formulas
from fuse.graph.backward.joint_graphs import Differentiate, Joint, Recorded
from fuse.graph.fakes.fake_operators import mode_of
from fuse.graph.functional.aliases import View
from fuse.graph.loop import Loop
from fuse.graph.outputs import copied, inlined, outputs_of
from fuse.graph.signature import OutputSpec, Signature
from fuse.kernel.kernel import Declined
from fuse.kernel.loops.lower_loops import lower_loop
from fuse.loops.distributing import Split, lowered
from fuse.rewrite import effects, registry
from fuse.rewrite.ledger import Ledger, Rejections
from fuse.rewrite.patterns import registry as patterns
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.regions import results_of_call

aten = torch.ops.aten

NAME = "gradients_by_loops"
"""The name of differentiation in reports, next to the passes."""

OWN = "pattern_gradients"
"""The pass that marks matches of patterns with their own gradients; it runs if patterns do."""


def by_loops(passes: Sequence[str] | None = None, fuel: int | None = None) -> Differentiate:
    """A function that differentiates a call loop by loop, after those of ``passes`` that run before gradients."""
    chosen = registry.select(passes)
    matched = any(info.name == "match_patterns" for info in chosen)
    names = [info.name for info in chosen if info.before_gradients] + [OWN] * matched
    return lambda recorded: _differentiated(recorded, names, fuel)


def _differentiated(recorded: Recorded, passes: Sequence[str], fuel: int | None) -> Joint | None:
    if recorded.eagers is not None:
        if OWN in passes and any(one.backward and one.enabled for one in patterns.registered()):
            _declined(recorded, recorded.eagers)
        return None
    graph = copied(recorded.forward)
    ledger = run_passes(graph, passes, fuel)
    if not graph.graph.find_nodes(op="call_module"):
        rejected = tuple(one for one in ledger.rejected if one.pass_name == OWN)
        recorded.forward.meta["ledger"] = Ledger((), (), rejected, ledger.seconds)  # the rewrites are discarded
        return None
    try:
        joint = _Replay(graph, recorded).joint_of_rolled()
    except FuseError as why:
        _declined(recorded, str(why), next(iter(graph.graph.find_nodes(op="call_module"))))
        return None
    joint.forward.meta["ledger"] = ledger
    return joint


def _declined(recorded: Recorded, why: str, at: Node | None = None) -> None:
    """Record in the ledger why the call is differentiated as in eager."""
    source = (at.meta["source"],) if at is not None and at.meta["source"] else ()
    rejections = Rejections(NAME, None, why, 1, at.name if at is not None else "", source)
    recorded.forward.meta["ledger"] = Ledger((), (), (rejections,), {})


def _lies(spec: OutputSpec, graph: GraphModule) -> list[tuple[int, int]]:
    """Size and stride of each dimension of a result with more than one element."""
    value = outputs_of(graph.graph)[spec.index].meta["val"]
    size, stride = (spec.view.size, spec.view.stride) if spec.view else (value.shape, value.stride())
    return [(n, step) for n, step in zip(size, stride, strict=True) if n > 1]


class _Replay(ReplayRecorder):
    """Runs a rolled graph again under autograd and records its joint graph."""

    title = "forward"

    def __init__(self, graph: GraphModule, recorded: Recorded) -> None:
        given = graph.graph.find_nodes(op="placeholder")
        super().__init__(Module(), graph, mode_of(given[0].meta["val"]))
        self.recorded = recorded
        self.signature: Signature = graph.meta["signature"]
        self.calls = 0

    def joint_of_rolled(self) -> Joint:
        """The joint graph of the call that was recorded.

        Raises:
            FuseError: the call cannot be differentiated loop by loop; the message is the reason.
        """
        joint = self.joint(tuple(node.meta["val"] for node in self.given), {})
        wanted = [i for i, spec in enumerate(self.signature.outputs) if spec.kind in ("graph", "input")]
        signature: Signature = joint.forward.meta["signature"]
        if len(signature.inputs) != len(self.given) or joint.backward is None:
            raise NotReversible("the call has other inputs when it runs again")
        outputs = list(self.signature.outputs)
        memory: dict[tuple[str, int], int] = {}
        for i, spec in zip(wanted, signature.outputs, strict=False):
            was = outputs[i]
            same = spec.kind == was.kind and memory.setdefault((was.kind, was.index), spec.index) == spec.index
            if not same or (spec.kind == "input" and spec != was):
                raise NotReversible("a result shares other memory when the call runs again")
            if spec.kind == "graph" and _lies(spec, joint.forward) != _lies(was, self.recorded.forward):
                raise NotReversible("a result has other strides when the call runs again")
            outputs[i] = replace(spec, parameter=was.parameter)
        positions = [index for (kind, _), index in memory.items() if kind == "graph"]
        if len(set(positions)) < len(positions):
            raise NotReversible("results share memory when the call runs again")
        mutations = []
        for mutation, spec in zip(self.signature.mutations, signature.outputs[len(wanted) :], strict=True):
            if spec.kind != "graph" or spec.view is not None:
                raise NotReversible("written tensors share memory when the call runs again")
            mutations.append(replace(mutation, value_index=spec.index))
        joint.forward.meta["signature"] = replace(self.signature, outputs=tuple(outputs), mutations=tuple(mutations))
        requires_grad = frozenset(wanted[i] for i in joint.requires_grad)
        if requires_grad != self.recorded.requires_grad:
            raise NotReversible("other results need gradients when the call runs again")
        written = {mutation.input_index for mutation in mutations}
        if any(what.kind == "input" and what.index in written for what in joint.given):
            raise NotReversible("gradients need an input as it was before the call writes it")
        given = tuple(replace(g, index=wanted[g.index]) if g.kind == "tangent" else g for g in joint.given)
        joint = replace(joint, given=given, requires_grad=requires_grad)
        return replace(joint, rolled=True, own_gradients=False, eagers=None)

    def results(self, known: Mapping[Node, Any]) -> list[Tensor]:
        values = outputs_of(self.replayed.graph)
        results = []
        learned = self.signature.learning.leaves if self.signature.learning else 0
        for i, (spec, views) in enumerate(zip(self.signature.outputs, self.recorded.views, strict=True)):
            if spec.kind in ("graph", "input"):
                value = known[values[spec.index] if spec.kind == "graph" else self.given[spec.index]]
                is_learned = i < learned and spec.kind == "graph"  # a learned value is read whole, not through views
                results.append(
                    self._as_tensor(self.functional.value(value)) if is_learned else self._leaf(spec, views, value)
                )
        return results + [known[values[mutation.value_index]] for mutation in self.signature.mutations]

    def _leaf(self, spec: OutputSpec, views: Sequence[View], value: Tensor) -> Tensor:
        if spec.view is not None:
            for view in views:
                if any(isinstance(argument, Node) for argument in view.args):
                    raise NotReversible("a view depends on a tensor")
                value = view.op(value, *view.args, **view.kwargs)
        return value

    def as_recorded(self, node: Node, value: Any, operands: Any) -> Any:
        """``value`` of ``node``, detached unless the recorded value needed gradients.

        A functional operator may have gradients where eager's in-place one has none (statistics of a batch norm).
        """
        random = ops.is_random(node.target)
        if random and any_needs_gradient(value):  # the gradient of the functional form may use other numbers (rrelu)
            raise NotReversible(f"{node.target} draws numbers that its gradient needs")
        if not isinstance(value, Tensor):
            return value
        recorded = node.meta.get("needs_gradient", value.requires_grad)
        if recorded and not value.requires_grad and any_needs_gradient(operands):
            raise NotReversible(f"{node.target} has no gradients")
        return value if recorded else value.detach()

    def _returned(self, call: Node) -> set[int]:
        """The results of a loop whose memory the caller receives."""
        values = outputs_of(self.replayed.graph)
        roots = {effects.root(value) for value in values}
        return {int(part.args[1]) for part in call.users if part in roots}  # type: ignore[arg-type]  # FX types arguments loosely

    def run_loop(self, node: Node, operands: Sequence[Any]) -> Any:
        loop: Loop = self.replayed.get_submodule(str(node.target))  # type: ignore[assignment]  # a loop's call
        values, operands = node.meta["val"], list(operands)
        requires_grad = {i for i, operand in enumerate(operands) if operand.requires_grad}
        if not requires_grad:
            own_gradients.put_back(loop.body)
            return self.record_loop(loop, operands, values)
        with _disable_current_modes():
            made = differentiable(loop, operands, values, requires_grad, self._returned(node))
            if isinstance(why := lower_loop(made.loop, operands, made.values), Declined):
                raise NotReversible(why.reason)
        results: tuple[Tensor, ...] = _LoopFunction.apply(self, made, *operands)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._line()
        return results

    def formulas(self) -> dict[Any, Callable[..., Any]]:
        """Also that of a batch norm: its functional form would save the statistics that it replaces."""
        return super().formulas() | formulas("native_batch_norm_backward")

    # ---- recording loops -------------------------------------------------------------------------------------------

    def record_loop(self, loop: Loop, operands: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call ``loop``, whose results have the layouts of ``values``; returns its results."""
        nodes = [self.functional.value(self.inputs.known(operand)) for operand in operands]
        return tuple(self._as_tensor(node) for node in self._call(loop, nodes, values))

    def record_split(self, parts: Split, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call a loop and the operators behind it; returns the results of the whole loop."""
        nodes = [self.functional.value(self.inputs.known(operand)) for operand in operands]
        made = self._call(parts.loop, [nodes[i] for i in parts.operands], parts.values)
        return tuple(map(self._as_tensor, inlined(self.graph, parts.after, (*nodes, *made))))

    def _call(self, loop: Loop, nodes: Sequence[Node], values: Sequence[Tensor]) -> list[Node]:
        name = f"loop_{self.calls}"
        self.calls += 1
        self.modules.add_module(name, loop)
        call = self.graph.create_node("call_module", name, tuple(nodes), {}, name)
        call.meta.update(val=tuple(values), source=loop.spec.source)
        return results_of_call(call, range(len(values)))

    def _as_tensor(self, node: Node) -> Tensor:
        """A tensor that stands for ``node`` from now on."""
        held: Tensor = node.meta["val"]
        with _disable_current_modes(), self.fake_mode:
            tensor = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=held.device)
        self.functional.own(tensor, node)
        return tensor


class _LoopFunction(torch.autograd.Function):
    """A loop as one node of autograd, on the fake tensors of a recording."""

    @staticmethod
    def forward(ctx: Any, recorder: _Replay, made: Differentiable, *operands: Tensor) -> tuple[Tensor, ...]:
        results = recorder.record_loop(made.loop, operands, made.values)
        own = results[: made.own]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(result for i, result in enumerate(own) if i not in made.requires_grad))
        ctx.recorder, ctx.made, ctx.operands, ctx.results = recorder, made, operands, results
        return own

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        recorder: _Replay = ctx.recorder
        made: Differentiable = ctx.made
        operands: tuple[Tensor, ...] = ctx.operands
        with _disable_current_modes():
            back = reversed_loop(made, operands, ctx.results, tangents)
        called = [_operand(given, operands[0]) for given in back.operands]
        with _disable_current_modes():
            found = lowered(back.loop, called, back.values)
        if isinstance(found, Declined):
            raise NotReversible(found.reason)
        if isinstance(found, Split):
            results = recorder.record_split(found, called)
        else:
            results = recorder.record_loop(back.loop, called, back.values)
        gradients: list[Tensor | None] = [None] * len(operands)
        for i, position in back.states.items():
            gradients[i] = results[position]
        for i, position in back.reads.items():
            gradients[i] = _of_source(results[position], operands[i], made.loop, i)
        sums: dict[Hashable, Tensor] = {}
        for i, shares in back.sums.items():
            totals = [share.total(results, sums) for share in shares]
            gradients[i] = functools.reduce(torch.add, totals)
        needed = ctx.needs_input_grad[2:]
        return None, None, *(g if n else None for g, n in zip(gradients, needed, strict=True))


def _operand(given: Tensor | Zeros | Prepared, like: Tensor) -> Tensor:
    if isinstance(given, Zeros):
        return torch.zeros(given.size, dtype=given.dtype, device=like.device)
    return given.value() if isinstance(given, Prepared) else given


def _of_source(gradients: Tensor, source: Tensor, loop: Loop, position: int) -> Tensor:
    """The gradient of a tensor that steps read part by part; ``gradients`` are those of the parts."""
    how, count = loop.spec.step_inputs[position - loop.spec.carries], loop.spec.trip_count
    if how.step < 0:
        gradients = gradients.flip(0)
    low, pace = min(how.start, how.start + how.step * (count - 1)), abs(how.step)
    parts = gradients.movedim(0, how.dim)
    if pace == 1 and count == source.shape[how.dim]:
        return parts
    whole = torch.zeros(source.shape, dtype=source.dtype, device=source.device)
    result: Tensor = aten.slice_scatter(whole, parts, how.dim, low, low + pace * (count - 1) + 1, pace)
    return result
