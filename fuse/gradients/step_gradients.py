"""Make a loop ready to run backwards: record one step of it with its gradients.

    for t: h = tanh(x[t] + h @ w)      forward      the same, and every h is kept
                                       one step     d = (dh + g) * (1 - h²);  dh = d @ wᵀ;  dx = d;  dw = hᵀ @ d

PyTorch's autograd runs over the body of one step, so that cost does not grow with the number of steps and no derivative
is written here. The forward loop collects, for all steps, the tensors that the backward graph of a step reads. Declined
if a step cannot be differentiated by itself: it holds another loop, or a result is not a new tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import Module

from fuse.devices import without_autocast
from fuse.errors import FuseError
from fuse.gradients import convolving, own_gradients
from fuse.gradients.contracting import contraction, terms_of
from fuse.gradients.replaying import replay
from fuse.graph.backward.backward_graph import BackwardInput, root_of
from fuse.graph.backward.joint import JointRecorder, formulas
from fuse.graph.backward.joint_graphs import Joint
from fuse.graph.backward.recomputing import recomputed_in_step
from fuse.graph.backward.unseen_writes import WITH_GRADIENT_OF, WithGradientOf
from fuse.graph.fakes.fake_operators import mode_of
from fuse.graph.loop import Loop, depending, of_all_steps
from fuse.graph.outputs import outputs_of, part_of
from fuse.graph.recording.recording_plan import Plan
from fuse.graph.signature import OutputSpec
from fuse.kernel.arithmetic.dtypes import HALVES

aten = torch.ops.aten


class NotReversible(FuseError):
    """Why a loop has no reversed loop."""


@dataclass(frozen=True)
class Differentiable:
    """A loop that can run backwards.

    ``loop`` has the results of the original loop, and behind them the tensors that gradients need; ``values`` is the
    metadata of its results, ``own`` the number of the original ones. ``step``: one step and its gradients. ``saved``:
    for each tensor that a backward step reads from its forward step, the result of ``loop`` with that tensor for all
    steps, by ``(kind, index)`` of :class:`~fuse.graph.backward.backward_graph.BackwardInput`.
    """

    loop: Loop
    values: tuple[Tensor, ...]
    own: int
    step: Joint
    saved: dict[BackwardInput, int]

    @property
    def requires_grad(self) -> frozenset[int]:
        """The results of the original loop that need gradients."""
        return self.step.requires_grad


def differentiable(
    loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor], requires_grad: set[int], returned: set[int]
) -> Differentiable:
    """``loop`` made ready to run backwards; the operands at the positions ``requires_grad`` need gradients.

    The caller receives the results at the positions ``returned``, and may write to them: if gradients need one, the
    loop collects it a second time.

    Raises:
        NotReversible: a step cannot be differentiated; the message is the reason.
    """
    if loop.spec.backwards:
        raise NotReversible("the loop stores its results in reverse")
    mode = mode_of(operands[0])
    recorder = _BodyRecorder(loop, mode, returned)
    step = recorder.joint(tuple(_of_body(loop, mode, _training_states(loop, requires_grad))), {})
    outputs = outputs_of(step.forward.graph)
    specs = step.forward.meta["signature"].outputs
    if step.backward is None or any(spec.kind != "graph" or spec.view is not None for spec in specs):
        raise NotReversible("a step has a result that is not a new tensor")
    kept = [_uncopied(outputs[spec.index], number in recorder.copied) for number, spec in enumerate(specs)]
    own = len(kept)
    saved: dict[BackwardInput, int] = {}
    given: list[Node] = step.forward.graph.find_nodes(op="placeholder")
    for what in step.given:
        if what.kind == "saved":
            index = next((n for n, spec in enumerate(specs) if spec.index == what.index), None)
            node = outputs[what.index] if index is None else kept[index]
        elif what.kind == "input" and what.index < loop.spec.carries:
            node = given[what.index]
        else:
            continue
        positions = (i for i in range(loop.spec.carries, len(kept)) if kept[i] is node and i not in returned)
        position = next(positions, len(kept))
        if position == len(kept):
            kept.append(node)
        saved[what] = position
    body = part_of(step.forward.graph, kept, given)
    made = Loop(body, replace(loop.spec, collected=len(kept) - loop.spec.carries))
    values = (*results, *(of_all_steps(node.meta["val"], loop.spec.trip_count) for node in kept[own:]))
    made.strides = tuple(value.stride() for value in values)
    return Differentiable(made, values, own, step, saved)


class ReplayRecorder(JointRecorder):
    """Runs a captured graph again under autograd and records it; ``source`` is the current user line."""

    title = ""

    def __init__(self, root: Module, graph: GraphModule, fake_mode: FakeTensorMode) -> None:
        super().__init__(root, fake_mode, Plan())
        self.replayed = graph
        self.given: list[Node] = graph.graph.find_nodes(op="placeholder")
        self.source: str | None = None

    def results(self, known: Mapping[Node, Any]) -> list[Tensor]:
        """The results of the recorded graph; ``known`` has the value of each node of the graph that ran."""
        raise NotImplementedError

    def run_loop(self, node: Node, operands: Sequence[Any]) -> Any:
        """The results of a loop."""
        raise NotImplementedError

    def as_recorded(self, node: Node, value: Any, operands: Any) -> Any:
        """The result ``value`` of an operator, as it is recorded."""
        return value

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphModule:
        """As for a model; ``args`` are the graph's inputs."""
        for number, (node, value) in enumerate(zip(self.given, args, strict=True)):
            self._argument(node.name, number, value)
        known = dict(zip(self.given, args, strict=True))
        with (
            self._recording(self.title, contextlib.nullcontext()),
            torch.enable_grad(),
            without_autocast(),
        ):
            replay(self.replayed.graph, known, self._begin, lambda node: self._operate(node, known))
            results = self.results(known)
        return self._finish(tuple(results))

    def _begin(self, node: Node) -> None:
        self.source = node.meta.get("source", "")

    def _operate(self, node: Node, known: Mapping[Node, Any]) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        if node.target is WITH_GRADIENT_OF:
            return WithGradientOf.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if node.op == "call_function":
            return self.as_recorded(node, node.target(*args, **kwargs), (args, kwargs))  # type: ignore[operator]  # FX types targets loosely
        module = self.replayed.get_submodule(str(node.target))
        if own_gradients.gradient_of(module) is None:
            return self.run_loop(node, args)
        results = own_gradients.run(module, args, self._run_one)
        self._line()
        return results

    def _run_one(self, node: Node, args: Any, kwargs: Any) -> Any:
        self._begin(node)
        return node.target(*args, **kwargs)  # type: ignore[operator]  # FX types targets loosely

    def _line(self) -> str:
        if self.source is None or torch._C._current_autograd_node() is not None:
            return super()._line()
        self.lies_at(self.source)
        return self.source


class _BodyRecorder(ReplayRecorder):
    """Records one step of a loop, each result in memory of its own; ``copied`` are the results copied for that.

    The caller receives the collected outputs at the positions ``returned``.
    """

    title = "a step"

    def __init__(self, loop: Loop, fake_mode: FakeTensorMode, returned: set[int]) -> None:
        super().__init__(loop, loop.body, fake_mode)
        self.spec = loop.spec
        every = range(loop.spec.carries, loop.spec.carries + loop.spec.collected)
        self.collected = frozenset(every) - returned
        self.copied: set[int] = set()

    def results(self, known: Mapping[Node, Any]) -> list[Tensor]:
        outputs = outputs_of(self.replayed.graph)
        return [self._own(number, known[node], outputs, node) for number, node in enumerate(outputs)]

    def run_loop(self, node: Node, operands: Sequence[Any]) -> Any:
        raise NotReversible("a step holds another loop")

    def _own(self, number: int, value: Tensor, outputs: Sequence[Node], node: Node) -> Tensor:
        if node.op != "placeholder" and not value._is_view() and outputs.index(node) == number:
            return value
        self.copied.add(number)
        return value.clone()

    def formulas(self) -> dict[Any, Callable[..., Any]]:
        return super().formulas() | formulas("select_backward slice_backward")

    def formula(self, op: OpOverload, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        if op is aten.convolution_backward.default:
            return convolving.formula(args)
        if op is aten.native_group_norm_backward.default and args[1].dtype not in HALVES:  # eager adds those in float32
            return formulas("native_group_norm_backward")[op]
        return super().formula(op, args)

    def recomputed(
        self, gradients: Mapping[int, Node], reads: Mapping[Node, Sequence[Node]], kept: Set[Node]
    ) -> dict[Node, None]:
        """Nodes to recompute in the backward step. Invariants, inputs and collected outputs cost nothing to save."""
        states = self.graph.find_nodes(op="placeholder")[: self.spec.carries]
        there = {
            root_of(_uncopied(self.values[spec.index], number in self.copied))
            for number, spec in enumerate(self.specs)
            if number in self.collected and spec.kind == "graph"
        }
        outside = self.spec.carries + len(self.spec.step_inputs)
        terms = (term for i, node in gradients.items() if i >= outside for term in terms_of(node))
        contracted = (how for term in terms if (how := contraction(term.base)) is not None)
        stacked = {root_of(operand) for how in contracted for operand in how.operands}

        def price(root: Node) -> int:
            free = root in there or (root.op == "placeholder" and root not in states)
            value: Tensor = root.meta["val"]
            return 0 if free else value.numel() * value.dtype.itemsize

        return recomputed_in_step(reads, price, stacked, root_of)

    def _finish(self, result: Any) -> GraphModule:
        module = super()._finish(result)
        self.values = outputs_of(module.graph)
        self.specs: tuple[OutputSpec, ...] = module.meta["signature"].outputs
        return module


def _training_states(loop: Loop, requires_grad: set[int]) -> set[int]:
    """``requires_grad`` and the states that come to depend on it."""
    found = depending(loop, requires_grad)
    nodes = loop.body.graph.find_nodes(op="placeholder")
    return {number for number, node in enumerate(nodes) if node in found and _is_real(node.meta["val"])}


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _of_body(loop: Loop, mode: FakeTensorMode, requires_grad: set[int]) -> Iterator[Tensor]:
    """Tensors with the layouts of the body's inputs."""
    for number, node in enumerate(loop.body.graph.find_nodes(op="placeholder")):
        held: Tensor = node.meta["val"]
        with mode:
            made = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=held.device)
        yield made.requires_grad_(number in requires_grad)


def _uncopied(node: Node, copied: bool) -> Node:
    operand = node.args[0]
    return operand if copied and isinstance(operand, Node) else node
