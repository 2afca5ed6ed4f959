"""Attributes that ``forward`` assigns, around a compiled call: read before it, assigned after it.

    leaves of the call              (x,)                     structure of the call
        + values of what is read    (x, h)                   and of these              ->   guard, program
    (result, (new h, steps + 1))    ->   model.h = new h; model.steps += 1             ->   result

What the call only assigns is not looked at before it, so that it may be anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.graph.mutated_attributes import current
from fuse.graph.result_structure import flatten_result
from fuse.graph.signature import Advance, Attribute, MutatedAttribute

Place = tuple[nn.Module, str]


@dataclass(frozen=True)
class Carried:
    """The attributes that one variant reads and assigns; ``call`` tells the calls that it may serve from others.
    Attributes are ``assigned``, or the dictionaries that they are get other entries."""

    places: tuple[Place, ...]
    read: tuple[Place, ...]
    counted: tuple[Place, ...]
    assigned: tuple[tuple[Place, bool], ...]
    call: Hashable

    def extend(self, leaves: Sequence[Any], spec: Any) -> tuple[Sequence[Any], Any]:
        """The leaves of a call with those of the attributes that are read, and the structure of both."""
        more, structure = flatten_result(tuple(current(*place) for place in self.read))
        counts = all(type(current(*place)) is int for place in self.counted)
        return (*leaves, *more), (spec, structure, counts)

    def assign(self, result: tuple[Any, Sequence[Any]]) -> Any:
        """Make the assignments of a call; returns its result proper."""
        own, values = result
        if self.counted:
            values = pytree.tree_map_only(Advance, self._advanced, values)
        for ((module, name), entries), value in zip(self.assigned, values, strict=True):
            if entries:
                held = current(module, name)
                held.clear()
                held.update(value)
            else:
                setattr(module, name, value)
        return own

    def _advanced(self, count: Advance) -> Any:
        return current(*self.places[count.which]) + count.delta


def carried(model: nn.Module, kept: Sequence[MutatedAttribute], leaves: Sequence[Any], spec: Any) -> Carried | None:
    """What a variant for calls like this one carries from call to call; None for nothing."""
    if not kept:
        return None
    places = [(model.get_submodule(one.attribute.owner), one.attribute.name) for one in kept]
    return Carried(
        tuple(places),
        tuple(place for place, one in zip(places, kept, strict=True) if one.read),
        tuple(place for place, one in zip(places, kept, strict=True) if one.counted),
        tuple((place, one.attribute.entries) for place, one in zip(places, kept, strict=True) if one.assigned),
        kind_of_call(leaves, spec),
    )


def kind_of_call(leaves: Sequence[Any], spec: Any) -> Hashable:
    """Equal for calls that differ in the contents of tensors only.

    >>> import torch
    >>> kind_of_call((torch.ones(2), 3), None) == kind_of_call((torch.zeros(2), 3), None)
    True
    """
    return tuple((leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves), repr(spec)


def tensors_of(model: nn.Module, attributes: Sequence[Attribute]) -> list[Tensor]:
    """The tensors that attributes hold."""
    values = [current(model.get_submodule(attribute.owner), attribute.name) for attribute in attributes]
    return [leaf for leaf in flatten_result(values)[0] if isinstance(leaf, Tensor)]
