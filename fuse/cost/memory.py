"""Peak live memory, by the live ranges of storages.

    a = relu(x)      x  a           inputs and parameters live throughout; everything else from the operator that
    b = a[:, :4]     x  a           makes it to the last that reads it or a view of it; a view adds nothing
    c = tanh(b)      x  a  c   <-   the peak
    d = c + 1        x     c  d

Known allocations inside an operator count (:mod:`fuse.cost.inside`); the allocator's rounding does not. For a
program on the CPU, the memory plan gives the peak instead (:mod:`fuse.runtime.programs.footprint`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from fuse import ops
from fuse.cost.inside import inside_bytes
from fuse.cost.work import bytes_of, tensors_in
from fuse.graph.signature import Dispatch

Storage = tuple[Node, int]
"""A storage in a graph: the node that makes it, and which of its results it is."""


def storage_bytes(tensor: Tensor) -> int:
    """Bytes from the first to the last element of a tensor's layout.

    >>> storage_bytes(torch.ones(4, 8).t()), storage_bytes(torch.ones(8).expand(4, 8))
    (128, 32)
    """
    if tensor.numel() == 0:
        return 0
    span = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + span) * tensor.element_size()


def peak_of_dispatches(dispatches: Sequence[Dispatch]) -> int:
    """Peak live bytes of an eager record.

    Tensors that no operator made are inputs, and live throughout. An unread first result of an operator counts as an
    output of the model and lives to the end; further unread results (indices, saved statistics) are freed at once, as
    in eager.

    >>> x = torch.ones(256)
    >>> y = x.relu()
    >>> peak_of_dispatches([Dispatch(torch.ops.aten.relu.default, (x,), {}, y, "")])
    2048
    """
    sizes: dict[int, int] = {}
    born: dict[int, int] = {}
    last_read: dict[int, int] = {}
    end = len(dispatches)
    lives: list[tuple[int, int, int]] = []
    for step, dispatch in enumerate(dispatches):
        lives.append((inside_bytes(dispatch.op, dispatch.args, dispatch.result), step, step))
        for tensor in tensors_in((dispatch.args, dispatch.kwargs)):
            storage = _storage(tensor)
            if storage not in born:
                born[storage] = -1
                sizes[storage] = _allocated(tensor)
            last_read[storage] = step
        for position, tensor in enumerate(tensors_in(dispatch.result)):
            storage = _storage(tensor)
            if storage not in born:
                born[storage] = step
                sizes[storage] = _allocated(tensor)
                if position > 0:
                    last_read[storage] = step
    lives += [
        (sizes[storage], start, end if start < 0 else last_read.get(storage, end)) for storage, start in born.items()
    ]
    return most_at_once(lives, end)


def peak_of_graph(graph: GraphModule) -> int:
    """Peak live bytes of a captured graph; the memory inside a nested loop is added at its call.

    Placeholders live throughout, outputs to the end. A region's inner values stay on chip and take no memory. The
    pieces of an ``assemble`` lie in the assembled buffer, which lives from its first piece on.

    >>> from fuse.graph.capture import capture
    >>> peak_of_graph(capture(torch.nn.Tanh(), (torch.ones(256),)))
    2048
    """
    nodes = list(graph.graph.nodes)
    storages = _storages(nodes)
    sizes: dict[Storage, int] = {}
    born: dict[Storage, int] = {}
    last_read: dict[Storage, int] = {}
    extra: dict[int, int] = {}
    end = len(nodes)
    for step, node in enumerate(nodes):
        for argument in node.all_input_nodes:
            for storage in storages[argument]:
                last_read[storage] = end if node.op == "output" else step
        if node.op == "output":
            continue
        if node.op == "call_module":
            extra[step] = _held_inside(node, graph.get_submodule(str(node.target)))
        elif node.op == "call_function":
            args = map_arg(node.args, lambda argument: argument.meta.get("val"))
            extra[step] = inside_bytes(node.target, args, node.meta.get("val"))
        for storage in storages[node]:
            born.setdefault(storage, -1 if node.op in ("placeholder", "get_attr") else step)
            last_read.setdefault(storage, step)
        sizes.update(((node, i), storage_bytes(tensor)) for i, tensor in enumerate(tensors_in(node.meta.get("val"))))
    lives = [
        (sizes.get(storage, 0), start, end if start < 0 else last_read[storage]) for storage, start in born.items()
    ]
    lives += [(size, step, step) for step, size in extra.items()]
    return most_at_once(lives, end)


@dataclass(frozen=True)
class StepMemory:
    """Peak bytes of a training step, in eager and in the rewritten graphs, and the bytes ``saved`` in between."""

    before: int
    after: int
    saved: int


def step_memory(
    dispatches: Sequence[Dispatch], forward: GraphModule, backward: GraphModule, saved: Iterable[Node]
) -> StepMemory:
    """The memory of a training step: of eager's ``dispatches``, forward and backward, and of the two graphs.

    All inputs of the backward graph live until its end; ``saved`` are the nodes of the forward graph among them.
    """
    after = max(peak_of_graph(forward), peak_of_graph(backward))
    kept = sum(storage_bytes(node.meta["val"]) for node in saved)
    return StepMemory(peak_of_dispatches(dispatches), after, kept)


def _storage(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    address: int = tensor.untyped_storage()._cdata
    return address


def _allocated(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else bytes_of(tensor)


def _storages(nodes: Sequence[Node]) -> dict[Node, list[Storage]]:
    """The storages of each node's value: its own, or its base's if it is a view or one of another node's results."""
    storages: dict[Node, list[Storage]] = {}
    for node in nodes:
        inputs = node.all_input_nodes
        if node.target is operator.getitem and inputs:
            of_producer, part = storages[inputs[0]], node.args[1]
            own = of_producer[part : part + 1] if isinstance(part, int) and part >= 0 else []
            storages[node] = own or of_producer[:1]
        elif ops.is_view(node.target) and inputs:
            storages[node] = storages[inputs[0]][:1]
        else:
            results = max(1, sum(1 for _ in tensors_in(node.meta.get("val"))))
            storages[node] = [(node, i) for i in range(results)]
    inside = _buffers_of_pieces(nodes, storages)
    return {node: [inside.get(storage, storage) for storage in lies_in] for node, lies_in in storages.items()}


def _buffers_of_pieces(nodes: Sequence[Node], storages: Mapping[Node, Sequence[Storage]]) -> dict[Storage, Storage]:
    """For each piece of an ``assemble``, the buffer it is written into: the outermost one if buffers are nested."""
    inside: dict[Storage, Storage] = {}
    for node in reversed(nodes):
        if node.target is torch.ops.fuse.assemble.default:
            for piece in node.all_input_nodes:
                inside.update(dict.fromkeys(storages[piece], inside.get((node, 0), (node, 0))))
    return inside


def _held_inside(node: Node, module: torch.nn.Module) -> int:
    """Memory of one step of a loop, besides the arguments of the loop."""
    body = getattr(module, "body", None)
    if not isinstance(body, GraphModule):
        return 0
    arguments = sum(
        storage_bytes(tensor)
        for placeholder in body.graph.nodes
        if placeholder.op == "placeholder"
        for tensor in tensors_in(placeholder.meta.get("val"))
    )
    return max(0, peak_of_graph(body) - arguments)


def most_at_once(lives: Sequence[tuple[int, int, int]], end: int) -> int:
    """The highest sum of sizes over all steps, from (size, first step, last step), both steps included.

    >>> most_at_once([(8, 0, 1), (4, 1, 2), (2, 2, 2)], end=2)
    12
    """
    change = [0] * (end + 3)
    for size, first, last in lives:
        change[first + 1] += size
        change[last + 2] -= size
    peak = live = 0
    for difference in change:
        live += difference
        peak = max(peak, live)
    return peak
