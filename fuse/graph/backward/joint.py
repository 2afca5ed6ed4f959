"""Capture a call together with its gradients, as a forward graph and a backward graph.

    y = tanh(x @ w)            forward     y = tanh(mm(x, w))                                      saved: y
                      ->       backward    d = tanh_backward(g, y);  mm(d, t(w)), mm(t(x), d)      inputs: y, x, w, g

The model runs under the recording mode, on fake tensors that require gradients where the real ones do. Then PyTorch's
autograd runs backward under the same mode. So everything is as in eager: parts without gradients, ``detach``, writes
through views, gradients of the user's own, and the order of sums. Recording costs the same for a backward operator as
for a forward one. The record is then split in two (:mod:`fuse.graph.backward.backward_graph`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse.devices import without_autocast
from fuse.errors import CaptureError
from fuse.graph.backward import convolution_gradients, recurrent_gradients, scattering, unseen_writes
from fuse.graph.backward.backward_graph import root_of, split_backward
from fuse.graph.backward.detaching import cuts_off, has_own_gradients, is_cut_unseen
from fuse.graph.backward.joint_graphs import Differentiate, Joint, Recorded
from fuse.graph.backward.later_results import later_results
from fuse.graph.backward.recomputing import recomputed
from fuse.graph.backward.refused_effects import (
    refuse_effects,
    refuse_hooks,
    refuse_reshaped,
    refuse_writes,
)
from fuse.graph.capture import prepared
from fuse.graph.fakes.fake_operators import fake_like
from fuse.graph.functional.aliases import View
from fuse.graph.functional.changed_objects import read_later
from fuse.graph.functional.short_graphs import StepsNeeded
from fuse.graph.naming import identifier
from fuse.graph.outputs import add_placeholder
from fuse.graph.patches.gradient_state import gradients_noted
from fuse.graph.patches.reassigning import Assign
from fuse.graph.recording.recorder import Recorder
from fuse.graph.recording.recording_plan import Plan, settled
from fuse.graph.signature import Attribute, Dispatch, OutputSpec, Signature
from fuse.graph.sources import user_line
from fuse.graph.state.fake_parameters import with_fake_parameters
from fuse.graph.state.freed_graphs import GraphFreed, is_freed, is_freed_error
from fuse.graph.state.python_generators import generators_unmoved
from fuse.graph.state.saved_by_autograd import reads_overwritten
from fuse.graph.strides import contiguous_strides, is_dense
from fuse.graph.structure.result_structure import flatten_result

aten = torch.ops.aten


def capture_joint(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    mutated: Sequence[Attribute] = (),
    differentiate: Differentiate | None = None,
    *,
    converts: bool = False,
    shorten: bool = False,
) -> Joint:
    """The functional graphs of ``model(*args, **kwargs)`` and of its gradients.

    ``differentiate`` is tried first; if ``shorten``, on a graph without most steps of long loops
    (:mod:`fuse.graph.functional.short_graphs`). ``mutated`` and ``converts`` are as in
    :func:`fuse.graph.capture.capture`.

    Raises:
        CaptureError: as :func:`fuse.graph.capture.capture`, and if gradients have an effect that a graph cannot
            represent (hooks, gradients left in ``.grad``, states that carry gradients from one call to the next).

    >>> joint = capture_joint(nn.Linear(3, 2), (torch.zeros(4, 3),))
    >>> [node.name for node in joint.backward.graph.nodes]
    ['input_1', 'tangent_0', 't_1', 'mm', 't_2', 'sum_1', 'view', 't_3', 'output']
    >>> joint.given, joint.gradients
    ((BackwardInput(kind='input', index=0), BackwardInput(kind='tangent', index=0)), (None, 0, 1))
    """
    refuse_hooks(model)

    def record(plan: Plan) -> Joint:
        with prepared(model, args, kwargs or {}) as fake_mode:
            recorder = JointRecorder(model, fake_mode, plan, shorten=shorten)
            return recorder.joint(args, dict(kwargs or {}), differentiate)

    return settled(record, mutated, converts)


def _autograd_facts(tensor: Tensor) -> tuple[bool, bool, bool]:
    """Whether autograd records a tensor, whether it keeps the gradient, and whether hooks read it."""
    return tensor.requires_grad, tensor.retains_grad, bool(tensor._backward_hooks)


class JointRecorder(Recorder):
    """Records a call under autograd, then its gradients."""

    gradients = True

    def __init__(self, model: nn.Module, fake_mode: Any, plan: Plan, *, shorten: bool = False) -> None:
        super().__init__(model, fake_mode, plan, shorten=shorten)
        self.leaves: list[Any] = []
        self.lines: dict[int, str] = {}  # sequence number of an autograd node -> the user's line
        self.detached: dict[int, Tensor] = {}
        self.frees = plan.freed
        self.cut_off = False  # whether the gradient of an operand was stopped

    def joint(self, args: tuple[Any, ...], kwargs: dict[str, Any], differentiate: Differentiate | None = None) -> Joint:
        forward = self.run(args, kwargs)
        with self.reader.differentiated(), generators_unmoved("the backward pass"):
            return self._joint(forward, differentiate)

    def _joint(self, forward: GraphModule, differentiate: Differentiate | None) -> Joint:
        steps = self.functional.steps
        if steps is not None and not steps.are_alike(_autograd_facts):
            self._put_back(forward)
        if refuse_writes(self.inputs, forward.meta["signature"].mutations):
            self.cut_off = True
        refuse_effects(self.functional, self.inputs, self.leaves)
        outputs: tuple[OutputSpec, ...] = forward.meta["signature"].outputs
        trained = [i for i, spec in enumerate(outputs) if spec.kind == "graph" and spec.parameter is None]
        requires_grad = [i for i in trained if self._needs_gradient(i)]
        if self.frees:
            requires_grad = self._without_freed(forward, requires_grad)
        inputs = [i for i, fake in enumerate(self.inputs.placeholders) if fake.requires_grad]
        if requires_grad and not inputs:
            raise CaptureError(
                "the result needs gradients only with respect to a tensor that forward makes; a graph cannot hold that"
            )
        if not requires_grad:
            self._put_back(forward)
            unseen_writes.take_out(forward.graph)
            return Joint(forward)
        eagers, later = self._why_eagers(), later_results(self.leaves, requires_grad)
        if self.functional.written and reads_overwritten(self.leaves):
            differentiate = None  # eager's own backward pass raises, if it reads what was overwritten
        if differentiate is not None:
            try:
                recorded = self._recorded(forward, requires_grad, eagers)
                found_joint = differentiate(recorded)
            except StepsNeeded:
                self._put_back(forward)
                recorded = self._recorded(forward, requires_grad, eagers)
                found_joint = differentiate(recorded)
            if found_joint is not None:
                return replace(found_joint, later=later)
            if "ledger" in recorded.forward.meta:
                forward.meta["ledger"] = recorded.forward.meta["ledger"]
        self._put_back(forward)
        count = len(self.dispatches)
        output = forward.graph.output_node()
        tangents = {i: self._tangent(i) for i in requires_grad}
        written = self._written(forward)
        own = has_own_gradients(self.leaves)
        state = self._read_by_gradients() if own else contextlib.nullcontext()
        with self._recording("backward", state), without_autocast():
            found = self._gradients(inputs, tangents)
        self.functional.settle()
        self.inputs.refuse_accumulated()
        signature = replace(forward.meta["signature"], inputs=tuple(self.inputs.specs))
        forward.meta["signature"] = signature
        values = {
            i: self.functional.value(self.inputs.known(g)) for i, g in zip(inputs, found, strict=True) if g is not None
        }
        unseen_writes.take_out(forward.graph)
        backward, given = split_backward(
            forward,
            output,
            tangents,
            written,
            list(values.values()),
            tuple(self.dispatches[count:]),
            self.modules,
            functools.partial(self.recomputed, values),
        )
        position = {i: number for number, i in enumerate(values)}
        gradients = tuple(position.get(i) for i in range(len(self.inputs.specs)))
        trained_results = frozenset(requires_grad)
        return Joint(
            forward, backward, given, gradients, trained_results, own_gradients=own, eagers=eagers, later=later
        )

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if op is torch.ops.prim.device.default:  # autograd asks several times for each operator
            return super().__torch_dispatch__(op, types, args, kwargs)
        forward = torch._C._current_autograd_node() is None
        if forward and torch.Tag.inplace_view in op.tags and args[0].requires_grad:
            refuse_reshaped(self.functional, self.inputs, op, args[0])
        if forward and (functional := unseen_writes.functional_form_of_unseen(op, args)) is not None:
            return self._write_unseen(op, functional, args, kwargs or {})
        if forward and not self.cut_off:
            self.cut_off = cuts_off(op, args, self.detached)
        formula = None if forward else self.formula(op, args)
        if formula is None:
            result = super().__torch_dispatch__(op, types, args, kwargs)
            if op is aten.detach.default and forward and args[0].requires_grad:
                self.detached[id(result)] = result
            return result
        source, count = self._line(), len(self.dispatches)
        with self:
            result = formula(*args, **(kwargs or {}))
        del self.dispatches[count:]  # eager launches the operator itself
        self.dispatches.append(Dispatch(op, args, kwargs or {}, result, source))
        return result

    def _write_unseen(
        self, op: OpOverload, functional: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Record a write that autograd does not see."""
        written: Tensor = args[0]
        source, count, record = self._line(), len(self.dispatches), super().__torch_dispatch__
        made = record(functional, (), args, kwargs)
        kept = record(unseen_writes.WITH_GRADIENT_OF, (), (made, written))
        record(aten.copy_.default, (), (written, kept))
        self.cut_off |= (made.dtype, made.shape) != (written.dtype, written.shape)
        self.detached |= {id(one): one for one in (made, kept)}
        del self.dispatches[count:]  # eager launches the operator itself
        self.dispatches.append(Dispatch(op, args, kwargs, written, source))
        return written

    def recomputed(
        self, gradients: Mapping[int, Node], reads: Mapping[Node, Sequence[Node]], kept: Set[Node]
    ) -> dict[Node, None]:
        """The operators of the forward graph that the backward graph recomputes.

        ``gradients``: the gradients of the inputs, by position; the rest is as in :func:`recomputing.recomputed`.
        """
        return recomputed(reads, kept, root_of)

    def formula(self, op: OpOverload, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """The function that replaces a backward operator in the record, to be called with ``args``; None if there is
        none."""
        known = self.formulas().get(op) or scattering.formula(op, args) or recurrent_gradients.formula(op, args)
        return known or convolution_gradients.formula(op, args)

    def formulas(self) -> dict[Any, Callable[..., Any]]:
        """Backward operators that are recorded as the operators of their formula."""
        return formulas(_MADE_OF_OTHERS)

    def _finish(self, result: Any) -> GraphModule:
        found = super()._finish(result)
        self.leaves = [self.inputs.known(x) if isinstance(x, Tensor) else x for x in flatten_result(result)[0]]
        return found

    @contextlib.contextmanager
    def _read_by_gradients(self) -> Iterator[None]:
        """A context in which the user's gradients, too, see fake parameters: they may run modules, and accumulate."""
        with (
            with_fake_parameters(self.model, self.inputs.of_state),
            gradients_noted(lambda tensor, value: self.inputs.refuse_gradient(tensor)),
        ):
            yield

    def _line(self) -> str:
        node = torch._C._current_autograd_node()
        if node is not None:
            return self.lines.get(node._sequence_nr(), "")
        line = user_line()
        self.lies_at(line)
        return line

    def lies_at(self, line: str) -> None:
        """Note the user's ``line`` for autograd's latest node, if the node is new."""
        self.lines.setdefault(torch.autograd._get_sequence_nr() - 1, line)  # type: ignore[attr-defined]  # torch keeps it to itself

    def _gradients(self, inputs: Sequence[int], tangents: Mapping[int, Node]) -> list[Tensor | None]:
        """The gradients of the inputs.

        A call may reach an input in two ways: through its fake tensor, and as the real tensor, held by a plain
        container. The gradients of both are added.
        """
        fakes = [self.inputs.placeholders[i] for i in inputs]
        held = [self.inputs.data.get(id(fake), fake) for fake in fakes]
        try:
            found = torch.autograd.grad(
                [self.leaves[i] for i in tangents],
                [*fakes, *held],
                [tangent.meta["val"] for tangent in tangents.values()],
                allow_unused=True,
            )
        except RuntimeError as error:
            if is_freed_error(error):
                raise GraphFreed("forward takes gradients, and frees the graph of a part of a result") from error
            raise
        pairs = zip(fakes, held, found[: len(fakes)], found[len(fakes) :], strict=True)
        return [
            one if other is None or fake is real else other if one is None else one + other
            for fake, real, one, other in pairs
        ]

    def _recorded(self, forward: GraphModule, requires_grad: Sequence[int], eagers: str | None) -> Recorded:
        for alias in self.functional.aliases.values():
            # Autograd detaches what it saves; a tensor that was written may hold another value by now.
            if id(alias.tensor) in self.detached or alias.made in self.functional.written:
                continue
            needs = alias.made.meta.get("needs_gradient", False)
            alias.made.meta["needs_gradient"] = needs or alias.tensor.requires_grad
        views = tuple(map(self._views, self.leaves))
        return Recorded(self.short(forward), views, frozenset(requires_grad), eagers)

    def _put_back(self, forward: GraphModule) -> None:
        """Put steps that were left out into the recorded graph."""
        if self.functional.steps is not None:
            self.functional.whole()
            forward.recompile()

    def _without_freed(self, forward: GraphModule, requires_grad: Sequence[int]) -> list[int]:
        """The results among ``requires_grad`` that still have gradients; the signature notes the others."""
        signature = forward.meta["signature"]
        outputs = list(signature.outputs)
        for i in requires_grad:
            outputs[i] = replace(outputs[i], freed=is_freed(self.leaves[i]))
        forward.meta["signature"] = replace(signature, outputs=tuple(outputs))
        return [i for i in requires_grad if not outputs[i].freed]

    def _why_eagers(self) -> str | None:
        """Why gradients must be taken step by step, as eager takes them; None if the operators determine them."""
        if has_own_gradients(self.leaves):
            return "the call has gradients of its own (torch.autograd.Function or a custom operator)"
        if self.cut_off or is_cut_unseen(self.graph, self.functional.aliases.values(), self.detached):
            return "the call stops gradients of an operand (detach, no_grad)"
        return None

    def _views(self, leaf: Any) -> tuple[View, ...]:
        return self.functional.aliases[id(leaf)].chain if isinstance(leaf, Tensor) else ()

    def _needs_gradient(self, position: int) -> bool:
        leaf: Tensor = self.leaves[position]
        if leaf.requires_grad and leaf.is_leaf:
            raise CaptureError("the result is a new tensor that collects gradients")
        if leaf.requires_grad and leaf.is_complex():
            raise CaptureError("gradients of complex results are not supported")
        return leaf.requires_grad

    def _tangent(self, position: int) -> Node:
        leaf: Tensor = self.leaves[position]
        dense = is_dense(leaf)
        stride = leaf.stride() if dense else contiguous_strides(leaf.shape)
        with self.fake_mode:
            tangent = torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device)
        node = add_placeholder(self.graph, f"tangent_{position}")
        node.meta.update(val=tangent, source="")
        self.functional.add_input(tangent, node, None)
        return node

    def _written(self, forward: GraphModule) -> dict[Node, int]:
        """New nodes for the inputs that the call writes or gives other memory, as the backward pass reads them.

        Autograd saves the tensor objects, not their values. What it reads of them is what they hold then, as another
        call may have left it, unless their versions tell that they were written.
        """
        signature: Signature = forward.meta["signature"]
        positions = {mutation.input_index for mutation in signature.mutations} | set(signature.reassigned)
        if any(one.input_index in positions for one in signature.reshaped):
            raise CaptureError("forward writes an argument, and changes its shape in place")
        found: dict[Node, int] = {}
        for i in sorted(positions):
            fake = self.inputs.placeholders[i]
            node = add_placeholder(self.graph, f"{identifier(self.inputs.specs[i].name)}_later")
            node.meta.update(val=fake_like(fake, fake.stride()), source="")
            read_later(self.functional, fake, node)
            found[node] = i
        return found

    def _assign_data(self, tensor: Tensor, other: Tensor, assign: Assign) -> None:
        self.cut_off = True  # gradients read the object later, which operators do not show
        if tensor.requires_grad and id(tensor) in self.inputs.data and not self.inputs.data[id(tensor)].is_leaf:
            self.unfollowed = "it has a gradient function"
        super()._assign_data(tensor, other, assign)


@functools.cache
def formulas(names: str) -> dict[Any, Callable[..., Any]]:
    """Torch's formulas (decompositions) of the operators with these ``names``, separated by spaces."""
    return get_decompositions([getattr(aten, name) for name in names.split()])


_MADE_OF_OTHERS = """
    _log_softmax_backward_data _softmax_backward_data elu_backward gelu_backward hardsigmoid_backward hardswish_backward
    hardtanh_backward leaky_relu_backward log_sigmoid_backward mish_backward mse_loss_backward native_dropout_backward
    native_layer_norm_backward silu_backward smooth_l1_loss_backward softplus_backward
"""
