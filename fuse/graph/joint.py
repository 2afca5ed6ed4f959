"""Capture a call together with its gradients: one functional graph forward, one backward.

    y = tanh(x @ w)            forward     y = tanh(mm(x, w))                                      saved: y
                      ->       backward    d = tanh_backward(g, y);  mm(d, t(w)), mm(t(x), d)      given: y, x, w, g

The model runs on fake tensors that require gradients where the real ones do, under the mode that records. Then
PyTorch's own autograd runs backward over what it recorded, under the same mode: blocks without gradients, ``detach``,
writes through views, gradients of the user's own and the order of sums are what eager has. Recording costs as much for
an operator backward as for one forward. The record is then cut in two. What the backward half reads of the forward
half is *saved*, views of it are taken again.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false, make_contiguous_strides_for
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn.modules import module as _module
from torch.utils import _pytree as pytree

from fuse import ops
from fuse.errors import CaptureError
from fuse.graph import scattering
from fuse.graph.aliases import View
from fuse.graph.capture import Recorder, prepared
from fuse.graph.kept import Plan, settled
from fuse.graph.placeholders import add_placeholder
from fuse.graph.results import flatten_result
from fuse.graph.signature import Attribute, Dispatch, InputSpec, OutputSpec, Signature
from fuse.graph.sources import user_line

aten = torch.ops.aten


@dataclass(frozen=True)
class Given:
    """What a placeholder of a backward graph stands for.

    ``saved``: the value at position ``index`` of the forward graph's output; ``input``: forward placeholder ``index``;
    ``tangent``: the gradient of leaf ``index`` of the model's result.
    """

    kind: Literal["saved", "input", "tangent"]
    index: int


@dataclass(frozen=True)
class Joint:
    """A call and its gradients.

    ``forward``: as :func:`fuse.graph.capture.capture` gives it, but that its output ends with what is saved.
    ``backward``: None where no result needs gradients. ``given``: its placeholders in order. ``gradients``: for each
    forward placeholder the position in ``backward``'s output, or None. ``trained``: the leaves of the result that need
    gradients. ``detached``: those that are a view of an input that needs gradients, and need none.
    ``rolled``: gradients were taken loop by loop, and not as eager takes them.
    """

    forward: GraphModule
    backward: GraphModule | None = None
    given: tuple[Given, ...] = ()
    gradients: tuple[int | None, ...] = ()
    trained: frozenset[int] = frozenset()
    detached: frozenset[int] = frozenset()
    rolled: bool = False


@dataclass(frozen=True)
class Recorded:
    """A call recorded with gradients on, before they are taken.

    Nodes that stand for tensors of the call say in ``meta["needs_gradient"]`` whether these needed gradients at last.
    ``views``: of each leaf of the result, the views that lead to it from the value that the graph gives. ``trained``
    and ``detached`` are as in :class:`Joint`.
    """

    forward: GraphModule
    views: tuple[tuple[View, ...], ...]
    trained: frozenset[int]
    detached: frozenset[int]


Differentiate = Callable[[Recorded], Joint | None]
"""Takes the gradients of a call another way; None where it cannot."""


def capture_joint(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    kept: Sequence[Attribute] = (),
    differentiate: Differentiate | None = None,
) -> Joint:
    """The functional graphs of ``model(*args, **kwargs)`` and of its gradients.

    ``differentiate`` is asked first for the gradients of calls in which operators alone decide what is trained.

    Raises:
        CaptureError: as :func:`fuse.graph.capture.capture`, and where gradients have an effect that a graph cannot hold
            (hooks, gradients left in ``.grad``, states that carry gradients from one call to the next).

    >>> joint = capture_joint(nn.Linear(3, 2), (torch.zeros(4, 3),))
    >>> [node.name for node in joint.backward.graph.nodes]
    ['input_1', 'tangent_0', 't_1', 'mm', 't_2', 'sum_1', 'view', 't_3', 'output']
    >>> joint.given, joint.gradients
    ((Given(kind='input', index=0), Given(kind='tangent', index=0)), (None, 0, 1))
    """
    _refuse_hooks(model)

    def record(plan: Plan) -> Joint:
        with prepared(model, args, kwargs or {}) as fake_mode:
            return JointRecorder(model, fake_mode, plan).joint(args, dict(kwargs or {}), differentiate)

    return settled(record, kept)


class JointRecorder(Recorder):
    """Records a call with gradients on, then the gradients."""

    gradients = True

    def __init__(self, model: nn.Module, fake_mode: Any, plan: Plan) -> None:
        super().__init__(model, fake_mode, plan)
        self.leaves: list[Any] = []
        self.lines: dict[int, str] = {}  # number of an autograd node -> the user's line
        self.detached: dict[int, Tensor] = {}
        self.cut_off = False  # whether gradients were kept from some operand

    def joint(self, args: tuple[Any, ...], kwargs: dict[str, Any], differentiate: Differentiate | None = None) -> Joint:
        forward = self.run(args, kwargs)
        self._refuse_effects(forward)
        outputs: tuple[OutputSpec, ...] = forward.meta["signature"].outputs
        trained = [i for i, spec in enumerate(outputs) if spec.kind == "graph" and self._needs_gradient(i)]
        detached = frozenset(i for i, spec in enumerate(outputs) if spec.kind == "input" and self._detached(spec, i))
        inputs = [i for i, fake in enumerate(self.placeholders) if fake.requires_grad]
        if not trained or not inputs:
            return Joint(forward, detached=detached)
        if differentiate is not None and not (self.cut_off or self._has_own_gradients() or self._is_cut_unseen()):
            for alias in self.functional.aliases.values():
                # Autograd detaches what it saves; a tensor that was written may hold another value by now.
                if id(alias.tensor) in self.detached or alias.made in self.functional.written:
                    continue
                needs = alias.made.meta.get("needs_gradient", False)
                alias.made.meta["needs_gradient"] = needs or alias.tensor.requires_grad
            recorded = Recorded(forward, tuple(map(self._views, self.leaves)), frozenset(trained), detached)
            if found_joint := differentiate(recorded):
                return found_joint
        count = len(self.dispatches)
        output = forward.graph.output_node()
        tangents = {i: self._tangent(i) for i in trained}
        with self._recording("backward", contextlib.nullcontext()), torch.autocast("cpu", enabled=False):
            found = torch.autograd.grad(
                [self.leaves[i] for i in trained],
                [self.placeholders[i] for i in inputs],
                [tangents[i].meta["val"] for i in trained],
                allow_unused=True,
            )
        self._refuse_accumulated()
        signature = replace(forward.meta["signature"], inputs=tuple(self.inputs))
        forward.meta["signature"] = signature
        values = {
            i: self.functional.value(self._ensure_known(g)) for i, g in zip(inputs, found, strict=True) if g is not None
        }
        backward, given = _cut(
            forward, output, tangents, list(values.values()), tuple(self.dispatches[count:]), self.modules
        )
        position = {i: number for number, i in enumerate(values)}
        gradients = tuple(position.get(i) for i in range(len(self.inputs)))
        return Joint(forward, backward, given, gradients, frozenset(trained), detached)

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        forward = torch._C._current_autograd_node() is None
        if forward and not self.cut_off:
            self.cut_off = self._cuts_off(op, args)
        formula = None if forward else self.formulas().get(op) or scattering.formula(op, args)
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

    def formulas(self) -> dict[Any, Callable[..., Any]]:
        """Operators of the backward pass that are recorded as what they are made of."""
        return formulas(_MADE_OF_OTHERS)

    def _finish(self, result: Any) -> GraphModule:
        self.leaves = flatten_result(result)[0]
        return super()._finish(result)

    def _line(self) -> str:
        node = torch._C._current_autograd_node()
        if node is not None:
            return self.lines.get(node._sequence_nr(), "")
        line = user_line()
        self.lines.setdefault(torch.autograd._get_sequence_nr() - 1, line)  # type: ignore[attr-defined]
        return line

    def _cuts_off(self, op: OpOverload, args: tuple[Any, ...]) -> bool:
        """Whether an operator of these operands leaves gradients behind. (Autograd itself detaches what it saves.)"""
        if op is aten.detach_.default:
            return True
        if not torch.is_grad_enabled():
            return any_needs_gradient(args)
        return any(id(operand) in self.detached for operand in pytree.tree_leaves(args))

    def _views(self, leaf: Any) -> tuple[View, ...]:
        return self.functional.aliases[id(leaf)].chain if isinstance(leaf, Tensor) else ()

    def _has_own_gradients(self) -> bool:
        """Whether what leads to the result holds gradients of the user's own (``torch.autograd.Function``)."""
        seen: set[Any] = set()
        worklist = [leaf.grad_fn for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        while worklist:
            node = worklist.pop()
            if node not in seen:
                seen.add(node)
                if isinstance(node, torch.autograd.function.BackwardCFunction):
                    return True
                worklist.extend(following for following, _ in node.next_functions if following is not None)
        return False

    def _is_cut_unseen(self) -> bool:
        """Whether some tensor needs no gradients though what it was computed from does: no mode sees ``detach_``."""
        needing: set[Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                needs = node.meta["val"].requires_grad
            else:
                needs = _passes_gradients_on(node) and not needing.isdisjoint(node.all_input_nodes)
            if needs:
                needing.add(node)
        for alias in self.functional.aliases.values():
            if alias.tensor.requires_grad or id(alias.tensor) in self.detached:
                continue
            if alias.node in needing and alias.version == alias.base.version:
                return True
        return False

    def _needs_gradient(self, position: int) -> bool:
        leaf: Tensor = self.leaves[position]
        if leaf.requires_grad and leaf.is_leaf:
            raise CaptureError("the result is a new tensor that collects gradients")
        if leaf.requires_grad and leaf.is_complex():
            raise CaptureError("gradients of complex results are not supported")
        return leaf.requires_grad

    def _detached(self, spec: OutputSpec, position: int) -> bool:
        """Whether a view of an input leaves its gradient behind."""
        leaf, root = self.leaves[position], self.placeholders[spec.index]
        if leaf is root or leaf.requires_grad == root.requires_grad:
            return False
        if leaf.requires_grad:
            raise CaptureError("the result is a view of an input, and only the view needs gradients")
        return True

    def _tangent(self, position: int) -> Node:
        leaf: Tensor = self.leaves[position]
        dense = bool(is_non_overlapping_and_dense_or_false(leaf))
        stride = leaf.stride() if dense else make_contiguous_strides_for(leaf.shape)
        with self.fake_mode:
            tangent = torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device)
        node = add_placeholder(self.graph, f"tangent_{position}")
        node.meta.update(val=tangent, source="")
        self.functional.add_input(tangent, node, None)
        return node

    def _refuse_effects(self, forward: GraphModule) -> None:
        """Refuse what the call did to autograd's state that the graph of it would not do again."""
        for mutation in forward.meta["signature"].mutations:
            if self.placeholders[mutation.input_index].requires_grad:
                name = self.inputs[mutation.input_index].name
                raise CaptureError(f"forward writes {name}, which needs gradients")
        if any(alias.tensor._backward_hooks or alias.tensor.retains_grad for alias in self.functional.aliases.values()):
            raise CaptureError("forward registers a hook on a tensor; a graph cannot hold that")
        needing: dict[int, bool] = {}
        for fake in self.placeholders:
            storage = fake.untyped_storage()._cdata
            if storage in needing and (fake.requires_grad or needing[storage]):
                raise CaptureError("two inputs share memory, and one needs gradients")
            needing[storage] = fake.requires_grad
        self._refuse_accumulated()

    def _refuse_accumulated(self) -> None:
        for real, fake in self.adopted.values():
            if real is fake or not fake.is_leaf or fake.grad is None:
                continue
            if real.grad is None or fake.grad._version:
                raise CaptureError("forward leaves a gradient in .grad; a graph cannot hold that")


@functools.cache
def formulas(names: str) -> dict[Any, Callable[..., Any]]:
    """Torch's own formulas of operators, by their names."""
    return get_decompositions([getattr(aten, name) for name in names.split()])


_MADE_OF_OTHERS = """
    _log_softmax_backward_data _softmax_backward_data elu_backward gelu_backward hardsigmoid_backward hardswish_backward
    hardtanh_backward leaky_relu_backward log_sigmoid_backward mish_backward mse_loss_backward native_dropout_backward
    native_layer_norm_backward silu_backward smooth_l1_loss_backward softplus_backward
"""


def _passes_gradients_on(node: Node) -> bool:
    """Whether a result of ``node`` needs gradients where an operand does."""
    if node.op != "call_function" or not isinstance(held := node.meta.get("val"), (Tensor, tuple, list)):
        return False
    if isinstance(held, Tensor) and not (held.is_floating_point() or held.is_complex()):
        return False
    if node.target is operator.getitem:  # what an operator gives beside its result is kept for its gradient
        return bool(node.args[1] == 0)
    if not isinstance(node.target, OpOverload) or ops.is_random(node.target):
        return False
    name = node.target._schema.name.split("::")[1]
    return name != "detach" and not name.startswith("new_") and not name.endswith("_like")


def any_needs_gradient(arguments: Any) -> bool:
    """Whether a tensor among ``arguments`` needs gradients."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(arguments))


def _refuse_hooks(model: nn.Module) -> None:
    if _module._global_backward_hooks or _module._global_backward_pre_hooks:
        raise CaptureError("a backward hook is registered for all modules")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"module {name or type(module).__name__} has a backward hook")


def _cut(
    forward: GraphModule,
    output: Node,
    tangents: Mapping[int, Node],
    gradients: Sequence[Node],
    dispatches: Any,
    modules: nn.Module,
) -> tuple[GraphModule, tuple[Given, ...]]:
    """Take everything behind ``output`` out into a graph of its own; what that reads is added to ``output``."""
    later = _after(output)
    needed = _needed(gradients, set(later))
    if random := next((n for n in needed if isinstance(n.target, OpOverload) and ops.is_random(n.target)), None):
        raise CaptureError(f"{random.target} draws random numbers in the backward pass")
    inputs = {node: i for i, node in enumerate(forward.graph.find_nodes(op="placeholder")) if node not in set(later)}
    half = _Half(Graph(), inputs, list(output.args[0]))  # type: ignore[arg-type]
    forward.meta["saved_from"] = len(half.outputs)
    for node in needed:
        half.note(node, needed)
    for gradient in gradients:
        if gradient not in needed:
            half.place(root_of(gradient))
    for position, tangent in tangents.items():
        half.placeholder(tangent, Given("tangent", position))
    for node in needed:
        if node.op != "placeholder":
            half.copy(node)
    results = tuple(half.value(gradient) for gradient in gradients)
    end = half.graph.output(results)
    end.meta.update(val=tuple(r.meta["val"] for r in results), source="")
    output.args = (tuple(half.outputs),)
    output.meta["val"] = tuple(v.meta["val"] for v in half.outputs)
    for node in reversed(later):
        forward.graph.erase_node(node)
    module = _LazyGraphModule(modules, half.graph)
    names = [node.name for node in half.graph.find_nodes(op="placeholder")]
    module.meta["signature"] = Signature(
        tuple(InputSpec("argument", name, i) for i, name in enumerate(names)),
        tuple(OutputSpec("graph", i) for i in range(len(results))),
        pytree.tree_structure(results),
        (),
        dispatches,
    )
    module.meta["tangents"] = len(tangents)
    return module, tuple(half.given)


class _Half:
    """The backward graph while it is made: what the nodes of the record are in it."""

    def __init__(self, graph: Graph, inputs: Mapping[Node, int], outputs: list[Node]) -> None:
        self.graph = graph
        self.inputs = inputs
        self.outputs = outputs
        self.returned = {node: i for i, node in reversed(list(enumerate(outputs)))}
        self.given: list[Given] = []
        self.made: dict[Node, Node] = {}

    def note(self, node: Node, needed: Mapping[Node, None]) -> None:
        """Make placeholders for what ``node`` reads of the forward half."""
        for operand in node.all_input_nodes:
            if operand not in needed:
                self.place(root_of(operand))

    def place(self, root: Node) -> None:
        if root in self.made:
            return
        if root in self.inputs:
            self.placeholder(root, Given("input", self.inputs[root]))
        elif root in self.returned:
            self.placeholder(root, Given("saved", self.returned[root]))
        else:
            self.placeholder(root, Given("saved", len(self.outputs)))
            self.outputs.append(root)

    def placeholder(self, node: Node, given: Given) -> None:
        made = self.made[node] = add_placeholder(self.graph, node.name)
        made.meta.update(val=node.meta["val"], source="")
        self.given.append(given)

    def copy(self, node: Node) -> None:
        for operand in node.all_input_nodes:
            self.value(operand)
        self.made[node] = self.graph.node_copy(node, self.made.__getitem__)

    def value(self, node: Node) -> Node:
        """What ``node`` is here; views of what is saved are taken again."""
        chain = []
        current = node
        while current not in self.made:
            chain.append(current)
            current = _base(current)  # type: ignore[assignment]
        for view in reversed(chain):
            self.made[view] = self.graph.node_copy(view, self.made.__getitem__)
        return self.made[node]


def _after(node: Node) -> list[Node]:
    found = []
    while (node := node.next).op != "root":
        found.append(node)
    return found


def _needed(nodes: Iterable[Node], among: set[Node]) -> dict[Node, None]:
    """``nodes`` and what they need, as far as it is in ``among``; in program order."""
    found: set[Node] = set()
    worklist = [node for node in nodes if node in among]
    while worklist:
        node = worklist.pop()
        if node not in found:
            found.add(node)
            worklist.extend(operand for operand in node.all_input_nodes if operand in among)
    return dict.fromkeys(sorted(found))


def root_of(node: Node) -> Node:
    """The node whose memory ``node`` lies in."""
    while (base := _base(node)) is not None:
        node = base
    return node


def _base(node: Node) -> Node | None:
    if node.op == "call_function" and isinstance(node.target, OpOverload) and ops.is_view(node.target):
        base: Node = node.args[0]  # type: ignore[assignment]
        return base
    return None
