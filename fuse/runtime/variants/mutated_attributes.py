"""Attributes and data that ``forward`` assigns, and containers that it changes: read before a compiled call, written
after it.

    leaves of the call              (x,)                     structure of the call
        + attributes that it reads  (x, h)                   and of these              ->   guard, program
    (result, (new h, steps + 1), ([new k],), (new w,))
        ->   model.h = new h; model.steps += 1; past[:] = [new k]; w.data = new w     ->   result

Attributes that the call assigns without reading them are not guarded. Containers are arguments, which are guarded.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.devices import HOST
from fuse.graph.recording.mutated_attributes import current
from fuse.graph.signature import Advance, Attribute, ChangedContainers, Signature
from fuse.graph.structure.arguments import containers_of, entries_of
from fuse.graph.structure.given_containers import fill
from fuse.graph.structure.result_structure import flatten_result
from fuse.runtime.guards.call_keys import key_of_call

Slot = tuple[nn.Module, str]


@dataclass(frozen=True)
class Carried:
    """The attributes that one variant reads and assigns, and the containers among its arguments that it changes.

    Attributes:
        slots: all of them, as (module, name).
        read: those that are read; True if they are numbers, which the program reads as tensors.
        counted: integers to which calls add a constant.
        assigned: those that are assigned; True if they are dictionaries or lists whose entries are replaced.
        call: a key of the calls that the variant may serve.
        containers: the containers that it changes or returns; None if there are none.
        reassigned: positions of the tensors that get other memory.
    """

    slots: tuple[Slot, ...]
    read: tuple[tuple[Slot, bool], ...]
    counted: tuple[Slot, ...]
    assigned: tuple[tuple[Slot, bool], ...]
    call: Hashable
    containers: ChangedContainers | None = None
    reassigned: tuple[int, ...] = ()

    def extend(self, leaves: Sequence[Any], spec: Any) -> tuple[Sequence[Any], Any]:
        """The leaves of a call and of the attributes that are read, and the structure of both."""
        if not self.slots:
            return leaves, spec
        more, structure = flatten_result(tuple(_given(current(*slot), number) for slot, number in self.read))
        counts = all(type(current(*slot)) is int for slot in self.counted)
        return (*leaves, *more), (spec, structure, counts)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any] | None:
        """The containers of a call; None if one of them occurs twice, or if the model holds it, too."""
        if self.containers is None:
            return ()
        given = containers_of(args, kwargs)
        if self.containers.changed:
            ids = {id(entries_of(one)) for one in given}
            if len(ids) < len(given) or not ids.isdisjoint(self.containers.held):
                return None
        return given

    def assign(
        self,
        result: tuple[Any, Sequence[Any], Sequence[Any], Sequence[Tensor]],
        given: Sequence[Any],
        tensors: Sequence[Tensor],
    ) -> Any:
        """Assign attributes and data of tensors after a call, and fill its containers; returns its own result."""
        own, values, contents, data = result
        for position, memory in zip(self.reassigned, data, strict=True):
            tensors[position].data = memory
        if self.containers is not None:
            for number, held in zip(self.containers.changed, contents, strict=True):
                fill(given[number], held)
        if self.counted:
            values = pytree.tree_map_only(Advance, self._advanced, values)
        for ((module, name), entries), value in zip(self.assigned, values, strict=True):
            held = current(module, name)
            if not entries:
                setattr(module, name, value)
            elif type(held) is list:
                held[:] = value
            else:
                held.clear()
                held.update(value)
        return own

    def _advanced(self, count: Advance) -> Any:
        return current(*self.slots[count.which]) + count.delta


def _given(value: Any, number: bool) -> Any:
    """The value of an attribute as a program reads it; a value that the program cannot read stays as it is."""
    if not number or not (type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)):
        return value
    return torch.tensor(value, dtype=torch.float64 if type(value) is float else torch.int64, device=HOST)


def carried(model: nn.Module, signature: Signature, leaves: Sequence[Any], spec: Any) -> Carried | None:
    """The attributes that a variant for calls like this one reads and assigns, and the containers that it changes; None
    if there are none."""
    kept = signature.mutated
    if not kept and signature.containers is None and not signature.reassigned:
        return None
    slots = [(model.get_submodule(one.attribute.owner), one.attribute.name) for one in kept]
    return Carried(
        tuple(slots),
        tuple((slot, one.number) for slot, one in zip(slots, kept, strict=True) if one.read),
        tuple(slot for slot, one in zip(slots, kept, strict=True) if one.counted),
        tuple((slot, one.attribute.entries) for slot, one in zip(slots, kept, strict=True) if one.assigned),
        key_of_call(leaves, spec),
        signature.containers,
        signature.reassigned,
    )


def tensors_of(model: nn.Module, attributes: Sequence[Attribute]) -> list[Tensor]:
    """The tensors in these attributes."""
    values = [current(model.get_submodule(attribute.owner), attribute.name) for attribute in attributes]
    return [leaf for leaf in flatten_result(values)[0] if isinstance(leaf, Tensor)]
