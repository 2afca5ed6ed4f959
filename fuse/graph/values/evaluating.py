"""Compute the values of recorded operators for the call's inputs, on demand.

    recorded    a = mm(x, w);  b = relu(a);  c = sum(a)          wanted: c         runs: mm, sum

A capture has the real inputs of the call. When ``forward`` reads a value, the operators that the value needs run on
these inputs, each once. The record is functional, so that nothing of the user's is written. Random operators run in
their order, from the generator's state at the start of the capture; the state is restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from fuse import ops
from fuse.devices import without_autocast
from fuse.errors import CaptureError
from fuse.graph.outputs import worked_out
from fuse.graph.patches.seeding import Draws


class NoData(CaptureError):
    """A value is read that depends on fake inputs, which have no data."""


class Evaluation:
    """The values of nodes for one call; ``given`` returns the tensor of a placeholder.

    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    >>> Evaluation(lambda node: torch.ones(3), Draws()).value(doubled)
    tensor([2., 2., 2.])
    """

    def __init__(self, given: Callable[[Node], Tensor], draws: Draws) -> None:
        self._given = given
        self._draws = draws
        self._known: dict[Node, Any] = {}
        self._state = torch.default_generator.get_state()

    def value(self, node: Node) -> Tensor:
        """The value of ``node``.

        Raises:
            NoData: the value depends on a fake input.
            Exception: any error of the operators.
        """
        if node not in self._known:
            with _disable_current_modes(), torch.no_grad(), without_autocast():
                for one in self._missing(node):
                    self._known[one] = self._run(one)
        found: Tensor = self._known[node]
        return found

    def tell(self, node: Node, value: Any) -> None:
        """Note the known ``value`` of ``node``."""
        self._known[node] = value

    def apart(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """``op`` applied to the values of nodes; the random generator's state does not change."""
        given = map_arg((args, dict(kwargs)), self.value)
        state = torch.default_generator.get_state()
        try:
            with _disable_current_modes(), torch.no_grad(), without_autocast():
                return op(*given[0], **given[1])
        finally:
            torch.default_generator.set_state(state)

    def held(self, nodes: Any) -> list[Tensor]:
        """The known values of the nodes in ``nodes``."""
        found: list[Tensor] = []
        map_arg(nodes, lambda node: found.append(self._known[node]))
        return found

    def _missing(self, node: Node) -> list[Node]:
        """The nodes that must run to compute ``node``, in order; a random node needs all earlier random nodes."""
        drawn = {one: position for position, one in enumerate(self._draws.nodes)}
        found: set[Node] = set()
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one in found or one in self._known:
                continue
            found.add(one)
            waiting.extend(one.all_input_nodes)
            if one in drawn:
                waiting.extend(self._draws.nodes[: drawn[one]])
        return sorted(found)

    def _run(self, node: Node) -> Any:
        if node.op == "placeholder":
            tensor = self._given(node)
            if isinstance(tensor, FakeTensor) or tensor.is_meta:
                raise NoData(f"forward reads a value that depends on {node.name}, which is fake and has no data")
            return tensor.detach()
        args, kwargs = map_arg((node.args, node.kwargs), self._known.__getitem__)
        if not ops.is_random(node.target):
            return node.target(*args, **kwargs)  # type: ignore[operator]  # a function
        before = torch.default_generator.get_state()
        try:
            torch.default_generator.set_state(self._state)
            result = node.target(*args, **kwargs)  # type: ignore[operator]  # likewise
            self._state = torch.default_generator.get_state()
        finally:
            torch.default_generator.set_state(before)
        return result


class Keys:
    """Hash keys of nodes: equal if the same operators compute them from the same inputs, in any recording.

    ``fixed``: placeholders of the program's own numbers.

    >>> graphs = torch.fx.Graph(), torch.fx.Graph()
    >>> made = [graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 2)) for graph in graphs]
    >>> Keys(Draws()).of(made[0]) == Keys(Draws()).of(made[1])
    True
    """

    def __init__(
        self, draws: Draws, given: Callable[[Node], Tensor] | None = None, fixed: Collection[Node] = ()
    ) -> None:
        self._draws = draws
        self._given = given
        self._fixed = fixed
        self._known: dict[Node, int] = {}

    def of(self, node: Node) -> int:
        """The key of ``node``."""
        return worked_out(node, self._known, self._key)

    def _key(self, node: Node) -> int:
        if node.op == "placeholder":
            held = self._given(node) if self._given and str(node.target).startswith("constant_") else None
            if held is None or isinstance(held, FakeTensor):
                return hash(str(node.target))
            alone = node in self._fixed and held.numel() == 1
            with _disable_current_modes():
                number = f"{held.item()!r} {held.dtype}" if alone else id(held)  # -1 and -2 have one hash
            return hash((str(node.target), number))
        args, kwargs = map_arg((node.args, node.kwargs), self._known.__getitem__)
        drawn = self._draws.nodes.index(node) if node in self._draws.nodes else -1
        return hash((str(node.target), repr(args), repr(kwargs), drawn))


class Varying:
    """The nodes whose value may differ in another call: they depend on inputs, random numbers or unknown operators.

    ``fixed``: placeholders of the program's own numbers.

    >>> graph = torch.fx.Graph()
    >>> positions = graph.call_function(torch.ops.aten.arange.default, (4,))
    >>> shifted = graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"), positions))
    >>> Varying(set()).of(positions), Varying(set()).of(shifted)
    (False, True)
    """

    def __init__(self, fixed: Collection[Node]) -> None:
        self._fixed = fixed
        self._known: dict[Node, bool] = {}

    def of(self, node: Node) -> bool:
        """Whether the value of ``node`` may differ in another call."""
        return worked_out(node, self._known, self._varies)

    def _varies(self, node: Node) -> bool:
        return self._alone(node) or any(self._known[operand] for operand in node.all_input_nodes)

    def _alone(self, node: Node) -> bool:
        if node.op == "placeholder":
            return node not in self._fixed
        known = (isinstance(node.target, OpOverload) and node.target.namespace == "aten") or node.target is getitem
        return not known or ops.is_random(node.target) or "empty" in str(node.target)
