"""Replace a library's LSTM layer by a loop kernel, or by the operators of a step.

    y, h, c, _ = mkldnn_rnn_layer(x, w, u, b, d, h0, c0)   ->   h, c, y = loop(h0, c0, x, b, w.T, d, u.T)

    for t: y, h, c, _ = mkldnn_rnn_layer(y', w, ..., h, c)   ->   for t: i, f, g, o = y' @ w.T + h @ u.T ...

Eager runs ``nn.LSTM`` in float32 as one oneDNN call for each layer and direction. The loop does the same arithmetic
(``step_of`` has the formulas of ``torch.nn.LSTM``), packs its weights once for all steps and allocates nothing. As in a
user's loop, the input's product runs in the step where that is faster, and before the loop otherwise (see
``roll_whole_loops``). A layer that runs backwards in time reads its steps in that order, and ``flip`` reverses its
stacked outputs; ``cat`` with the other direction does both in one kernel. In training this pass runs before gradients
are taken, so that the backward pass is a loop, too.

A layer that the user's loop calls with one step at a time (a decoder) is a cell of this loop. It becomes operators, as
``nn.GRU`` and ``nn.LSTMCell`` are in eager mode, and the user's loop is rolled like any other.

Declined where a gradient reads the library's workspace, and where no loop kernel can be generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fuse.graph.fakes.fake_operators import mode_of
from fuse.graph.loop import Loop, LoopSpec, StepInput
from fuse.graph.outputs import outputs_of
from fuse.graph.patches.recurrent import LSTM_MODE
from fuse.kernel.kernel import Declined
from fuse.kernel.loops.lower_loops import lower_loop
from fuse.loops.building import call_loop
from fuse.loops.rolling import LEAST_STEPS
from fuse.passes.roll_whole_loops import better_outside
from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten
GATES = 4


@dataclass(frozen=True)
class Layer:
    """One call of the library. ``sequence``: time, batch, features; the gates come in the order i, f, g, o."""

    call: Node
    sequence: Node
    weights: tuple[Node, Node]
    biases: tuple[Node, Node] | None
    states: tuple[Node, Node]
    backwards: bool
    is_cell: bool
    """Whether it is a step of the user's loop."""

    @property
    def inside(self) -> bool:
        """Whether the product of the input is done in the step."""
        rows = self.sequence.meta["val"].shape[1]
        weights = sum(weight.meta["val"].nbytes for weight in self.weights)
        return self.is_cell or better_outside(rows, weights) is None

    @property
    def fixed(self) -> list[Node]:
        """Biases and weights that the loop reads, in the order of its operands."""
        pairs = list(zip(self.biases or (None, None), self.weights, strict=True))
        return [node for pair in pairs[0 if self.inside else 1 :] for node in pair if node is not None]


@register_pass(stage="clean", after="draw_ahead")
def expand_lstm_layers(graph: GraphModule) -> Iterator[Verdict]:
    """Replace a library's LSTM layer by a loop kernel."""
    calls = graph.graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default)
    steps = Counter(call.args[1:3] for call in calls if _has_one_step(call))
    for call in calls:
        layer = layer_of(call, is_cell=_has_one_step(call) and steps[call.args[1:3]] >= LEAST_STEPS)
        if isinstance(layer, str):
            yield declined(call, layer)
            continue
        if layer.is_cell:
            yield rewrite(call, open_step, layer)
            continue
        loop, operands, results = loop_of(layer)
        kernel = lower_loop(loop, operands, results)
        if isinstance(kernel, Declined):
            yield declined(call, kernel.reason)
        else:
            yield rewrite(call, expand, graph, layer, loop)


def _has_one_step(call: Node) -> bool:
    steps: int = call.args[0].meta["val"].shape[0]  # type: ignore[union-attr]  # FX types arguments loosely
    return steps == 1


def layer_of(call: Node, is_cell: bool) -> Layer | str:
    """The layer that ``call`` runs, or why it stays with the library."""
    sequence, w, u, b, d, h, c, reverse, sizes, mode, _, _, biased, *_ = call.args
    if mode != LSTM_MODE or sizes:
        return "it is not an LSTM over sequences of one length"
    if any(node.meta["val"].dtype is not torch.float32 for node in call.all_input_nodes):
        return "it is not in float32"
    if any(part.args[1] not in (0, 1, 2) for part in call.users):
        return "the library's workspace is read"
    biases = (b, d) if biased else None
    return Layer(call, sequence, (w, u), biases, (h, c), bool(reverse), is_cell)  # type: ignore[arg-type]  # FX types arguments loosely


def loop_of(layer: Layer) -> tuple[Loop, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The loop, and the metadata of its operands and results."""
    sequence: Tensor = layer.sequence.meta["val"]
    steps, rows, _ = sequence.shape
    with mode_of(sequence), torch.no_grad():
        read = sequence if layer.inside else sequence.new_empty(steps, rows, len(_value(layer.weights[0])))
        fixed = [value.t() if value.dim() == 2 else value for value in map(_value, layer.fixed)]
        operands = (*map(_value, layer.states), read, *fixed)
        body = traced(layer, (*operands[:2], read.select(0, 0), *fixed))
    source = layer.call.meta.get("source", "")
    for node in body.graph.nodes:
        node.meta["source"] = source
    output = body.graph.output_node()
    output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]  # FX types arguments loosely
    output.meta["val"] = tuple(map(_value, output.args[0]))  # type: ignore[arg-type]  # FX types arguments loosely
    order = StepInput(0, steps - 1, -1) if layer.backwards else StepInput(0, 0, 1)
    loop = Loop(body, LoopSpec(steps, 2, (order,), 1, source, one_call=True))
    y, h, c, _ = layer.call.meta["val"]
    loop.strides = (h.stride(), c.stride(), y.stride())
    return loop, operands, (h, c, y)


def traced(layer: Layer, values: Iterable[Tensor]) -> GraphModule:
    """The graph of one step that is given tensors like ``values``."""
    own = [torch.empty_strided(v.shape, v.stride()) for v in values]  # one given twice would be one placeholder
    return make_fx(step_of(layer))(*own)


def step_of(layer: Layer) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """One step: ``(h, c, x, *fixed) -> (next h, next c, output)``; x is projected already if not ``inside``."""

    def product(x: Tensor, fixed: Iterator[Tensor]) -> Tensor:
        return torch.addmm(next(fixed), x, next(fixed)) if layer.biases else torch.mm(x, next(fixed))

    def step(h: Tensor, c: Tensor, x: Tensor, *fixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rest = iter(fixed)
        gates = (product(x, rest) if layer.inside else x) + product(h, rest)
        width = h.shape[1]
        write, forget, candidate, output = (gates.narrow(1, k * width, width) for k in range(GATES))
        c = torch.sigmoid(forget) * c + torch.sigmoid(write) * torch.tanh(candidate)
        h = torch.sigmoid(output) * torch.tanh(c)
        return h, c, h

    return step


def expand(graph: GraphModule, layer: Layer, loop: Loop) -> None:
    """Put the loop in the place of the library's call."""
    call = layer.call
    read = layer.sequence if layer.inside else projected(layer)
    fixed = [turned(call, node) if _value(node).dim() == 2 else node for node in layer.fixed]
    y, h, c, _ = call.meta["val"]
    last, state, kept = call_loop(graph, loop, (*layer.states, read, *fixed), (h, c, y), call)
    if layer.backwards:
        kept = surgery.insert(kept.next, aten.flip.default, kept, [0], like=call)
    _replace_parts(call, (kept, last, state))


def open_step(layer: Layer) -> None:
    """Put the operators of the only step in the place of the library's call."""
    call = layer.call
    fixed = [turned(call, node) if _value(node).dim() == 2 else node for node in layer.fixed]
    given = (*layer.states, surgery.insert(call, aten.select.int, layer.sequence, 0, 0), *fixed)
    with mode_of(_value(layer.sequence)), torch.no_grad():
        body = traced(layer, map(_value, given)).graph
    inner = dict(zip(body.find_nodes(op="placeholder"), given, strict=True))
    for node in body.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), inner.__getitem__)
            inner[node] = surgery.insert(call, node.target, *args, **kwargs)
    h, c, _ = map(inner.__getitem__, outputs_of(body))
    _replace_parts(call, (surgery.insert(call, aten.unsqueeze.default, h, 0), h, c))


def _replace_parts(call: Node, parts: tuple[Node, Node, Node]) -> None:
    """Let readers of the output and the last states read ``parts``."""
    for part in list(call.users):
        surgery.replace(part, parts[part.args[1]])  # type: ignore[index]  # FX types arguments loosely


def projected(layer: Layer) -> Node:
    """The product of the whole sequence, all steps as rows of one matrix."""
    call, sequence = layer.call, layer.sequence
    steps, rows, width = _value(sequence).shape
    matrix = surgery.insert(call, aten.view.default, sequence, [steps * rows, width])
    weight = turned(call, layer.weights[0])
    if layer.biases:
        product = surgery.insert(call, aten.addmm.default, layer.biases[0], matrix, weight)
    else:
        product = surgery.insert(call, aten.mm.default, matrix, weight)
    return surgery.insert(call, aten.view.default, product, [steps, rows, -1])


def turned(before: Node, weight: Node) -> Node:
    return surgery.insert(before, aten.t.default, weight)


def _value(node: Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value
