"""Replace a chain of views by one view, or by none.

    v = slice(x, 0, 2, 8)                               t = transpose(x, 0, 1)
    w = slice(v, 0, 1, 3)    ->  w = slice(x, 0, 3, 5)  y = exp(transpose(t, 0, 1))   ->   y = exp(x)

A view launches nothing, but later passes handle one view more easily than three, and find copies that only undo a
transposition. Two views of the same memory are equal if their layouts (sizes, strides, offset) are, so that a shorter
form is accepted if its layout is equal. Declined where no single operator gives the layout, and where the view is a
result, which is a tensor object of its own in eager mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse.kernel.sizes.sized import call_at_hand
from fuse.rewrite import effects, surgery, view_layouts
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten
ViewCall = tuple[OpOverload, tuple[Any, ...]]
"""A view operator and its arguments after the tensor."""


@register_pass(stage="clean", after="step_invariants")
def view_chains(graph: GraphModule) -> Iterator[Verdict]:
    """Replace a chain of views by one view, or by none."""
    results = set(effects.results(graph))
    sized = cutting_at_some_sizes(graph)
    for node in list(graph.graph.nodes):
        if node._erased or not isinstance(node.target, OpOverload) or (base := viewed_tensor(node)) is None:
            continue
        origin = viewed_tensor(base)
        if node in sized or (base in sized and origin is not None):
            yield declined(node, "a slice cuts nothing here, or cuts, as sizes vary: all sizes share the kernels")
        elif same := next((other for other in (base, origin) if other and layout(other) == layout(node)), None):
            if node in results:
                yield declined(node, "the view is itself a result")
            else:
                yield rewrite((same, node), surgery.replace, node, same)
        elif origin is not None:
            if call := single_view(origin, node):
                yield rewrite((base, node), shorten, node, origin, call)
            else:
                yield declined((base, node), "no single view gives the same layout")


def cutting_at_some_sizes(graph: GraphModule) -> set[Node]:
    """The slices that cut nothing in some calls, and something in others."""
    found: set[Node] = set()
    if (call := call_at_hand()) is not None:
        slices_at: Counter[object] = Counter()
        for node in graph.graph.find_nodes(op="call_function", target=aten.slice.Tensor):
            place = ("slice", node.meta.get("source"))
            slices_at[place] += 1
            whole = node.meta["val"].size() == node.args[0].meta["val"].size()
            if call.varies((*place, slices_at[place]), whole, graph):
                found.add(node)
    return found


def viewed_tensor(node: Node) -> Node | None:
    """The base of the view ``node``, also if its operator returns several views."""
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    base = effects.view_base(node)
    while base is not None and not isinstance(base.meta["val"], Tensor):
        base = effects.view_base(base)
    return base


def layout(node: Node) -> tuple[object, ...]:
    """All that distinguishes two views of the same memory."""
    val = node.meta["val"]
    return (val.dtype, val.size(), val.stride(), val.storage_offset(), val.is_conj(), val.is_neg())


def shorten(node: Node, origin: Node, call: ViewCall) -> None:
    """Replace ``node`` by the view ``call`` of ``origin``."""
    target, arguments = call
    surgery.replace(node, surgery.insert(node, target, origin, *arguments, like=node))


def single_view(origin: Node, node: Node) -> ViewCall | None:
    """One view operator that leads from ``origin`` to the layout of ``node``, or None."""
    old, new = origin.meta["val"], node.meta["val"]
    moved = new.storage_offset() - old.storage_offset()
    if (old.dtype, old.is_conj(), old.is_neg()) != (new.dtype, new.is_conj(), new.is_neg()):
        return None
    plain = view_layouts.without_data(old)
    for target, arguments in proposals(old, new, moved):
        view = view_layouts.view(target, plain, arguments)
        if view is not None and (view.size(), view.stride(), view.storage_offset()) == (
            new.size(),
            new.stride(),
            moved,
        ):
            return target, arguments
    return None


def proposals(old: Tensor, new: Tensor, moved: int) -> Iterator[ViewCall]:
    """View operators that might lead from ``old`` to ``new``, ``moved`` elements further on; the caller tries them."""
    if old.numel() == new.numel() and not moved:
        yield aten.view.default, (list(new.size()),)
    if old.dim() == new.dim() and sorted(old.size()) == sorted(new.size()) and not moved:
        yield aten.permute.default, (matching_dims(old, new),)
    if old.dim() <= new.dim() and not moved:
        yield aten.expand.default, (list(new.size()),)
    if old.dim() == new.dim():
        yield from ((aten.slice.Tensor, bounds) for bounds in slices(old, new, moved))
    if old.dim() == new.dim() + 1:
        for dim, stride in enumerate(old.stride()):
            if stride and not moved % stride and 0 <= moved // stride < old.size(dim):
                yield aten.select.int, (dim, moved // stride)


def matching_dims(old: Tensor, new: Tensor) -> list[int]:
    """For each dimension of ``new`` one of ``old`` with equal size and stride, if there is one left."""
    left = list(range(old.dim()))
    dims = []
    for size, stride in zip(new.size(), new.stride(), strict=True):
        found = next((dim for dim in left if (old.size(dim), old.stride(dim)) == (size, stride)), left[0])
        left.remove(found)
        dims.append(found)
    return dims


def slices(old: Tensor, new: Tensor, moved: int) -> Iterator[tuple[int, int, int, int]]:
    """Bounds (dim, start, end, step) that would turn ``old`` into ``new``, if only one dimension was cut."""
    cut = [dim for dim in range(old.dim()) if (old.size(dim), old.stride(dim)) != (new.size(dim), new.stride(dim))]
    if len(cut) != 1 or not old.stride(cut[0]) or new.size(cut[0]) == 0:
        return
    dim, stride = cut[0], old.stride(cut[0])
    if new.stride(dim) != stride:  # every second row, say: shorter, but it hides what a loop reads in step t
        return
    start = moved // stride
    yield dim, start, start + new.size(dim), 1
