"""Record one operator in functional form.

    y.add_(1)                        y' = add(y, 1), written through y's chain of views
    a, b = x.split(2)        ->      a = slice(x, 0, 0, 2);  b = slice(x, 0, 2, 4)
    x.unsqueeze_(0)                  x' = unsqueeze(x, 0), one more view in x's chain

An operator without a functional form raises ``CaptureError``, and the call runs in eager mode.
"""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from fuse import ops
from fuse.errors import CaptureError
from fuse.graph.checks import overlap
from fuse.graph.functional.aliases import Alias, View, part_as_view, storage_of, tensors_in, written_arguments
from fuse.graph.functional.changed_objects import hold, reshape_in_place
from fuse.graph.functional.short_graphs import COLLECTORS
from fuse.graph.functional.tensor_values import Functionalizer
from fuse.graph.strides import inverse, is_dense, memory_order

aten = torch.ops.aten

_BATCH_NORMS = (aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
_OF_LAYOUTS = frozenset({aten.is_same_size.default, aten._has_same_storage_numel.default})
SAME_METADATA = frozenset({aten.alias.default, aten.detach.default})  # another tensor object, nothing else


def record(
    functional: Functionalizer, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
) -> Any:
    """Run one operator on fake tensors and add its functional form to the graph. Returns the result of ``run``."""
    functional.settle()
    if torch.Tag.inplace_view in op.tags:
        return reshape_in_place(functional, op, args, kwargs, run)
    if op in _BATCH_NORMS:
        return _batch_norm(functional, args, run)
    if keyword.iskeyword(op._overloadname):  # ``random.from``: torch.fx would print invalid Python
        raise CaptureError(f"{op} at {functional.source} cannot be written as Python; it runs in eager mode")
    if kwargs.get("generator") is not None:
        raise CaptureError(f"{op} at {functional.source} draws from a generator of its own; it runs in eager mode")
    if ops.mutates(op):
        return _write_in_place(functional, op, args, kwargs, run)
    result = run()
    target, node_args, node_kwargs = _operands(functional, op, args, kwargs)
    if isinstance(result, Tensor):
        made = aten.zeros.default if op is aten._efficientzerotensor.default else target  # it has no memory to read
        _add_result(functional, op, args, kwargs, result, lambda: functional.emit(made, node_args, node_kwargs, result))
    elif isinstance(result, (tuple, list)) and ops.is_view(op):
        for position, part in enumerate(result):
            _add_part_of_view(functional, op, args, kwargs, position, part)
    elif isinstance(result, (tuple, list)):
        functional.own_parts(result, functional.emit(op, node_args, node_kwargs, tuple(result)))
    elif result is None and ops.is_check(op):
        _check(functional, op, node_args, node_kwargs)
    elif result is None and op.namespace != "aten":
        raise CaptureError(
            f"{op} at {functional.source} returns nothing, so that its effects are unknown; it runs in eager mode"
        )
    elif result is not None and not (op in _OF_LAYOUTS and result is True):
        raise CaptureError(
            f"{op} at {functional.source} returns a {type(result).__name__} that depends on data; it runs in eager mode"
        )
    return result


def _operands(
    functional: Functionalizer, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], Any]:
    """Arguments as nodes, and what is called on these."""
    if op not in COLLECTORS:
        found, named = functional.nodes((args, kwargs))
        return op, found, named
    target, pieces = functional.pieces(op, args[0])
    return target, (pieces, *functional.nodes(args[1:])), functional.nodes(kwargs)


def _check(functional: Functionalizer, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Add a node for the error check of a ``linalg`` operator, unless the operator itself can raise."""
    checked = args[0].args[0] if args[0].target is operator.getitem else args[0]
    if op is aten._linalg_check_errors.default and _can_raise(checked):
        checked.update_kwarg("check_errors", True)
    else:
        functional.emit(op, args, kwargs)


def _add_result(
    functional: Functionalizer,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Tensor,
    emit: Callable[[], Node],
) -> None:
    if functional.known(result):  # an operator that returned its argument unchanged
        return
    origin = next((a for a in args if isinstance(a, Tensor) and storage_of(a) == storage_of(result)), None)
    if origin is None or not ops.is_view(op):
        functional.own(result, emit())
        return
    parent = functional.aliases[id(origin)]
    if op in SAME_METADATA:
        functional.add_view(parent, (), result, functional.value(origin))
        return
    if op is aten.as_strided.default:
        _add_strided(functional, parent, args, kwargs, result)
        return
    functional.add_view(parent, (View(op, functional.nodes(args[1:]), functional.nodes(kwargs)),), result, emit())


def _add_strided(
    functional: Functionalizer, parent: Alias, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor
) -> None:
    """Register a result of ``as_strided`` as a view of the root; its offset counts from the storage's start."""
    base, root = parent.base, parent.base.root
    names_offset = len(args) > 3 or kwargs.get("storage_offset") is not None
    views = None if names_offset and base.input_index is not None else overlap.strided_views(root, result)
    if views is None:
        raise CaptureError(
            f"as_strided at {functional.source} may read outside of the tensor, or depends on its storage offset; "
            "it runs in eager mode"
        )
    chain = tuple(View(op, arguments, {}) for op, arguments in views)
    node = base.node
    for view in chain:
        node = functional.emit(view.op, (node, *view.args), {}, result if view is chain[-1] else None)
    functional.aliases[id(result)] = Alias(result, base, chain, node, base.version, node)


def _add_part_of_view(
    functional: Functionalizer,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    position: int,
    part: Tensor,
) -> None:
    """Register one result of ``split`` or ``unbind`` as a ``slice`` or ``select``, which every pass understands."""
    parent = functional.aliases[id(args[0])]
    node = functional.value(args[0])
    view = part_as_view(op, args, kwargs, position, part)
    if view is None:
        raise CaptureError(
            f"{op} at {functional.source} returns several views of a kind that is not supported; it runs in eager mode"
        )
    functional.add_view(parent, (view,), part, functional.emit(view.op, (node, *view.args), view.kwargs, part))


def _write_in_place(
    functional: Functionalizer, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
) -> Any:
    written = written_arguments(op, args, kwargs)
    if reason := overlap.obstacle(op, written, args, kwargs):
        raise CaptureError(f"{op} at {functional.source} {reason}; it runs in eager mode")
    if op is aten.copy_.default:
        node = functional.copied(functional.value(args[0]), functional.value(args[1]))
        result = run()
        functional.write(args[0], node)
        return result
    form = ops.functional_form(op)
    if form is None or not written:
        raise CaptureError(
            f"{op} at {functional.source} writes in place and has no functional form; it runs in eager mode"
        )
    if grows := len(written) == 1 and not written[0].numel() and op._schema.arguments[-1].is_out:
        functional.whole()
    shapes = [tensor.shape for tensor in written]
    node_args, node_kwargs = _functional_arguments(functional, op, form, args, kwargs)
    if ops.is_random(form) and not all(map(is_dense, written)):  # numbers are drawn in the order of memory
        raise CaptureError(f"{op} at {functional.source} writes into a view with gaps; it runs in eager mode")
    if form is aten.bernoulli.p:
        node = _bernoulli(functional, *node_args, **node_kwargs)
    else:
        node = functional.emit(form, node_args, node_kwargs)
    if grows and _is_alone(functional, written[0]):
        return _fill_empty(functional, written[0], node, run)
    result = run()
    if shapes != [tensor.shape for tensor in written]:
        raise CaptureError(f"{op} at {functional.source} resizes its out= tensor; it runs in eager mode")
    if isinstance(node.meta["val"], Tensor):
        functional.write_result(written[0], node)
        return result
    parts = [functional.part(node, position) for position in range(len(node.meta["val"]))]
    of_its_own = [t for t in tensors_in(result) if not any(t is w for w in written)]
    for tensor, part in zip((*of_its_own, *written), parts, strict=True):
        if functional.known(tensor):
            functional.write_result(tensor, part)
        else:
            functional.own(tensor, part)
    return result


def _is_alone(functional: Functionalizer, tensor: Tensor) -> bool:
    """Whether the call made ``tensor``, and no other shares its memory but the one that torch's factories hide."""
    base = functional.aliases[id(tensor)].base
    sharing = [alias.tensor for alias in functional.aliases.values() if alias.base is base]
    return base.input_index is None and all(one is tensor or one is base.root for one in sharing)


def _fill_empty(functional: Functionalizer, tensor: Tensor, node: Node, run: Callable[[], Any]) -> Any:
    """Record an operator that resizes its empty ``out=`` tensor: a new tensor, whose value is ``node``."""
    hold(functional, tensor)
    result = run()
    if node.meta["val"].dtype != tensor.dtype:
        node = functional.emit(aten._to_copy.default, (node,), {"dtype": tensor.dtype})
    if node.meta["val"].stride() != tensor.stride():
        raise CaptureError(f"an out= tensor at {functional.source} is resized to other strides; it runs in eager mode")
    functional.own(tensor, node)
    return result


def _bernoulli(functional: Functionalizer, target: Node, p: float) -> Node:
    """``bernoulli_`` in functional form: it draws in memory order, ``bernoulli`` in the order of dimensions."""
    order = memory_order(target.meta["val"])
    if order == sorted(order):
        return functional.emit(aten.bernoulli.p, (target, p), {})
    drawn = functional.emit(aten.bernoulli.p, (functional.emit(aten.permute.default, (target, order), {}), p), {})
    return functional.emit(aten.permute.default, (drawn, inverse(order)), {})


def _batch_norm(functional: Functionalizer, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
    """Record a batch norm in training, which writes its running statistics although one schema does not say so."""
    values, weight, bias, mean, variance, training, momentum, epsilon = args
    statistics = () if mean is None or variance is None else (mean, variance)
    if not training:
        form, arguments = aten._native_batch_norm_legit_no_training.default, (*args[:5], momentum, epsilon)
    elif statistics:
        form, arguments = aten._native_batch_norm_legit_functional.default, args
    else:
        form = aten._native_batch_norm_legit.no_stats
        arguments = (values, weight, bias, training, momentum, epsilon)
    node = functional.emit(form, functional.nodes(arguments), {})
    result = run()
    for position, part in enumerate(result):
        functional.own(part, functional.part(node, position))
    for position, tensor in enumerate(statistics, start=len(result)):
        if training:
            functional.write(tensor, functional.part(node, position))
    return result


def _functional_arguments(
    functional: Functionalizer, op: OpOverload, form: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the functional form: all except ``out=`` tensors, which tell a factory what to make."""
    accepted = {a.name: a for a in form._schema.arguments}
    values = dict(kwargs)
    if "out" in kwargs and ops.is_factory(form):
        values.update(dtype=kwargs["out"].dtype, device=kwargs["out"].device)
    for argument in op._schema.arguments[len(args) :]:
        parameter = accepted.get(argument.name)
        if parameter is not None and argument.has_default_value() and not parameter.has_default_value():
            values.setdefault(argument.name, argument.default_value)  # as in ``bernoulli_`` and ``bernoulli.p``
    return functional.nodes(args), {name: functional.nodes(value) for name, value in values.items() if name in accepted}


def _can_raise(node: Node) -> bool:
    """Whether the node's ``linalg`` operator has an argument that makes it check for errors."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(argument.name == "check_errors" for argument in schema.arguments)
