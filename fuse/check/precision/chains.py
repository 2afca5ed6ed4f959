"""Run a graph node by node in three chains, and measure each operator.

    float64      exact operands        -> operator in float64          -> exact value
    propagated   narrow operands       -> operator as it runs          -> error of everything so far
    isolated     exact operands,       -> operator as it runs          -> error of this operator alone:
                 rounded               -> operator in float64          <- what it is measured against

A value is dropped once its last reader has run. Random operators draw once, for all chains.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fuse import ops
from fuse.check.precision.errors import Errors, Range, errors, range_of
from fuse.check.precision.exact import wide, wide_call, wide_module
from fuse.check.precision.expected import ONE_ROUNDING, expected_error, finite_norm
from fuse.graph.describing import dtype_name
from fuse.graph.signature import Layout, Signature

aten = torch.ops.aten

Execute = Callable[[Node, tuple[Any, ...], dict[str, Any]], Any]
"""A function that runs a node like the device under test."""

SLACK = 2.0
"""Allowed error of a kernel, relative to the error of its operators run one by one."""


@dataclass(frozen=True)
class Operator:
    """One result of one operator.

    Attributes:
        name: name of the node.
        op: the operator, or ``input``.
        source: the user's line.
        dtype: dtype of the result.
        shape: shape of the result.
        propagated: errors in the run of the whole graph.
        isolated: errors of the operator alone, on rounded exact operands; None for inputs and random numbers.
        allowed: relative error that the dtype explains for the operator alone.
        range: magnitudes, overflows and underflows.
        beyond: whether the operator alone has a larger error than allowed.
        note: a remark, such as ``drawn`` or ``cast from float32``.
    """

    name: str
    op: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    propagated: Errors
    isolated: Errors | None
    allowed: float
    range: Range
    beyond: bool
    note: str = ""


@dataclass(frozen=True)
class Chain:
    """All operators of a graph in order, its results, and its exact results in float64."""

    operators: tuple[Operator, ...]
    results: tuple[Tensor, ...]
    exact: tuple[Tensor, ...]

    @property
    def first_beyond(self) -> Operator | None:
        """The first operator whose own error is larger than its dtype explains."""
        return next((one for one in self.operators if one.beyond), None)

    @property
    def overflows(self) -> int:
        return sum(one.range.overflows for one in self.operators)

    @property
    def result(self) -> Errors:
        """The errors of the result with the largest relative error."""
        found = [errors(mine, truth) for mine, truth in zip(self.results, self.exact, strict=True)]
        return max(found, key=lambda one: one.relative, default=Errors(0.0, 0.0, 0.0, 1.0))


def measure(
    graph: GraphModule,
    given: Sequence[Tensor],
    exact: Sequence[Tensor],
    *,
    execute: Execute | None = None,
    casts: frozenset[str] = frozenset(),
    seed: int = 0,
) -> Chain:
    """Run ``graph`` in the three chains.

    ``given`` are its inputs, ``exact`` the same in float64. ``execute`` runs a node; by default torch does, operator by
    operator. ``casts`` are lines where the model itself asks for a dtype: a cast there is judged by the wider dtype.

    >>> import fuse
    >>> x = torch.tensor([0.1, 0.2]).bfloat16()
    >>> chain = measure(fuse.capture(nn.Tanh(), (x,)), [x], [x.double()])
    >>> [(one.op, one.beyond) for one in chain.operators]
    [('input', False), ('aten.tanh.default', False)]
    """
    runner = _Runner(graph, execute, casts)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return runner.run(given, exact)


class _Runner:
    def __init__(self, graph: GraphModule, execute: Execute | None, casts: frozenset[str]) -> None:
        self.graph = graph
        self.execute = execute or self._as_torch
        self.casts = casts
        self.narrow: dict[Node, Any] = {}
        self.exact: dict[Node, Any] = {}
        self.wide_modules: dict[str, nn.Module] = {}
        self.rows: list[Operator] = []

    def run(self, given: Sequence[Tensor], exact: Sequence[Tensor]) -> Chain:
        last = _last_uses(self.graph)
        inputs = iter(zip(given, exact, strict=True))
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self._input(node, *next(inputs))
            elif node.op == "output":
                return self._results(node)
            else:
                self._node(node)
            for dead in last.get(node, ()):
                del self.narrow[dead], self.exact[dead]
        raise AssertionError("a graph ends with its output")

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def _input(self, node: Node, given: Tensor, exact: Tensor) -> None:
        self.narrow[node], self.exact[node] = given.detach(), exact.detach()
        if given.is_floating_point() and node.users:
            self._add(node, "input", given, exact, None, 0.0, False)

    def _node(self, node: Node) -> None:
        narrow = self._call(node, self.narrow)
        if _draws(self.graph, node):
            self._keep(node, narrow, wide(narrow))
            self._rows(node, narrow, self.exact[node], None, None, "drawn")
            return
        exact = self._exact(node, map_arg(node.args, self.exact.get), map_arg(node.kwargs, self.exact.get), narrow)
        if exact is None:
            self._keep(node, narrow, wide(narrow))
            self._rows(node, narrow, self.exact[node], None, None, "not computed in float64")
            return
        self._keep(node, narrow, exact)
        if node.op == "call_function" and (node.target is operator.getitem or _is_view(node)):
            return
        rounded = {one: _rounded(self.exact[one], one) for one in node.all_input_nodes}
        alone = self._call(node, rounded)
        widened = {one: wide(value) for one, value in rounded.items()}
        truth = self._exact(node, map_arg(node.args, widened.get), map_arg(node.kwargs, widened.get), narrow)
        self._rows(node, narrow, exact, alone, truth, "", rounded)

    def _call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        return self.execute(node, map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__))

    def _as_torch(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node.op == "call_module":
            return self.graph.get_submodule(str(node.target))(*args, **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _exact(self, node: Node, args: Any, kwargs: Any, narrow: Any) -> Any:
        """The node's value in float64; None if there is none, or if its shape depends on the dtype (bit patterns)."""
        try:
            if node.op == "call_module":
                target = str(node.target)
                if target not in self.wide_modules:
                    self.wide_modules[target] = wide_module(self.graph.get_submodule(target))
                found = self.wide_modules[target](*args, **kwargs)
            else:
                found = wide_call(node.target, args, kwargs)
        except (RuntimeError, NotImplementedError, TypeError):  # the operator does not support float64
            return None
        mine, theirs = _tensors(narrow), _tensors(found)
        return found if [t.shape for t in mine] == [t.shape for t in theirs] else None

    def _keep(self, node: Node, narrow: Any, exact: Any) -> None:
        self.narrow[node], self.exact[node] = narrow, exact

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def _rows(
        self,
        node: Node,
        narrow: Any,
        exact: Any,
        alone: Any,
        truth: Any,
        note: str,
        rounded: Mapping[Node, Any] | None = None,
    ) -> None:
        parts = list(zip(_tensors(narrow), _tensors(exact), strict=True))
        singles = _tensors(alone) if truth is not None else [None] * len(parts)
        truths = _tensors(truth) if truth is not None else [None] * len(parts)
        used = _used_results(node)
        for index, (mine, theirs) in enumerate(parts):
            name = node.name if len(parts) == 1 else f"{node.name}.{index}"
            single, against = singles[index], truths[index]
            if (used is not None and index not in used) or not mine.numel():
                continue
            op = str(node.target)
            if single is None or against is None:
                self._add(node, op, mine, theirs, None, 0.0, False, name, note or "drawn")
                continue
            found = errors(single, against)
            allowed, said = self._allowed(node, rounded or {}, single, against, index)
            size = finite_norm(against)
            beyond = _error_norm(found, size, single, against) > allowed
            share = allowed / size if size else 0.0
            self._add(node, op, mine, theirs, found, share, beyond, name, said)

    def _allowed(
        self, node: Node, rounded: Mapping[Node, Any], alone: Tensor, truth: Tensor, index: int
    ) -> tuple[float, str]:
        """The Euclidean norm of the expected error, and a note."""
        operands = [t for value in rounded.values() for t in _tensors(value)]
        dtype = alone.dtype
        if node.op == "call_module":
            one_by_one = _tensors(self._as_torch(node, *_arguments(node, rounded)))[index]
            own = errors(one_by_one, truth)
            size = finite_norm(truth)
            base = expected_error(node.target, operands, truth, dtype)
            return SLACK * _error_norm(own, size, one_by_one, truth) + base, ""
        if node.target is aten._to_copy.default and operands and dtype.is_floating_point:
            return self._allowed_cast(node, operands[0], truth, dtype)
        return expected_error(node.target, operands, truth, dtype), ""

    def _allowed_cast(self, node: Node, operand: Tensor, truth: Tensor, dtype: torch.dtype) -> tuple[float, str]:
        said = f"cast from {dtype_name(operand.dtype)}"
        asked = node.meta.get("source", "") in self.casts and not _is_given(node.args[0])
        if not operand.is_floating_point():
            return 0.0, said
        if not asked or torch.finfo(operand.dtype).eps > torch.finfo(dtype).eps:
            return expected_error(node.target, [operand], truth, dtype), said
        size = finite_norm(truth)
        return ONE_ROUNDING * torch.finfo(operand.dtype).eps / 2 * size, said

    def _add(
        self,
        node: Node,
        op: str,
        narrow: Tensor,
        exact: Tensor,
        isolated: Errors | None,
        allowed: float,
        beyond: bool,
        name: str = "",
        note: str = "",
    ) -> None:
        found = Operator(
            name or node.name,
            op,
            str(node.meta.get("source") or ""),
            dtype_name(narrow.dtype),
            tuple(narrow.shape),
            errors(narrow, exact),
            isolated,
            allowed,
            range_of(narrow, exact),
            beyond,
            note,
        )
        self.rows.append(found)

    def _results(self, node: Node) -> Chain:
        signature: Signature = self.graph.meta["signature"]
        values = node.args[0]
        assert isinstance(values, tuple | list)
        pairs = []
        for spec in signature.outputs:
            value = values[spec.index] if spec.kind == "graph" else None
            if isinstance(value, Node):
                pairs.append([_part(chain[value], spec.view) for chain in (self.narrow, self.exact)])
        return Chain(tuple(self.rows), tuple(one for one, _ in pairs), tuple(one for _, one in pairs))


def _part(value: Tensor, view: Layout | None) -> Tensor:
    """The view of a value that the caller receives."""
    if view is None:
        return value
    return value.as_strided(view.size, view.stride, value.storage_offset() + view.offset)


def _error_norm(found: Errors, size: float, value: Tensor, truth: Tensor) -> float:
    """The Euclidean norm of an error."""
    if found.relative == 0:
        return 0.0
    if not size:
        return float(torch.linalg.vector_norm((value.double() - truth.double()).nan_to_num(torch.inf)))
    return found.relative * size


def _last_uses(graph: GraphModule) -> dict[Node, list[Node]]:
    last: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        last[node] = node
        for operand in node.all_input_nodes:
            last[operand] = node
    dying: dict[Node, list[Node]] = {}
    for node, reader in last.items():
        if node.op != "output":
            dying.setdefault(reader, []).append(node)
    return dying


def _rounded(value: Any, node: Node) -> Any:
    """An exact value converted to the dtypes of the node in the graph."""
    return _cast(value, node.meta["val"])


def _cast(value: Any, like: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(like.dtype)
    if isinstance(value, tuple | list):
        return type(value)([_cast(v, one) for v, one in zip(value, like, strict=True)])
    return value


def _arguments(node: Node, values: Mapping[Node, Any]) -> tuple[Any, Any]:
    return map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _used_results(node: Node) -> set[int] | None:
    """The positions of results that are read; None if that is unknown."""
    if isinstance(node.meta.get("val"), Tensor) or not all(user.target is operator.getitem for user in node.users):
        return None
    return {user.args[1] for user in node.users if isinstance(user.args[1], int) and user.users}


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and ops.is_view(node.target)


def _draws(graph: GraphModule, node: Node) -> bool:
    """Whether a node, or the module that it calls, draws random numbers."""
    if node.op == "call_module":
        parts = graph.get_submodule(str(node.target)).modules()
        inner = [one for part in parts if isinstance(part, GraphModule) for one in part.graph.nodes]
        return any(isinstance(one.target, torch._ops.OpOverload) and ops.is_random(one.target) for one in inner)
    return isinstance(node.target, torch._ops.OpOverload) and ops.is_random(node.target)


def _is_given(argument: Any) -> bool:
    """Whether an argument is an input of the graph or a view of one, whose cast makes the model run in the dtype."""
    while isinstance(argument, Node) and argument.op == "call_function" and _is_view(argument):
        argument = argument.args[0]
    return isinstance(argument, Node) and argument.op == "placeholder"
