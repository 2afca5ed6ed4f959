"""Make a loop ready to run backwards: record one step of it with its gradients.

    for t: h = tanh(x[t] + h @ w)      forward      the same, and every h is kept
                                       one step     d = (dh + g) * (1 - h²);  dh = d @ wᵀ;  dx = d;  dw = hᵀ @ d

PyTorch's autograd runs over the body of one step, so that cost does not grow with the number of steps and no derivative
is written here. What the backward half of a step is given of its forward half, the forward loop keeps for all steps.
Declined where a step cannot be differentiated by itself: it holds another loop, or gives what is no new tensor.
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
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg
from torch.nn import Module

from fuse.devices import without_autocast
from fuse.errors import FuseError
from fuse.gradients import convolving, own_gradients
from fuse.gradients.contracting import contraction, terms_of
from fuse.gradients.replaying import replay
from fuse.graph.fakes import mode_of
from fuse.graph.halves import Given, root_of
from fuse.graph.joint import Joint, JointRecorder, formulas
from fuse.graph.loop import Loop, depending, of_all_steps
from fuse.graph.mutated_attributes import Plan
from fuse.graph.outputs import cone, outputs_of
from fuse.graph.recomputing import computed_again_in_step
from fuse.graph.signature import OutputSpec


class NotReversible(FuseError):
    """Why a loop has no reversed loop."""


@dataclass(frozen=True)
class Differentiable:
    """A loop that can run backwards.

    ``loop`` computes what the loop it was made from does and keeps what gradients need behind that; ``values`` are its
    results and ``own`` the number of those that the first one had. ``step``: one step and its gradients. ``saved``: for
    each value that a backward step is given of its forward step, the result of ``loop`` that has it for all steps, by
    ``(kind, index)`` of :class:`~fuse.graph.halves.Given`.
    """

    loop: Loop
    values: tuple[Tensor, ...]
    own: int
    step: Joint
    saved: dict[Given, int]

    @property
    def trained(self) -> frozenset[int]:
        """The results of the first loop that need gradients."""
        return self.step.trained


def differentiable(
    loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor], trained: set[int], returned: set[int]
) -> Differentiable:
    """``loop`` made ready to run backwards, where gradients of the operands at the positions ``trained`` are needed.

    The caller receives the results at the positions ``returned``, and may write to them: what gradients need of these
    is kept once more.

    Raises:
        NotReversible: a step cannot be differentiated; the message is the reason.
    """
    if loop.spec.backwards:
        raise NotReversible("the loop keeps its results backwards")
    mode = mode_of(operands[0])
    recorder = _BodyRecorder(loop, mode, returned)
    step = recorder.joint(tuple(_of_body(loop, mode, _training_states(loop, trained))), {})
    outputs = outputs_of(step.forward.graph)
    specs = step.forward.meta["signature"].outputs
    if step.backward is None or any(spec.kind != "graph" or spec.view is not None for spec in specs):
        raise NotReversible("a step has a result that is not a new tensor")
    kept = [_uncopied(outputs[spec.index], number in recorder.copied) for number, spec in enumerate(specs)]
    own = len(kept)
    saved: dict[Given, int] = {}
    given: list[Node] = step.forward.graph.find_nodes(op="placeholder")
    for what in step.given:
        if what.kind == "saved":
            index = next((n for n, spec in enumerate(specs) if spec.index == what.index), None)
            node = outputs[what.index] if index is None else kept[index]
        elif what.kind == "input" and what.index < loop.spec.carries:
            node = given[what.index]
        else:
            continue
        places = (i for i in range(loop.spec.carries, len(kept)) if kept[i] is node and i not in returned)
        place = next(places, len(kept))
        if place == len(kept):
            kept.append(node)
        saved[what] = place
    body = _with_outputs(step.forward.graph, kept)
    made = Loop(body, replace(loop.spec, collected=len(kept) - loop.spec.carries))
    values = (*results, *(of_all_steps(node.meta["val"], loop.spec.trip_count) for node in kept[own:]))
    made.strides = tuple(value.stride() for value in values)
    return Differentiable(made, values, own, step, saved)


class _BodyRecorder(JointRecorder):
    """Records one step of a loop, every result a tensor of its own; ``copied`` are the copies made for that.

    The caller receives what the loop collects at the positions ``returned``.
    """

    def __init__(self, loop: Loop, fake_mode: FakeTensorMode, returned: set[int]) -> None:
        super().__init__(loop, fake_mode, Plan())
        self.body, self.spec = loop.body, loop.spec
        every = range(loop.spec.carries, loop.spec.carries + loop.spec.collected)
        self.collected = frozenset(every) - returned
        self.at: Node | None = None
        self.copied: set[int] = set()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphModule:
        """As for a model; ``args`` are what the body is given."""
        nodes: list[Node] = self.body.graph.find_nodes(op="placeholder")
        for number, (node, value) in enumerate(zip(nodes, args, strict=True)):
            self._argument(node.name, number, value)
        with (
            self._recording("a step", contextlib.nullcontext()),
            torch.enable_grad(),
            without_autocast(),
        ):
            known = dict(zip(nodes, args, strict=True))

            def begin(node: Node) -> None:
                self.at = node

            def operate(node: Node) -> Any:
                inner, options = map_arg((node.args, node.kwargs), known.__getitem__)
                if node.op == "call_function":
                    return node.target(*inner, **options)  # type: ignore[operator]
                module = self.body.get_submodule(str(node.target))
                if own_gradients.gradient_of(module) is None:
                    raise NotReversible("a step holds another loop")
                results = own_gradients.run(module, inner, run_one)
                self.lies_at(node.meta["source"])
                return results

            def run_one(node: Node, args: Any, kwargs: Any) -> Any:
                begin(node)
                return node.target(*args, **kwargs)  # type: ignore[operator]

            replay(self.body.graph, known, begin, operate)
            outputs = outputs_of(self.body.graph)
            results = [self._own(number, known[node], outputs, node) for number, node in enumerate(outputs)]
        return self._finish(tuple(results))

    def _own(self, number: int, value: Tensor, outputs: Sequence[Node], node: Node) -> Tensor:
        if node.op != "placeholder" and not value._is_view() and outputs.index(node) == number:
            return value
        self.copied.add(number)
        return value.clone()

    def formulas(self) -> dict[Any, Callable[..., Any]]:
        return super().formulas() | formulas("select_backward slice_backward")

    def formula(self, op: OpOverload, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        if op is torch.ops.aten.convolution_backward.default:
            return convolving.formula(args)
        return super().formula(op, args)

    def computed_again(
        self, gradients: Mapping[int, Node], reads: Mapping[Node, Sequence[Node]], kept: Set[Node]
    ) -> dict[Node, None]:
        """Of a step: what is read of invariants and of inputs is there, and so is what the loop collects anyway."""
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

        return computed_again_in_step(reads, price, stacked, root_of)

    def _finish(self, result: Any) -> GraphModule:
        module = super()._finish(result)
        self.values = outputs_of(module.graph)
        self.specs: tuple[OutputSpec, ...] = module.meta["signature"].outputs
        return module

    def _line(self) -> str:
        if torch._C._current_autograd_node() is None and self.at is not None:
            line: str = self.at.meta.get("source", "")
            self.lies_at(line)
            return line
        return super()._line()


def _training_states(loop: Loop, trained: set[int]) -> set[int]:
    """``trained`` and the states that come to depend on it."""
    found = depending(loop, trained)
    nodes = loop.body.graph.find_nodes(op="placeholder")
    return {number for number, node in enumerate(nodes) if node in found and _is_real(node.meta["val"])}


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _of_body(loop: Loop, mode: FakeTensorMode, trained: set[int]) -> Iterator[Tensor]:
    """Tensors laid out as what the body is given."""
    for number, node in enumerate(loop.body.graph.find_nodes(op="placeholder")):
        held: Tensor = node.meta["val"]
        with mode:
            made = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=held.device)
        yield made.requires_grad_(number in trained)


def _uncopied(node: Node, copied: bool) -> Node:
    operand = node.args[0]
    return operand if copied and isinstance(operand, Node) else node


def _with_outputs(graph: Graph, outputs: Sequence[Node]) -> GraphModule:
    """A body that computes ``outputs``, with all placeholders of ``graph``."""
    wanted = cone(outputs)
    body, inner = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node.op == "placeholder" or node in wanted:
            inner[node] = body.node_copy(node, inner.__getitem__)
    return finished(body, [inner[node] for node in outputs])


def finished(body: Graph, results: Sequence[Node]) -> GraphModule:
    """``body`` as a module that returns ``results``."""
    output = body.output(tuple(results))
    output.meta.update(val=tuple(node.meta["val"] for node in results), source="")
    return _LazyGraphModule(Module(), body)
