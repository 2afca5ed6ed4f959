"""Serve all lengths of a model from a few short captures, where the user declared that one length varies.

    call at length 1024  ->  a template of such calls?  -- yes -->  its program for 1024
                                     | no
                                     v
                     capture at 11, 18 and 37, and compare  ->  template

What does not correspond is refused with a reason, and such calls are captured at their own length, as without the
declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fuse.errors import FuseError
from fuse.graph.signature import Signature
from fuse.runtime.guards import StateGuard, modes, same_value
from fuse.runtime.laws import NoLaw
from fuse.runtime.lengths import NotOneLength, Varying, check_names, varying
from fuse.runtime.program import Program
from fuse.runtime.template import OtherConstants, Template, template_of

LARGEST_TEMPLATES = 16

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
GraphOf = Callable[[Arguments, Sequence[str]], GraphModule]
"""The graph of a call with these arguments, captured and rewritten but for the passes that are named."""


class Refused(Exception):
    """A call has to be captured at its own length; the message is a reason."""


@dataclass(frozen=True)
class _Served:
    """What was made of one kind of calls; a template, or why there is none."""

    state: StateGuard
    calls: LengthGuard
    template: Template | str


class DeclaredLengths:
    """The templates of one model. Not to be called by several threads at once."""

    def __init__(self, model: nn.Module, declared: Any, graph_of: GraphOf, watch_tensors: bool) -> None:
        check_names(model, declared)
        self.declared = declared
        self._model = model
        self._graph_of = graph_of
        self._watch_tensors = watch_tensors
        self._served: tuple[_Served, ...] = ()

    def forget(self) -> None:
        self._served = ()

    def program(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any]
    ) -> tuple[Program, Signature] | None:
        """The program of a call and what it promises; None for a call that is short enough to be captured.

        Raises:
            Refused: there is no template for such calls.
            FuseError: the declaration does not fit the arguments, or the kernels cannot be built.
        """
        structure = pytree.tree_structure((args, dict(kwargs)))
        found = self._find(leaves, structure)
        if found is None:
            found = self._make(args, kwargs, leaves, structure)
        if found is None:
            return None
        served, length = found
        if isinstance(served.template, str):
            raise Refused(served.template)
        if length < served.template.least:
            return None
        try:
            return served.template.at(length)
        except NoLaw as why:
            raise Refused(str(why)) from None

    def _find(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> tuple[_Served, int] | None:
        for served in self._served:
            if served.state.holds() and (length := served.calls.length(leaves, structure)) is not None:
                return served, length
        return None

    def _make(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any], structure: pytree.TreeSpec
    ) -> tuple[_Served, int] | None:
        held = [*self._model.parameters(), *self._model.buffers()]
        try:
            call = varying(self._model, self.declared, args, kwargs, leaves)
        except NotOneLength as why:
            raise Refused(str(why)) from None
        taken = {size for tensor in (*leaves, *held) if isinstance(tensor, Tensor) for size in tensor.shape}
        if (lengths := call.short(taken - {call.length})) is None:
            return None
        guard = LengthGuard.of(call, leaves, structure, held)
        served = _Served(
            StateGuard(self._model, self._watch_tensors), guard, self._template(call, lengths, leaves, structure)
        )
        self._served = (served, *self._served)[:LARGEST_TEMPLATES]
        return served, call.length

    def _template(
        self, call: Varying, lengths: Sequence[int], leaves: Sequence[Any], structure: pytree.TreeSpec
    ) -> Template | str:
        """The template of such calls, or why there is none. What is folded to a constant must not have the length: if
        it does, nothing is folded."""
        for left_out in ((), ("constant_folding",)):
            try:
                arguments = [call.arguments(leaves, structure, length) for length in lengths]
                return template_of(lengths, [self._graph_of(one, left_out) for one in arguments])
            except OtherConstants as why:
                reason = str(why)
            except (NoLaw, FuseError) as why:
                return str(why)
        return reason


@dataclass(frozen=True)
class LengthGuard:
    """Which calls are of one kind, at whatever length.

    ``plain`` are the leaves that are no tensors, ``kinds`` what tensors are but for their layout, ``layouts`` tensors
    without data in the layouts of the example; ``held`` are the model's tensors.
    """

    call: Varying
    structure: pytree.TreeSpec
    modes: tuple[Any, ...]
    plain: tuple[Any, ...]
    kinds: tuple[Any, ...]
    layouts: tuple[Tensor | None, ...]
    held: tuple[Tensor, ...]

    @staticmethod
    def of(call: Varying, leaves: Sequence[Any], structure: pytree.TreeSpec, held: Sequence[Tensor]) -> LengthGuard:
        """The guard of calls like this one."""
        if _share_memory(leaves, held):
            raise Refused("two inputs share memory")
        layouts = tuple(
            torch.empty_strided(leaf.shape, leaf.stride(), device="meta") if isinstance(leaf, Tensor) else None
            for leaf in leaves
        )
        return LengthGuard(call, structure, modes(), _plain(leaves), _kinds(leaves), layouts, tuple(held))

    def length(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> int | None:
        """The length of a call, or None for a call of another kind."""
        if structure != self.structure or modes() != self.modes or _kinds(leaves) != self.kinds:
            return None
        if not all(map(same_value, _plain(leaves), self.plain)) or _share_memory(leaves, self.held):
            return None
        leaf, extents = next(iter(self.call.extents.items()))
        dim, extent = next(iter(extents.items()))
        length = extent.length_of(leaves[leaf].shape[dim])
        if length is None:
            return None
        for number, (given, known) in enumerate(zip(leaves, self.layouts, strict=True)):
            if known is not None and (tuple(given.shape), given.stride()) != self.call.layout(number, known, length):
                return None
        return length


def _plain(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)


def _kinds(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What can be told of tensors but for their layouts: rank, type, and which of them are the same object."""
    first = {id(leaf): number for number, leaf in reversed(list(enumerate(leaves)))}
    return tuple(
        (first[id(t)], t.dim(), type(t), t.dtype, t.device, t.requires_grad, torch._C._dispatch_keys(t))
        if isinstance(t, Tensor)
        else None
        for t in leaves
    )


def _share_memory(leaves: Sequence[Any], held: Sequence[Tensor]) -> bool:
    """Whether two inputs share a storage, or one with the model; the same tensor given twice is one input."""
    inputs = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    storages = {tensor.untyped_storage()._cdata for tensor in inputs.values()}
    return len(storages) < len(inputs) or any(tensor.untyped_storage()._cdata in storages for tensor in held)
