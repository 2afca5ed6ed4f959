"""Record an operator call like an earlier call with the same layouts, without checking it again.

    h = tanh(x[0] + h @ w)     checked: fake results, whether eager has code, the functional form
    h = tanh(x[1] + h @ w)     from the templates: new fake tensors; nodes are made later, when they are needed

A loop dispatches the same operators in every step. The checks before a call is recorded depend only on the layouts of
its tensors and on its other arguments. Under these as key, their results are stored as a *template*, for one capture.
The template that came next the last time is tried first, without making a key.

There are templates for ATen operators that draw no random numbers, and return new tensors, return views of their first
argument, or write it. ``select`` and ``slice`` read another part in every step, and need no check. A write is checked
for overlaps where operands share memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from fuse import ops
from fuse.graph.checks import overlap
from fuse.graph.fakes.fake_operators import CONSTANTS, PARTS, FakeRunner, Recipe, is_recording
from fuse.graph.functional.aliases import View, storage_of
from fuse.graph.functional.call_templates import CallTemplate, described, fits
from fuse.graph.functional.functional_forms import SAME_METADATA
from fuse.graph.functional.tensor_values import Functionalizer
from fuse.graph.signature import Dispatch

aten = torch.ops.aten

CONTEXT = 4
"""The number of latest templates that identify a position in a step."""

MOST_PENDING = 1024
"""The most calls without nodes: when their nodes are made, they are still in the processor's cache."""

_new_tuple: Any = tuple.__new__  # makes a Dispatch in half the time


@dataclass(slots=True, eq=False)
class _Position:
    """A position in the sequence of templates.

    ``context``: the latest templates, this one last. ``following``: the position that came next the last time.
    """

    template: Any  # a CallTemplate; None before the first
    context: tuple[CallTemplate, ...]
    following: _Position | None = None


class RepeatedCalls:
    """The templates of one capture."""

    def __init__(self, functional: Functionalizer, fakes: FakeRunner) -> None:
        self._functional = functional
        self._fakes = fakes
        self._known: dict[Hashable, CallTemplate] = {}
        self._apart: dict[tuple[Any, ...], bool] = {}  # of calls whose operands share memory: as :meth:`_may_write`
        self._positions: dict[tuple[CallTemplate, ...], _Position] = {}
        self._latest = _Position(None, ())
        self._metadata, self._make, self._pending = fakes.known_metadata, fakes.make, functional.pending

    def record(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], source: str) -> Any:
        """Record ``op`` of the user's line ``source`` by a template; ``NotImplemented`` if there is none that fits."""
        position = self._latest.following
        if (
            position is None
            or position.template.op is not op
            or not fits(position.template, args, kwargs, self._metadata)
        ):
            template = self._template_of(op, args, kwargs)
            if template is None:
                return NotImplemented
            position = self._position_after(template)
        template = position.template
        if template.functional is not None:
            if not self._may_write(template, args):
                return NotImplemented
            result = args[0]
        elif template.parts is not None:
            key = self._metadata[id(args[0])], *args[1:]
            part = template.parts.get(key) or self._part(template, key, args)
            if part is None:
                return NotImplemented
            result = self._make(part[0], args)
        elif template.container is Tensor:
            result = self._make(template.recipes[0], args)
        else:
            result = template.container([self._make(recipe, args) for recipe in template.recipes])
        self._latest = position
        call = _new_tuple(Dispatch, (op, args, kwargs, result, source))
        pending = self._pending
        pending.append((template, call))
        if len(pending) >= MOST_PENDING and self._functional.steps is None:
            self._functional.settle()
        return call

    def _part(self, template: CallTemplate, key: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Recipe, View] | None:
        """Recipe and view for the part that a ``select`` or ``slice`` reads; None if torch must compute it."""
        recipe = self._fakes.recipe_of_part(template.op, args)
        if recipe is None or template.parts is None:
            return None
        found = template.parts[key] = recipe, View(template.op, args[1:], {})
        return found

    def _template_of(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallTemplate | None:
        """The template for this call, or None."""
        if not self._is_known((args, tuple(kwargs.values()))):
            return None
        if id(op) not in PARTS or kwargs:
            key = self._fakes.key(op, args, kwargs)
            return None if key is None else self._known.get(key)
        metadata = None if is_recording() else self._fakes.metadata_of(args[0])
        if metadata is None:
            return None
        found = self._known.get((id(op), metadata.without_offset))
        if found is None:
            found = self._known[id(op), metadata.without_offset] = CallTemplate(
                op, (metadata.without_offset,), parts={}
            )
        return found

    def _is_known(self, value: Any) -> bool:
        """Whether the graph knows all tensors in an argument."""
        if isinstance(value, Tensor):
            return id(value) in self._metadata or self._functional.known(value)
        return type(value) not in (tuple, list) or all(map(self._is_known, value))

    def _position_after(self, template: CallTemplate) -> _Position:
        """The position after the latest one, with a template that was not expected."""
        context = (*self._latest.context[1 - CONTEXT :], template)
        position = self._positions.get(context)
        if position is None:
            position = self._positions[context] = _Position(template, context)
        self._latest.following = position
        return position

    def _may_write(self, template: CallTemplate, args: tuple[Any, ...]) -> bool:
        """Whether a write gives what its functional form does, although operands may share memory."""
        target = args[0]
        storage = storage_of(target)
        sharing = [one for one in args[1:] if isinstance(one, Tensor) and storage_of(one) == storage]
        if not sharing:
            return True
        key = template, *(self._metadata[id(one)] for one in (target, *sharing))
        if key not in self._apart:
            self._apart[key] = overlap.obstacle(template.op, [target], (target, *sharing), {}) is None
        return self._apart[key]

    def learn(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Store a template for a call that was recorded with this result."""
        if (steps := self._functional.steps) is not None:
            steps.before.append(None)
        if id(op) in PARTS or ops.is_random(op) or not _is_plain((args, tuple(kwargs.values()))):
            return
        if op is aten._efficientzerotensor.default:  # recorded as zeros
            return
        key = self._fakes.key(op, args, kwargs)
        if key is None:
            return
        template = self._known.get(key)
        if template is None:
            learned = self._learned_write if ops.mutates(op) else self._learned
            template = learned(key, op, args, kwargs, result)
            if template is None:
                return
            self._known[key] = template
            self._latest = self._position_after(template)
        if steps is not None:
            steps.before[-1] = template

    def _learned(
        self, key: Hashable, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> CallTemplate | None:
        """A template for an operator that writes nothing; None if there is none."""
        found = self._fakes.recipes(key)
        if found is None:
            return None
        container, recipes = found
        parts = [result] if container is Tensor else list(result)
        if any(recipe.metadata is None for recipe in recipes):
            return None
        views: tuple[View, ...] = ()
        aliases = [self._functional.aliases.get(id(part)) for part in parts]
        if any(alias is None for alias in aliases):
            return None
        same = op in SAME_METADATA
        if ops.is_view(op) and not same:
            parent = self._functional.aliases[id(args[0])]
            # Only one view more than the operand: a view counted from the base (as_strided) has no template.
            if any(len(alias.chain) != len(parent.chain) + 1 for alias in aliases if alias is not None):
                return None
            views = tuple(alias.chain[-1] for alias in aliases if alias is not None)
            if any(op is not view.op and container is Tensor for view in views):
                return None
        elif not same and any(
            alias is not None and (alias.chain or alias.tensor is not alias.base.root) for alias in aliases
        ):
            return None
        return CallTemplate(op, *self._described(op, args, kwargs), container, recipes, views, same=same)

    def _learned_write(
        self, key: Hashable, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> CallTemplate | None:
        """A template for an operator that writes its first argument and nothing else; None if there is none."""
        if kwargs or result is not args[0] or torch.Tag.inplace_view in op.tags:
            return None
        if ops.mutated_arguments(op) != (op._schema.arguments[0].name,) or any(type(a) in (tuple, list) for a in args):
            return None
        functional = ops.functional_form(op)
        if functional is None or not (op is aten.copy_.default or _takes_alike(op, functional, len(args))):
            return None
        return CallTemplate(op, *self._described(op, args, kwargs), functional=functional)

    def _described(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        known, ignore_offset = self._metadata, self._fakes.computes(op)
        return described(args, known, ignore_offset), described(tuple(kwargs.items()), known, ignore_offset)


def _takes_alike(op: OpOverload, functional: OpOverload, given: int) -> bool:
    """Whether ``functional`` returns one tensor, and has the same parameters and defaults as ``op``."""
    if ops.is_random(functional) or len(functional._schema.returns) != 1:
        return False
    alike = [[(a.name, a.default_value) for a in one._schema.arguments[given:]] for one in (op, functional)]
    names = [[a.name for a in one._schema.arguments[:given]] for one in (op, functional)]
    return alike[0] == alike[1] and names[0] == names[1]


def _is_plain(value: Any) -> bool:
    """Whether an argument consists of fake tensors and of :data:`~fuse.graph.fakes.fake_operators.CONSTANTS`."""
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in CONSTANTS or isinstance(value, FakeTensor)
