"""Constants that are computed from sizes, such as masks and positions, for further sizes: without copies of graphs.

    ones = aten.ones([38, 38], dtype=bool)             (37, 37, ...)
    mask = aten.triu(ones, 1)                  ->      aten.triu(aten.ones([37, 37], dtype=bool), 1)

The operators run as they do when constants are folded (:mod:`fuse.rewrite.evaluate`), with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.graph.signature import InputSpec
from fuse.kernel.sizes.region_text import Numbers, mapped_arguments, parts_of, text_and_numbers
from fuse.rewrite.constants import LARGEST_CONSTANT
from fuse.rewrite.evaluate import laid_out, rounded
from fuse.runtime.resizing.resized import NotResized

Constants = Callable[[Numbers], tuple[InputSpec, ...]]
"""A function of the numbers of constants, which returns the inputs of a graph with these constants."""


def constant_numbers(inputs: Sequence[InputSpec]) -> Numbers:
    """The numbers of the graphs that compute constants."""
    origins = (spec.origin for spec in inputs if spec.origin is not None)
    return tuple(n for origin in origins for n in text_and_numbers(origin, lambda node: "", None)[1])


def sized_constants(inputs: Sequence[InputSpec]) -> Constants:
    """The function for the constants of these inputs; it takes numbers in the order of :func:`constant_numbers`.

    It raises :class:`NotResized` where a constant has another layout than the numbers give, or is too large.
    """
    computed = {i: _computed(spec.origin) for i, spec in enumerate(inputs) if spec.origin is not None}

    def made(numbers: Numbers) -> tuple[InputSpec, ...]:
        rest, found = iter(numbers), list(inputs)
        for i, compute in computed.items():
            found[i] = replace(found[i], value=compute(rest), origin=None)
        return tuple(found)

    return made


def _computed(origin: GraphModule) -> Callable[[Iterator[Any]], Tensor]:
    """The function that computes what a graph without inputs does, with the next numbers of an iterator."""

    def compute(numbers: Iterator[Any]) -> Tensor:
        def take(_: Any) -> Any:
            return next(numbers)

        values: dict[Node, Any] = {}
        for node in origin.graph.nodes:
            given = mapped_arguments(node, take, values)
            layouts = [
                (tuple(map(take, part.shape)), tuple(map(take, part.stride()))) for part in parts_of(node.meta["val"])
            ]
            if node.op == "output":
                (found,) = given[0]
                break
            kwargs = dict(zip(node.kwargs, given[len(node.args) :], strict=True))
            values[node] = _laid_out(node, rounded(node, given[: len(node.args)], kwargs), *layouts[0])
        constant: Tensor = found.to(node.meta["val"][0].device)
        return constant

    return compute


def _laid_out(node: Node, value: Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """``value`` with these strides."""
    if value.shape != size:
        raise NotResized(f"{node.name} is {tuple(value.shape)}, and not {size}")
    if value.nbytes > LARGEST_CONSTANT:
        raise NotResized(f"{node.name} is too large to compute")
    return laid_out(value, stride)
