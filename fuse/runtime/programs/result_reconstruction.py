"""Reconstruction of the model's result from the values of a graph: the same objects, views and structure as in eager.

values (w, y)   outputs (graph 0, graph 1 as (2, 32), input 0, python "ok")   ->   (w, y.as_strided(...), x, "ok")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.graph.signature import OutputSpec, Signature
from fuse.graph.state.freed_graphs import freed

Reconstruction = Callable[[Sequence[Tensor | None], Sequence[Tensor]], Any]


def reconstruction(signature: Signature) -> Reconstruction:
    """A function from (values of the graph, tensors of its placeholders) to the model's result.

    If the graph also returns values that Python read, the function returns the pair of None and the result.
    """
    reads = signature.learning.leaves if signature.learning is not None else 0
    again = ("repeat", "number")  # kinds that refer to an earlier leaf
    if not reads or any(leaf.kind in again and leaf.index < reads for leaf in signature.outputs[reads:]):
        return _reconstruction_of(signature.outputs, signature.out_spec)
    moved = [
        replace(leaf, index=leaf.index - reads) if leaf.kind in again else leaf for leaf in signature.outputs[reads:]
    ]
    rebuilt = _reconstruction_of(moved, signature.out_spec.children()[1])
    return lambda values, inputs: (None, rebuilt(values, inputs))


def _reconstruction_of(leaves: Sequence[OutputSpec], spec: pytree.TreeSpec) -> Reconstruction:
    rebuild = _builder(spec)
    if len(leaves) == 1 and spec.is_leaf() and leaves[0].kind == "graph" and _is_plain(leaves[0]):
        only = leaves[0].index
        return lambda values, inputs: values[only]
    return lambda values, inputs: rebuild(iter(_reconstructed(leaves, values, inputs)))


def reconstruct_leaves(signature: Signature) -> Reconstruction:
    """Like :func:`reconstruction`, but from the leaves of kind ``graph`` instead of the graph's values."""
    outputs = signature.outputs
    rebuild = _builder(signature.out_spec)
    if all(spec.kind == "graph" and spec.parameter is None for spec in outputs):
        if signature.out_spec.is_leaf():
            return lambda new, inputs: new[0]
        return lambda new, inputs: rebuild(iter(new))
    number = count()
    leaves = [replace(spec, index=next(number), view=None) if spec.kind == "graph" else spec for spec in outputs]
    return lambda new, inputs: rebuild(iter(_reconstructed(leaves, new, inputs)))


def _reconstructed(
    leaves: Sequence[OutputSpec], values: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Any]:
    """All leaves in order; a repeated leaf is the same object as before, a number is read from an earlier tensor."""
    made: list[Any] = []
    for spec in leaves:
        if spec.kind == "number":
            made.append(made[spec.index].item())
        elif spec.kind == "repeat":
            made.append(made[spec.index])
        else:
            made.append(_leaf(spec, values, inputs))
    return made


def _leaf(spec: OutputSpec, values: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Any:
    if spec.kind == "python":
        return spec.value
    whole = values[spec.index] if spec.kind == "graph" else inputs[spec.index]
    if _is_plain(spec) or whole is None:
        return whole
    if spec.detached:
        whole = whole.detach()
    if (view := spec.view) is not None:
        whole = whole.as_strided(view.size, view.stride, whole.storage_offset() + view.offset)
    if spec.parameter is not None:
        return nn.Parameter(whole, spec.parameter)
    return freed(whole) if spec.freed else whole


def _is_plain(spec: OutputSpec) -> bool:
    return spec.view is None and not spec.freed and spec.parameter is None


def _builder(spec: pytree.TreeSpec) -> Callable[[Iterator[Any]], Any]:
    """``tree_unflatten`` for one structure, ten times as fast for tuples, lists and dictionaries."""
    if spec.is_leaf():
        return next
    children = [_builder(child) for child in spec.children()]
    if spec.type is tuple:
        return lambda leaves: tuple([child(leaves) for child in children])
    if spec.type is list:
        return lambda leaves: [child(leaves) for child in children]
    if spec.type is dict:
        keys = spec.context
        return lambda leaves: {key: child(leaves) for key, child in zip(keys, children, strict=True)}
    unflatten = pytree.SUPPORTED_NODES[spec.type].unflatten_fn
    return lambda leaves: unflatten([child(leaves) for child in children], spec.context)
