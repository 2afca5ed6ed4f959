"""Turn operators into functional form, one at a time as they are recorded.

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
import keyword
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fuse import ops
from fuse.errors import CaptureError
from fuse.graph import overlap
from fuse.graph.aliases import (
    Alias,
    Base,
    View,
    part_as_view,
    storage_of,
    tensors_in,
    written_arguments,
)
from fuse.graph.appending import Appender
from fuse.graph.call_templates import CallTemplate
from fuse.graph.fakes import FakeRunner
from fuse.graph.left_out import Steps, replaced
from fuse.graph.seeding import Draws
from fuse.graph.short_graphs import COLLECTORS, Slot
from fuse.graph.signature import Dispatch
from fuse.graph.strides import inverse, is_dense, memory_order

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
                    target, args[i] = self._pieces(op, given[i])
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

    def _pieces(self, op: Any, pieces: Any) -> tuple[Any, Any]:
        """A list of tensors as nodes, and what ``op`` is called on these: some may be of steps that are left out."""
        steps = self.steps
        if steps is not None and op in COLLECTORS:
            found = steps.pieces(pieces)
            if found is not None and self.steps is steps:  # they were not put back meanwhile
                return COLLECTORS[op], found
        return op, self.nodes(pieces)

    # ---- recording ---------------------------------------------------------------------------------------------------

    def record(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Run one operator on fake tensors and add its functional form to the graph. Returns the result of ``run``."""
        self.settle()
        if torch.Tag.inplace_view in op.tags:
            return self._reshape_in_place(op, args, kwargs, run)
        if op in _BATCH_NORMS:
            return self._batch_norm(args, run)
        if keyword.iskeyword(op._overloadname):  # ``random.from``: torch.fx would print invalid Python
            raise CaptureError(f"{op} at {self.source} cannot be written as Python; it runs in eager mode")
        if kwargs.get("generator") is not None:
            raise CaptureError(f"{op} at {self.source} draws from a generator of its own; it runs in eager mode")
        if ops.mutates(op):
            return self._write_in_place(op, args, kwargs, run)
        result = run()
        target, node_args, node_kwargs = self._operands(op, args, kwargs)
        if isinstance(result, Tensor):
            made = aten.zeros.default if op is aten._efficientzerotensor.default else target  # it has no memory to read
            self._add_result(op, args, kwargs, result, lambda: self.emit(made, node_args, node_kwargs, result))
        elif isinstance(result, (tuple, list)) and ops.is_view(op):
            for position, part in enumerate(result):
                self._add_part_of_view(op, args, kwargs, position, part)
        elif isinstance(result, (tuple, list)):
            self.own_parts(result, self.emit(op, node_args, node_kwargs, tuple(result)))
        elif result is None and ops.is_check(op):
            self._check(op, node_args, node_kwargs)
        elif result is None and op.namespace != "aten":
            raise CaptureError(
                f"{op} at {self.source} returns nothing, so that its effects are unknown; it runs in eager mode"
            )
        elif result is not None and not (op in _OF_LAYOUTS and result is True):
            raise CaptureError(
                f"{op} at {self.source} returns a {type(result).__name__} that depends on data; it runs in eager mode"
            )
        return result

    def _operands(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, tuple[Any, ...], Any]:
        """Arguments as nodes, and what is called on these."""
        if op not in COLLECTORS:
            found, named = self.nodes((args, kwargs))
            return op, found, named
        target, pieces = self._pieces(op, args[0])
        return target, (pieces, *self.nodes(args[1:])), self.nodes(kwargs)

    def _check(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add a node for the error check of a ``linalg`` operator, unless the operator itself can raise."""
        checked = args[0].args[0] if args[0].target is operator.getitem else args[0]
        if op is aten._linalg_check_errors.default and _can_raise(checked):
            checked.update_kwarg("check_errors", True)
        else:
            self.emit(op, args, kwargs)

    def _add_result(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor, emit: Callable[[], Node]
    ) -> None:
        if self.known(result):  # an operator that returned its argument unchanged
            return
        origin = next((a for a in args if isinstance(a, Tensor) and storage_of(a) == storage_of(result)), None)
        if origin is None or not ops.is_view(op):
            self.own(result, emit())
            return
        parent = self.aliases[id(origin)]
        if op in SAME_METADATA:
            self._add_view(parent, (), result, self.value(origin))
            return
        if op is aten.as_strided.default:
            self._add_strided(parent, args, kwargs, result)
            return
        self._add_view(parent, (View(op, self.nodes(args[1:]), self.nodes(kwargs)),), result, emit())

    def _add_view(self, parent: Alias, views: tuple[View, ...], result: Tensor, node: Node) -> None:
        """Register ``result``: it is ``views`` of ``parent``, and ``node`` has its value."""
        base = parent.base
        chain = (*parent.chain, *views)
        self.aliases[id(result)] = Alias(result, base, chain, node, base.version, node)

    def _add_strided(self, parent: Alias, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """Register a result of ``as_strided`` as a view of the root; its offset counts from the storage's start."""
        base, root = parent.base, parent.base.root
        names_offset = len(args) > 3 or kwargs.get("storage_offset") is not None
        views = None if names_offset and base.input_index is not None else overlap.strided_views(root, result)
        if views is None:
            raise CaptureError(
                f"as_strided at {self.source} may read outside of the tensor, or depends on its storage offset; "
                "it runs in eager mode"
            )
        chain = tuple(View(op, arguments, {}) for op, arguments in views)
        node = base.node
        for view in chain:
            node = self.emit(view.op, (node, *view.args), {}, result if view is chain[-1] else None)
        self.aliases[id(result)] = Alias(result, base, chain, node, base.version, node)

    def _add_part_of_view(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, part: Tensor
    ) -> None:
        """Register one result of ``split`` or ``unbind`` as a ``slice`` or ``select``, which every pass understands."""
        parent = self.aliases[id(args[0])]
        node = self.value(args[0])
        view = part_as_view(op, args, kwargs, position, part)
        if view is None:
            raise CaptureError(
                f"{op} at {self.source} returns several views of a kind that is not supported; it runs in eager mode"
            )
        self._add_view(parent, (view,), part, self.emit(view.op, (node, *view.args), view.kwargs, part))

    def own(self, tensor: Tensor, node: Node) -> None:
        """Register ``tensor``, whose value is ``node``, with a storage of its own."""
        base = Base(tensor, node)
        self.unlisted.append(base)
        self.aliases[id(tensor)] = Alias(tensor, base, (), node, 0, node)

    def own_parts(self, parts: Iterable[Any], whole: Node) -> None:
        """Register the tensors among ``parts``, the several results of ``whole``, each with a storage of its own."""
        for position, part in enumerate(parts):
            if isinstance(part, Tensor):
                self.own(part, self._part(whole, position, part))

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
        if overlap.overlaps_itself(base.root):
            raise CaptureError(
                f"a write at {self.source} to a part of a tensor whose elements share memory; it runs in eager mode"
            )
        before = base.node
        outers, outer = [], before  # the operand of each view in the chain
        for view in alias.chain:
            outers.append(outer)
            if view is not alias.chain[-1]:
                outer = self.emit(view.op, (outer, *view.args), view.kwargs)
        for view, outer in zip(reversed(alias.chain), reversed(outers), strict=True):
            node = self._inverse(view, outer, node)
        base.node = self._in_layout_of(before, node)
        base.version += 1
        if not alias.chain:
            alias.node, alias.version = base.node, base.version

    def _write_in_place(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        written = written_arguments(op, args, kwargs)
        if reason := overlap.obstacle(op, written, args, kwargs):
            raise CaptureError(f"{op} at {self.source} {reason}; it runs in eager mode")
        if op is aten.copy_.default:
            node = self.copied(self.value(args[0]), self.value(args[1]))
            result = run()
            self.write(args[0], node)
            return result
        functional = ops.functional_form(op)
        if functional is None or not written:
            raise CaptureError(
                f"{op} at {self.source} writes in place and has no functional form; it runs in eager mode"
            )
        if grows := len(written) == 1 and not written[0].numel() and op._schema.arguments[-1].is_out:
            self.whole()
        shapes = [tensor.shape for tensor in written]
        node_args, node_kwargs = self._functional_arguments(op, functional, args, kwargs)
        if ops.is_random(functional) and not all(map(is_dense, written)):  # numbers are drawn in the order of memory
            raise CaptureError(f"{op} at {self.source} writes into a view with gaps; it runs in eager mode")
        if functional is aten.bernoulli.p:
            node = self._bernoulli(*node_args, **node_kwargs)
        else:
            node = self.emit(functional, node_args, node_kwargs)
        if grows and self._is_alone(written[0]):
            return self._fill_empty(written[0], node, run)
        result = run()
        if shapes != [tensor.shape for tensor in written]:
            raise CaptureError(f"{op} at {self.source} resizes its out= tensor; it runs in eager mode")
        if isinstance(node.meta["val"], Tensor):
            self.write_result(written[0], node)
            return result
        parts = [self._part(node, position) for position in range(len(node.meta["val"]))]
        of_its_own = [t for t in tensors_in(result) if not any(t is w for w in written)]
        for tensor, part in zip((*of_its_own, *written), parts, strict=True):
            if self.known(tensor):
                self.write_result(tensor, part)
            else:
                self.own(tensor, part)
        return result

    def _is_alone(self, tensor: Tensor) -> bool:
        """Whether the call made ``tensor``, and no other shares its memory but the one that torch's factories hide."""
        base = self.aliases[id(tensor)].base
        sharing = [alias.tensor for alias in self.aliases.values() if alias.base is base]
        return base.input_index is None and all(one is tensor or one is base.root for one in sharing)

    def _fill_empty(self, tensor: Tensor, node: Node, run: Callable[[], Any]) -> Any:
        """Record an operator that resizes its empty ``out=`` tensor: a new tensor, whose value is ``node``."""
        self._hold(tensor)
        result = run()
        if node.meta["val"].dtype != tensor.dtype:
            node = self.emit(aten._to_copy.default, (node,), {"dtype": tensor.dtype})
        if node.meta["val"].stride() != tensor.stride():
            raise CaptureError(f"an out= tensor at {self.source} is resized to other strides; it runs in eager mode")
        self.own(tensor, node)
        return result

    def rebind(self, tensor: Tensor, other: Tensor, assign: Callable[[Tensor, Tensor], None]) -> None:
        """Let ``tensor`` be ``other`` from now on; ``assign(tensor, other)`` gives it the memory of ``other``."""
        self.whole()
        node = self.value(other)
        before, held = self.aliases[id(tensor)], self._hold(tensor)
        if id(tensor) not in self.former:
            self.former[id(tensor)] = held
            self.aliases[id(held)] = replace(before, tensor=held)
        assign(tensor, other)
        source = self.aliases[id(other)]
        self.aliases[id(tensor)] = Alias(tensor, source.base, source.chain, node, source.base.version, node)

    def read_later(self, tensor: Tensor, node: Node) -> None:
        """Let ``node`` be the value of ``tensor``, and of all that shares its memory, from now on."""
        self.settle()
        alias = self.aliases[id(tensor)]
        if id(tensor) in self.former:  # only this object, whose memory may be another by then
            alias = self.aliases[id(tensor)] = Alias(tensor, Base(tensor, node), (), node, 0, node)
        alias.base.node, alias.base.version = node, alias.base.version + 1
        alias.node, alias.version = node, alias.base.version

    def detached(self, tensor: Tensor) -> Tensor:
        """Another tensor object in the memory of ``tensor``, without its gradients."""
        node, alias = self.value(tensor), self.aliases[id(tensor)]
        made: Tensor = aten.detach.default(tensor)
        self.aliases[id(made)] = Alias(made, alias.base, alias.chain, node, alias.version, node)
        return made

    def _hold(self, tensor: Tensor) -> Tensor:
        """Let the nodes so far keep the metadata of ``tensor``, which is about to change; the tensor that has it."""
        alias = self.aliases[id(tensor)]
        held: Tensor = aten.alias.default(tensor)
        for holder in (self.value(tensor), alias.made, alias.node, alias.base.node):
            _exchange(holder, tensor, held)
            if holder.target is operator.getitem:
                _exchange(holder.all_input_nodes[0], tensor, held)
        if alias.base.root is tensor:
            alias.base.root = held
        self.fakes.forget(tensor)
        return held

    def _bernoulli(self, target: Node, p: float) -> Node:
        """``bernoulli_`` in functional form: it draws in memory order, ``bernoulli`` in the order of dimensions."""
        order = memory_order(target.meta["val"])
        if order == sorted(order):
            return self.emit(aten.bernoulli.p, (target, p), {})
        drawn = self.emit(aten.bernoulli.p, (self.emit(aten.permute.default, (target, order), {}), p), {})
        return self.emit(aten.permute.default, (drawn, inverse(order)), {})

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

    def _reshape_in_place(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Record ``unsqueeze_`` and similar operators, which change the shape of a tensor object: one more view in its
        chain."""
        self.whole()
        functional = ops.functional_form(op)
        if functional is None or not ops.is_view(functional):
            raise CaptureError(
                f"{op} at {self.source} changes the size or storage of a tensor in place; it runs in eager mode"
            )
        tensor = args[0]
        node = self.value(tensor)
        alias = self.aliases[id(tensor)]
        if is_input := id(tensor) in self.former or (
            alias.tensor is alias.base.root and alias.base.input_index is not None
        ):
            reshaped = any(one is tensor for one, _, _ in self.reshaped)
            if op not in _RESHAPING or kwargs or reshaped is not (id(tensor) in self.former):
                raise CaptureError(
                    f"{op} at {self.source} changes the shape of an argument in place; it runs in eager mode"
                )
            self.reshaped.append((tensor, op, args[1:]))
        view = View(functional, self.nodes(args[1:]), self.nodes(kwargs))
        held = self._hold(tensor)
        if is_input and id(tensor) not in self.former:
            self.former[id(tensor)] = held
            self.aliases[id(held)] = replace(alias, tensor=held)
        result = run()
        emitted = self.emit(functional, (node, *view.args), view.kwargs)
        self._add_view(alias, (view,), tensor, emitted)
        return result

    def _batch_norm(self, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Record a batch norm in training, which writes its running statistics although one schema does not say so."""
        values, weight, bias, mean, variance, training, momentum, epsilon = args
        statistics = () if mean is None or variance is None else (mean, variance)
        if not training:
            functional, arguments = aten._native_batch_norm_legit_no_training.default, (*args[:5], momentum, epsilon)
        elif statistics:
            functional, arguments = aten._native_batch_norm_legit_functional.default, args
        else:
            functional = aten._native_batch_norm_legit.no_stats
            arguments = (values, weight, bias, training, momentum, epsilon)
        node = self.emit(functional, self.nodes(arguments), {})
        result = run()
        for position, part in enumerate(result):
            self.own(part, self._part(node, position))
        for position, tensor in enumerate(statistics, start=len(result)):
            if training:
                self.write(tensor, self._part(node, position))
        return result

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _part(self, whole: Node, position: int, value: Tensor | None = None) -> Node:
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

    def _functional_arguments(
        self, op: OpOverload, functional: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the functional form: all except ``out=`` tensors, which tell a factory what to make."""
        accepted = {a.name: a for a in functional._schema.arguments}
        values = dict(kwargs)
        if "out" in kwargs and ops.is_factory(functional):
            values.update(dtype=kwargs["out"].dtype, device=kwargs["out"].device)
        for argument in op._schema.arguments[len(args) :]:
            parameter = accepted.get(argument.name)
            if parameter is not None and argument.has_default_value() and not parameter.has_default_value():
                values.setdefault(argument.name, argument.default_value)  # as in ``bernoulli_`` and ``bernoulli.p``
        return self.nodes(args), {name: self.nodes(value) for name, value in values.items() if name in accepted}


_SHARED = -1
_BATCH_NORMS = (aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
_SCATTERS: dict[OpOverload, OpOverload] = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}
_OF_LAYOUTS = frozenset({aten.is_same_size.default, aten._has_same_storage_numel.default})
SAME_METADATA = frozenset({aten.alias.default, aten.detach.default})  # another tensor object, nothing else
_RESHAPING = frozenset(
    {
        aten.unsqueeze_.default,
        aten.squeeze_.default,
        aten.squeeze_.dim,
        aten.squeeze_.dims,
        aten.t_.default,
        aten.transpose_.default,
    }
)
"""In-place operators whose effect on an input the runtime repeats."""
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


def _exchange(node: Node, tensor: Tensor, held: Tensor) -> None:
    """Replace ``tensor`` by ``held`` in the metadata of ``node``."""
    value = node.meta["val"]
    if value is tensor:
        node.meta["val"] = held
    elif isinstance(value, tuple):
        node.meta["val"] = tuple(held if part is tensor else part for part in value)


def _can_raise(node: Node) -> bool:
    """Whether the node's ``linalg`` operator has an argument that makes it check for errors."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(argument.name == "check_errors" for argument in schema.arguments)
