"""The values of tensors in a functional graph, through views and writes.

    y = x[:, 1]                      y  = select(x, 1, 1)
    y.add_(1)             ->         y' = add(y, 1)
    return x                         x' = select_scatter(x, y', 1, 1)
                                     return x'

Every storage is a *base* with a current value and a version. Every tensor is an *alias*: a base, and the chain of views
that leads to it. A write through an alias makes a new value of the base, by the inverse of each view in the chain, and
raises the version. An alias that is read at an old version is computed from the base again. This is the algorithm of
PyTorch's functionalization pass (https://dev-discuss.pytorch.org/t/functionalization-in-pytorch-everything-you-wanted-
to-know/965). It runs on recorded operators here, because that pass under a recording mode is ten times slower.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fuse import ops
from fuse.errors import CaptureError
from fuse.graph.checks import overlap
from fuse.graph.fakes.fake_operators import FakeRunner
from fuse.graph.functional.aliases import Alias, Base, View, storage_of
from fuse.graph.functional.appending import Appender
from fuse.graph.functional.call_templates import CallTemplate
from fuse.graph.functional.left_out import Steps, replaced
from fuse.graph.functional.short_graphs import COLLECTORS, Slot
from fuse.graph.patches.seeding import Draws
from fuse.graph.signature import Dispatch
from fuse.graph.strides import inverse

aten = torch.ops.aten


@dataclass
class Functionalizer:
    """Builds ``graph`` from recorded operators. After :meth:`settle`, ``aliases`` has every tensor by ``id``, kept
    alive."""

    graph: Graph
    fakes: FakeRunner
    aliases: dict[int, Alias] = field(default_factory=dict)
    written: set[Node] = field(default_factory=set)  # values made by writes
    bases: dict[int, Base] = field(default_factory=dict)
    unlisted: list[Base] = field(default_factory=list)  # bases not in ``bases`` yet
    source: str = ""
    pending: list[tuple[CallTemplate, Dispatch]] = field(default_factory=list)
    """Recorded calls that have no nodes yet."""
    draws: Draws = field(default_factory=Draws)
    steps: Steps | None = None
    """The steps that are left out of the graph; None if none may be."""
    former: dict[int, Tensor] = field(default_factory=dict)
    """``id`` of an input that got other memory or another shape -> a tensor that stands for it as it was before."""
    reshaped: list[tuple[Tensor, OpOverload, tuple[Any, ...]]] = field(default_factory=list)
    """Operators that change the shapes of inputs in place."""

    def __post_init__(self) -> None:
        self.append = Appender(self.graph)

    def shorten(self) -> None:
        """Leave out equal steps of loops from now on."""
        self.steps = Steps(self)
        self.aliases = self.steps.aliases

    def whole(self) -> None:
        """Put steps that were left out into the graph, and leave out no more."""
        self.settle()
        if self.steps is not None:
            self.steps.expand()
            self.steps = None

    # ---- reading -----------------------------------------------------------------------------------------------------

    def value(self, tensor: Tensor) -> Node:
        """The node of the present value of ``tensor``; computed from its base if that was written since."""
        self.settle()
        alias = self.aliases[id(tensor)]
        if alias.version != alias.base.version:
            node = alias.base.node
            for view in alias.chain:
                node = self.emit(view.op, (node, *view.args), view.kwargs)
            alias.node, alias.version = node, alias.base.version
        return alias.node

    def known(self, tensor: Tensor) -> bool:
        self.settle()
        return id(tensor) in self.aliases or (self.steps is not None and self.steps.has(tensor))

    def ask_for(self, arguments: Any) -> None:
        """Let tensors among ``arguments`` have nodes, if steps were left out."""
        if self.steps is not None:
            pytree.tree_map_only(Tensor, lambda tensor: self.aliases[id(tensor)], arguments)

    def add_input(self, tensor: Tensor, node: Node, input_index: int | None) -> None:
        """Register the placeholder ``node`` of ``tensor``. With an ``input_index``, writes to it are copied back."""
        base, storage = Base(tensor, node, input_index=input_index), storage_of(tensor)
        self.bases.update((storage_of(one.root), one) for one in self.unlisted)
        self.unlisted.clear()
        shared = self.bases.setdefault(storage, base)
        if shared is not base:  # two inputs over one storage: fine as long as nobody writes (see ``write``)
            shared.input_index = base.input_index = _SHARED
        self.aliases[id(tensor)] = Alias(tensor, base, (), node, 0, node)

    def emit(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any = None) -> Node:
        """A new node. Without a ``value``, the operator runs on the fake values of its arguments."""
        self.settle()
        if ops.is_random(op):
            return self.draws.next(op, args, kwargs, lambda: self.add(op, args, kwargs, value))
        return self.add(op, args, kwargs, value)

    def add(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any = None) -> Node:
        """:meth:`emit` for operators that draw no random numbers."""
        self.settle()
        if value is None:
            value = self.fakes.run(op, _fakes(args), _fakes(dict(kwargs)))
        return self.append(op, args, dict(kwargs), value, self.source)

    def settle(self) -> None:
        """Add nodes for all pending calls; together they take half the time."""
        if not self.pending:
            return
        noted, now = self.pending.copy(), self.source
        self.pending.clear()
        if self.steps is None:
            self.put(noted)
        else:
            self.steps.put(noted)
        self.source = now

    def put(
        self,
        noted: Sequence[tuple[CallTemplate, Dispatch]],
        instead: Mapping[int, Sequence[tuple[Slot, Node]]] | None = None,
    ) -> None:
        """Nodes of operators; ``instead`` of what some of their slots hold, other nodes."""
        writes = any(template.functional is not None for template, _ in noted)
        with self.fakes.aside() if writes else contextlib.nullcontext():  # writes run operators on fake tensors
            self._put(noted, instead or {})

    def _put(
        self,
        noted: Sequence[tuple[CallTemplate, Dispatch]],
        instead: Mapping[int, Sequence[tuple[Slot, Node]]],
    ) -> None:
        aliases, append, known = self.aliases, self.append, self.fakes.known_metadata
        for position, (template, (op, given, given_kwargs, result, source)) in enumerate(noted):
            self.source = source
            steps = self.steps
            while True:
                target: Any = op
                args = list(given)
                for i in template.tensors:
                    alias = aliases[id(given[i])]
                    args[i] = alias.node if alias.version == alias.base.version else self.value(given[i])
                for i in template.lists:
                    target, args[i] = self.pieces(op, given[i])
                if self.steps is steps:
                    break
                steps = self.steps  # steps were put back, and nodes with them
            if position in instead:
                args = replaced(args, instead[position])
            if template.functional is not None:
                copies = op is aten.copy_.default
                node = self.copied(*args[:2]) if copies else self.add(template.functional, tuple(args), {})
                self.write_result(result, node)
                continue
            if template.same:
                origin, node = aliases[id(given[0])], args[0]
                aliases[id(result)] = Alias(result, origin.base, origin.chain, node, origin.base.version, node)
                continue
            kwargs = self.nodes(dict(given_kwargs)) if given_kwargs else {}
            if template.views or template.parts is not None:
                parent = aliases[id(given[0])]
                base, chain = parent.base, parent.chain
                key = known[id(given[0])], *given[1:]
                views = template.views if template.parts is None else template.parts[key][1:]
                for view, part in zip(views, (result,) if template.container is Tensor else result, strict=True):
                    node = append(view.op, (args[0], *view.args), dict(view.kwargs), part, source)
                    aliases[id(part)] = Alias(part, base, (*chain, view), node, base.version, node)
            elif template.container is Tensor:
                node = append(target, tuple(args), kwargs, result, source)
                base = Base(result, node)
                self.unlisted.append(base)
                aliases[id(result)] = Alias(result, base, (), node, 0, node)
            else:
                self.own_parts(result, append(op, tuple(args), kwargs, tuple(result), source))

    def pieces(self, op: Any, pieces: Any) -> tuple[Any, Any]:
        """A list of tensors as nodes, and what ``op`` is called on these: some may be of steps that are left out."""
        steps = self.steps
        if steps is not None and op in COLLECTORS:
            found = steps.pieces(pieces)
            if found is not None and self.steps is steps:  # they were not put back meanwhile
                return COLLECTORS[op], found
        return op, self.nodes(pieces)

    def add_view(self, parent: Alias, views: tuple[View, ...], result: Tensor, node: Node) -> None:
        """Register ``result``: it is ``views`` of ``parent``, and ``node`` has its value."""
        base = parent.base
        self.aliases[id(result)] = Alias(result, base, (*parent.chain, *views), node, base.version, node)

    def own(self, tensor: Tensor, node: Node) -> None:
        """Register ``tensor``, whose value is ``node``, with a storage of its own."""
        base = Base(tensor, node)
        self.unlisted.append(base)
        self.aliases[id(tensor)] = Alias(tensor, base, (), node, 0, node)

    def own_parts(self, parts: Iterable[Any], whole: Node) -> None:
        """Register the tensors among ``parts``, the several results of ``whole``, each with a storage of its own."""
        for position, part in enumerate(parts):
            if isinstance(part, Tensor):
                self.own(part, self.part(whole, position, part))

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write(self, tensor: Tensor, node: Node) -> None:
        """Make ``node`` the value of ``tensor``, and compute the new value of its base through the chain of views."""
        alias = self.aliases[id(tensor)]
        base = alias.base
        self.written.add(node)
        if base.input_index == _SHARED:
            raise CaptureError(
                f"a write at {self.source} to an argument that shares memory with another; it runs in eager mode"
            )
        before = base.node
        outers, outer = [], before  # the operand of each view in the chain
        for view in alias.chain:
            outers.append(outer)
            if view is not alias.chain[-1]:
                outer = self.emit(view.op, (outer, *view.args), view.kwargs)
        if any(map(overlap.overlaps_itself, (base.root, *(outer.meta["val"] for outer in outers[1:])))):
            raise CaptureError(
                f"a write at {self.source} to a part of a tensor whose elements share memory; it runs in eager mode"
            )
        for view, outer in zip(reversed(alias.chain), reversed(outers), strict=True):
            node = self._inverse(view, outer, node)
        base.node = self._in_layout_of(before, node)
        base.version += 1
        if not alias.chain:
            alias.node, alias.version = base.node, base.version

    def write_result(self, tensor: Tensor, node: Node) -> None:
        """Write a result, converted to the dtype and shape of ``tensor``, as the in-place operator does."""
        held, value = self.aliases[id(tensor)].tensor, node.meta["val"]
        if value.dtype != held.dtype or value.shape != held.shape:
            node = self.copied(self.value(tensor), node)
        self.write(tensor, node)

    def copied(self, target: Node, source: Node) -> Node:
        """The value of ``target.copy_(source)``: the source itself if dtype, shape and layout are equal."""
        a, b = target.meta["val"], source.meta["val"]
        if a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and a.device == b.device:
            return source
        return self.emit(aten.copy.default, (target, source), {})

    def _in_layout_of(self, target: Node, source: Node) -> Node:
        if target.meta["val"].stride() == source.meta["val"].stride():
            return source
        return self.emit(aten.copy.default, (target, source), {})

    def _inverse(self, view: View, outer: Node, part: Node) -> Node:
        """The value of ``outer`` after ``part`` was written to ``view(outer)``."""
        op, args, kwargs = view.op, view.args, view.kwargs
        if scatter := _SCATTERS.get(op):
            return self.emit(scatter, (outer, part, *args), kwargs)
        if op in (aten.t.default, aten.transpose.int):
            return self.emit(op, (part, *args), {})
        if op is aten.permute.default:
            order = [d % len(args[0]) for d in args[0]]
            return self.emit(op, (part, inverse(order)), {})
        if op in _RESHAPES:
            shape = list(outer.meta["val"].shape)
            try:
                return self.emit(aten.view.default, (part, shape), {})
            except RuntimeError:
                dense = self.emit(aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
                return self.emit(aten.view.default, (dense, shape), {})
        raise CaptureError(
            f"a write at {self.source} through a view made by {op} is not supported; it runs in eager mode"
        )

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def part(self, whole: Node, position: int, value: Tensor | None = None) -> Node:
        return self.emit(
            operator.getitem, (whole, position), {}, whole.meta["val"][position] if value is None else value
        )

    def nodes(self, arguments: Any) -> Any:
        """``arguments`` with the node of its present value in place of each tensor."""
        steps = self.steps
        found = self._nodes(arguments)
        return found if self.steps is steps else self._nodes(arguments)  # steps were put back, and nodes with them

    def _nodes(self, arguments: Any) -> Any:
        if isinstance(arguments, Tensor):
            return self.value(arguments)
        if type(arguments) in (tuple, list):
            return type(arguments)([self._nodes(a) for a in arguments])
        if isinstance(arguments, dict):
            return {name: self._nodes(a) for name, a in arguments.items()}
        return arguments


_SHARED = -1
_SCATTERS: dict[OpOverload, OpOverload] = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten._reshape_alias.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)


def _fakes(arguments: Any) -> Any:
    """``arguments`` with its fake value in place of each node."""
    if isinstance(arguments, Node):
        return arguments.meta["val"]
    if isinstance(arguments, (tuple, list)):
        return type(arguments)([_fakes(a) for a in arguments])
    if isinstance(arguments, dict):
        return {name: _fakes(a) for name, a in arguments.items()}
    return arguments
