"""Near misses of a pattern: its computation with one change.

    relu(x - y) * 2     ->     relu(y - x) * 2        operands swapped where that matters
                               relu(x - y) * 3        another literal
                               exp(x - y) * 2         another operator
                               ..., x - y             an extra user
                               x.add_(1) in between   a mutation between two uses

A pattern must decline each of them, or its replacement must still be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node, map_arg

from fuse import ops

aten = torch.ops.aten


@dataclass(frozen=True)
class Alteration:
    """One change of ``graph``: ``node`` gets other arguments or another operator, or ``written`` changes before it."""

    what: str
    graph: GraphModule = field(repr=False)
    node: Node
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    written: Node | None = None
    also: bool = False

    def __call__(self, *tensors: Tensor) -> tuple[Any, ...]:
        """The results of the altered graph; with ``also``, the value of ``node`` too."""
        run = _Altered(self)
        results = run.run(*tensors)
        return (*results, run.value) if self.also else tuple(results)


def alterations(graph: GraphModule) -> Iterator[Alteration]:
    """All near misses of ``graph``, a captured pattern, that this module can make."""
    results = graph.graph.output_node().all_input_nodes
    for node in graph.graph.find_nodes(op="placeholder"):
        later = list(node.users)[1:]
        if later and node.meta["val"].is_floating_point():
            name = f"{node.name} written before `{_called(later[-1])}` reads it"
            yield Alteration(name, graph, later[-1], written=node)
    for node in graph.graph.nodes:
        if isinstance(node.target, OpOverload):
            yield from _of(graph, node, node.target)
            if isinstance(node.meta["val"], Tensor) and node not in results:
                yield Alteration(f"`{_called(node)}` used outside, too", graph, node, also=True)


def _of(graph: GraphModule, node: Node, op: OpOverload) -> Iterator[Alteration]:
    """The changes of one call: swapped operands, another operator, other literals."""
    name, args = _called(node), node.args
    tensors = [place for place, argument in enumerate(args) if isinstance(argument, Node)]
    if len(tensors) > 1 and args[tensors[0]] is not args[tensors[1]] and not ops.is_commutative(op):
        swapped = list(args)
        swapped[tensors[0]], swapped[tensors[1]] = swapped[tensors[1]], swapped[tensors[0]]
        yield Alteration(f"operands of `{name}` swapped", graph, node, args=tuple(swapped))
    if ops.is_pointwise(op) and len(args) == 1 and not node.kwargs:
        other = aten.exp.default if op is not aten.exp.default else aten.sin.default
        yield Alteration(f"`{other._schema.name.removeprefix('aten::')}` for `{name}`", graph, node, target=other)
    for place, value in enumerate(args):
        if (literal := _other(value)) is not None:
            changed = (*args[:place], literal, *args[place + 1 :])
            yield Alteration(f"{literal} for {value} in `{name}`", graph, node, args=changed)
    for key, value in node.kwargs.items():
        if (literal := _other(value)) is not None:
            what = f"{key}={literal} for {value} in `{name}`"
            yield Alteration(what, graph, node, kwargs={**node.kwargs, key: literal})


def _other(value: Any) -> Any:
    """Another literal in place of ``value``; None if ``value`` is not a literal."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, (list, tuple)) and len(value) > 1 and all(isinstance(item, int) for item in value):
        return [*value[1:], value[0]] if len(set(value)) > 1 else None
    return None


def _called(node: Node) -> str:
    assert isinstance(node.target, OpOverload)
    return node.target._schema.name.partition("::")[2]


class _Altered(Interpreter):
    """Runs a graph with one alteration; ``value`` is then the result of the altered node."""

    def __init__(self, alteration: Alteration) -> None:
        super().__init__(alteration.graph)
        self.alteration = alteration
        self.value: Any = None

    def run_node(self, n: Node) -> Any:
        change = self.alteration
        if n is not change.node:
            return super().run_node(n)
        if change.written is not None:
            self.env[change.written].add_(1)
        wanted = (n.args if change.args is None else change.args, n.kwargs if change.kwargs is None else change.kwargs)
        args, kwargs = map_arg(wanted, self.env.__getitem__)
        assert isinstance(n.target, OpOverload)
        self.value = (change.target or n.target)(*args, **kwargs)
        return self.value
