"""Record an operator that was recorded before on tensors laid out alike, without asking again what is known of it.

    h = tanh(x[0] + h @ w)     what fake tensors make of it, what eager has code for, which functional form it has
    h = tanh(x[1] + h @ w)     new fake tensors, and nodes that read what this step reads

A loop dispatches the same operators in every step. What is asked of an operator before it is recorded depends on the
layouts of its tensors and on its other arguments, which are the key under which the answers are remembered for one
capture. Remembered are operators of ATen that draw nothing and return new tensors or views of their first argument, or
write it. A ``select`` or ``slice`` reads another place in every step, and has nothing to ask. Whether a write reads
memory that it writes is asked each time, unless all operands lie in different memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from fuse import ops
from fuse.graph.aliases import Alias, View, storage_of
from fuse.graph.fakes import CONSTANTS, PARTS, FakeRunner, Recipe
from fuse.graph.functional import Functionalizer


@dataclass(frozen=True)
class _Known:
    """How an operator is recorded: its results as fake tensors, and the view that each is, where it is one."""

    container: type
    recipes: tuple[Recipe, ...]
    views: tuple[View, ...]


@dataclass(frozen=True)
class _KnownWrite:
    """How an operator that writes its first argument is recorded: its functional form; None for ``copy_``."""

    functional: OpOverload | None


class Repeats:
    """Operators that one capture has recorded, by their layouts."""

    def __init__(self, functional: Functionalizer, fakes: FakeRunner) -> None:
        self._functional = functional
        self._fakes = fakes
        self._known: dict[Hashable, _Known | _KnownWrite] = {}

    def again(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record ``op`` and return its result; ``NotImplemented`` where further checks are needed."""
        fakes, functional = self._fakes, self._functional
        if id(op) in PARTS and not kwargs:
            if type(args[0]) is FakeTensor and functional.known(args[0]):
                part = fakes.part(op, args)
                if part is not None:
                    self._view(View(op, args[1:], {}), args[0], functional.operands(args[:1])[0], part)
                    return part
            return NotImplemented
        key = fakes.key(op, args, kwargs)
        known = self._known.get(key) if key is not None else None
        if known is None:
            return NotImplemented
        try:
            node_args, node_kwargs = functional.operands(args), functional.nodes(kwargs) if kwargs else {}
        except KeyError:  # a tensor that the graph does not know yet
            return NotImplemented
        if isinstance(known, _KnownWrite):
            return self._write(known, args, node_args)
        if known.container is Tensor:
            recipe = known.recipes[0]
            result = fakes.make(recipe, args)
            if known.views:
                self._view(known.views[0], args[0], node_args[0], result)
            else:
                functional.own(result, functional.later(op, node_args, node_kwargs, result))
            return result
        made = [fakes.make(recipe, args) for recipe in known.recipes]
        if known.views:
            for view, part in zip(known.views, made, strict=True):
                self._view(view, args[0], node_args[0], part)
        else:
            functional.own_parts(made, functional.add(op, node_args, node_kwargs, tuple(made)))
        return known.container(made)

    def _write(self, known: _KnownWrite, args: tuple[Any, ...], node_args: tuple[Any, ...]) -> Any:
        functional, target = self._functional, args[0]
        storage = storage_of(target)
        if any(isinstance(a, Tensor) and storage_of(a) == storage for a in args[1:]):
            return NotImplemented
        functional.settle()
        if known.functional is None:
            functional.write(target, functional.copied(node_args[0], node_args[1]))
        else:
            functional.write_result(target, functional.add(known.functional, node_args, {}))
        return target

    def _view(self, view: View, origin: Tensor, value: Node, part: Tensor) -> None:
        functional = self._functional
        node = functional.later(view.op, (value, *view.args), view.kwargs, part)
        parent = functional.aliases[id(origin)]
        base = parent.base
        functional.aliases[id(part)] = Alias(part, base, (*parent.chain, view), node, base.version)

    def learn(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """``op`` was recorded with this result."""
        if id(op) in PARTS or ops.is_random(op) or not _is_plain((args, tuple(kwargs.values()))):
            return
        if ops.mutates(op):
            self._learn_write(op, args, kwargs, result)
            return
        key = self._fakes.key(op, args, kwargs)
        found = self._fakes.recipes(key) if key is not None else None
        if found is None or key in self._known:
            return
        container, recipes = found
        parts = [result] if container is Tensor else list(result)
        if any(recipe.look is None for recipe in recipes):
            return
        views: tuple[View, ...] = ()
        aliases = [self._functional.aliases.get(id(part)) for part in parts]
        if any(alias is None for alias in aliases):
            return
        if ops.is_view(op):
            parent = self._functional.aliases[id(args[0])]
            # One more view than the operand has: what is said from the base instead (as_strided) is asked each time.
            if any(len(alias.chain) != len(parent.chain) + 1 for alias in aliases if alias is not None):
                return
            views = tuple(alias.chain[-1] for alias in aliases if alias is not None)
            if any(op is not view.op and container is Tensor for view in views):
                return
        elif any(alias is not None and (alias.chain or alias.tensor is not alias.base.root) for alias in aliases):
            return
        self._known[key] = _Known(container, recipes, views)

    def _learn_write(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if kwargs or result is not args[0] or torch.Tag.inplace_view in op.tags:
            return
        if ops.mutated_arguments(op) != (op._schema.arguments[0].name,) or any(type(a) in (tuple, list) for a in args):
            return
        key = self._fakes.key(op, args, kwargs)
        if key is None:
            return
        if op is torch.ops.aten.copy_.default:
            self._known[key] = _KnownWrite(None)
        elif (form := ops.functional_form(op)) is not None and _takes_alike(op, form, len(args)):
            self._known[key] = _KnownWrite(form)


def _takes_alike(op: OpOverload, form: OpOverload, given: int) -> bool:
    """Whether ``form``, which returns one tensor, means the same as ``op`` by as many positional arguments."""
    if ops.is_random(form) or len(form._schema.returns) != 1:
        return False
    alike = [[(a.name, a.default_value) for a in one._schema.arguments[given:]] for one in (op, form)]
    names = [[a.name for a in one._schema.arguments[:given]] for one in (op, form)]
    return alike[0] == alike[1] and names[0] == names[1]


def _is_plain(value: Any) -> bool:
    """Whether an argument is made of fake tensors and of constants that say all of themselves."""
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in CONSTANTS or isinstance(value, FakeTensor)
