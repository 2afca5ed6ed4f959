"""A node as a row of plain values, for ``fuse.rewrite.deltas``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.nn import Module

from fuse.cost.count import CountedCall, calls_of_node
from fuse.graph.describing import describe
from fuse.graph.loop import Loop
from fuse.graph.loop_with_ends import LoopWithEnds, graph_in
from fuse.graph.strides import contiguous_strides
from fuse.rewrite import effects, nested
from fuse.rewrite.deltas import Called, Row


def row_of(node: Node, ids: dict[Node, int], number_of: Callable[[GraphModule], int]) -> Row:
    """The row of ``node``; ``number_of`` returns the number of a graph that it calls."""
    uses: list[Node] = []
    parts = [_spelled(value, uses) for value in node.args]
    parts += [f"{name}={_spelled(value, uses)}" for name, value in node.kwargs.items()]
    module = nested.called_module(node)
    costs = _costs(node, module)
    return Row(
        name=node.name,
        op=node.op,
        target=_name_of(node.target),
        args=", ".join(parts),
        uses=tuple(ids[used] for used in uses),
        value=_laid_out(node.meta.get("val")),
        source=node.meta.get("source", ""),
        kind=costs[0].kind if costs else "",
        launches=sum(call.launches * call.repeats for call in costs),
        flops=sum(call.work.flops * call.repeats for call in costs),
        bytes=sum(call.work.bytes * call.repeats for call in costs),
        effects=node.op not in ("placeholder", "output") and not effects.is_pure(node),
        called=None if module is None else _called(module, number_of),
    )


def _called(module: Module, number_of: Callable[[GraphModule], int]) -> Called:
    inside = graph_in(module)
    number = -1 if inside is None else number_of(inside)
    if isinstance(module, Loop):
        spec = module.spec
        reads = tuple((read.dim, read.start, read.step) for read in spec.step_inputs)
        return Called(
            "loop", number, spec.trip_count, spec.carries, reads, spec.collected, spec.persistent, spec.backwards
        )
    if isinstance(module, LoopWithEnds):
        return Called("ends", number, persistent=True)
    return Called(getattr(module, "meta", {}).get("kind") or "module", number)


def _costs(node: Node, module: Module | None) -> list[CountedCall]:
    """The counted calls of a node itself; not those of a loop body that is launched in every step, which has its own
    rows."""
    owner = node.graph.owning_module
    if owner is None or node.op not in ("call_function", "call_module", "call_method") or "val" not in node.meta:
        return []
    calls = calls_of_node(owner, node)
    if isinstance(module, Loop) and not module.persistent:
        return list(calls)[len(_body_calls(module)) :]
    return list(calls)


def _body_calls(loop: Loop) -> list[CountedCall]:
    return [call for node in loop.body.graph.nodes for call in calls_of_node(loop.body, node)]


def _spelled(value: Any, uses: list[Node]) -> str:
    """An argument as text; each node in it becomes ``%``, and is added to ``uses``."""
    if isinstance(value, Node):
        uses.append(value)
        return "%"
    if isinstance(value, (list, tuple)):
        inside = ", ".join([_spelled(item, uses) for item in value])
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_spelled(item, uses)}" for name, item in value.items()) + "}"
    if isinstance(value, slice):
        return ":".join(_spelled(part, uses) for part in (value.start, value.stop, value.step))
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    return _name_of(value) if callable(value) else repr(value)


def _name_of(target: Any) -> str:
    if isinstance(target, (str, OpOverload)):
        return str(target)
    return getattr(target, "__name__", None) or type(target).__name__


def _laid_out(value: Any) -> str:
    """Dtype and shape, with strides if the value is not contiguous."""
    if isinstance(value, torch.Tensor):
        text = describe(value)
        if value.layout is not torch.strided:
            return text
        stride = tuple(value.stride())
        return text if stride == contiguous_strides(value.shape) else f"{text} strides {[*stride]}"
    if isinstance(value, (tuple, list)):
        return ", ".join(_laid_out(part) for part in value if isinstance(part, torch.Tensor))
    return ""
