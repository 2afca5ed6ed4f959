"""Replace a match by the pattern's own replacement.

    r = relu(add(conv(x, w), skip))     ->     the operators of replace(x, w, skip), traced with those tensors

Declined if the replacement raises, returns another shape, dtype or device than the pattern, or returns memory that the
caller would notice to be another tensor's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from fuse.rewrite import regions, surgery, view_layouts
from fuse.rewrite.patterns.conditions import Misfit, Surroundings
from fuse.rewrite.patterns.exact_match import Bound, FoundMatch, FoundResult
from fuse.rewrite.patterns.terms import type_of
from fuse.rewrite.patterns.tracing import Traced

aten = torch.ops.aten


@dataclass(frozen=True)
class Replacement:
    """A traced replacement that fits; ``inputs``: the graph's nodes for the inputs of ``traced`` that it reads."""

    found: FoundMatch
    traced: Traced
    inputs: Mapping[Node, Bound]


def replacement(found: FoundMatch, around: Surroundings) -> Replacement | Misfit:
    """The replacement for ``found``, or why it does not fit."""
    traced = found.setting.replaced
    if isinstance(traced, str):
        return Misfit("constraint", f"replace does not run on these tensors: {traced}")
    read = zip(found.form.keys, traced.inputs, strict=True)
    inputs = {inner: found.inputs[key] for key, inner in read if inner is not None}
    return _misfit(found, traced, around) or Replacement(found, traced, inputs)


def _misfit(found: FoundMatch, traced: Traced, around: Surroundings) -> Misfit | None:
    if len(traced.outputs) != len(found.outputs):
        return Misfit("constraint", f"replace gives {len(traced.outputs)} results, the pattern {len(found.outputs)}")
    for output, new in zip(found.outputs, traced.outputs, strict=True):
        old, value = output.node.meta["val"], new.meta["val"]
        if output.is_input:
            continue
        if output.reshaped:
            value = value.reshape(old.shape) if value.numel() == old.numel() else value
        if type_of(value) != type_of(old):
            return Misfit("constraint", f"replace gives {type_of(value)}, the pattern {type_of(old)}", output.node)
        if value.stride() != old.stride() and not old.is_contiguous():
            return Misfit("constraint", "replace gives strides that no copy has", output.node)
    owners = [regions.owner(node) for node in traced.outputs]
    for output, own in zip(found.outputs, owners, strict=True):
        shared = own.op == "placeholder" or owners.count(own) > 1
        if shared and output.node in around.escaping and not output.is_input:
            return Misfit("alias or mutation", "the caller would see a result in another tensor's memory", output.node)
    return None


def put(replacement: Replacement, moved: dict[Node, Node]) -> None:
    """Insert the replacement's operators before the pattern's last node, and replace the pattern's results.

    ``moved`` maps nodes replaced by earlier rewrites to their replacements; this rewrite adds its own. The caller
    restores the program order.
    """
    found, traced = replacement.found, replacement.traced
    last = found.members[-1]
    known: dict[Node, Node] = {}
    for inner, given in replacement.inputs.items():
        known[inner] = latest(given.node, moved)
        if given.dims is not None:
            known[inner] = surgery.insert(last, aten.permute.default, known[inner], list(given.dims))
    results = [output.node for output in found.outputs]
    for inner in traced.graph.nodes:
        if inner.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((inner.args, inner.kwargs), known.__getitem__)
            known[inner] = surgery.insert(last, inner.target, *args, like=results[0], **kwargs)
    for output, inner in zip(found.outputs, traced.outputs, strict=True):
        if not output.is_input and not output.node._erased:
            new = _in_layout(known[inner], output, last)
            moved[output.node] = new
            surgery.replace(output.node, new)


def latest(node: Node, moved: dict[Node, Node]) -> Node:
    """The current replacement of ``node``."""
    while node in moved:
        node = moved[node]
    return node


def _in_layout(new: Node, output: FoundResult, before: Node) -> Node:
    """``new`` with the shape and strides of the result that it replaces."""
    old = output.node.meta["val"]
    if output.reshaped:
        if view_layouts.view(aten.view.default, view_layouts.without_data(new.meta["val"]), (list(old.shape),)) is None:
            new = _copied(new, before)
        new = surgery.insert(before, aten.view.default, new, list(old.shape), like=output.node)
    return new if new.meta["val"].stride() == old.stride() else _copied(new, before)


def _copied(node: Node, before: Node) -> Node:
    return surgery.insert(before, aten.clone.default, node, like=node, memory_format=torch.contiguous_format)
