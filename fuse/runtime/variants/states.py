"""The variants of one model, by the state of the model for which they were made.

    states      state guard     variants, the most recent first
                state guard     variants ...

A search asks only the variants for the sizes of a call, however many there are. States are replaced and never changed
in place, because another thread may be searching for a variant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fuse.runtime.guards.state_guard import StateGuard
from fuse.runtime.variants.compiled import Compiled

LARGEST_STATES = 8
"""Most states of one model that are kept, such as training and evaluation, with and without frozen layers. A search
asks the guard of each."""
LARGEST_VARIANTS = 64
"""Most variants of one state that are kept, programs without a graph apart; the oldest is dropped."""
LARGEST_SIZED = 512
"""Most variants of one state that are programs without a graph, for sizes between captured ones: each takes 20 to 40
KiB, and the time of a few calls to make again."""

Index = Mapping[tuple[int, ...], Mapping[tuple[torch.Size | None, ...], tuple[Compiled, ...]]]
"""Variants by the positions of the tensors that they are given, and by the sizes of these; the most recent first."""


@dataclass(frozen=True, eq=False)
class ModelState:
    """The variants made while the model was in one state."""

    guard: StateGuard
    variants: tuple[Compiled, ...] = ()
    index: Index = field(default_factory=dict)

    def for_sizes(self, leaves: Sequence[Any]) -> tuple[Compiled, ...]:
        """The variants whose guards may accept a call, the most recent first."""
        found: list[tuple[Compiled, ...]] = []
        for positions, by_sizes in self.index.items():
            sizes = _sizes(leaves, positions)
            if sizes is None:
                return self.variants
            if sizes in by_sizes:
                found.append(by_sizes[sizes])
        if len(found) < 2:
            return found[0] if found else ()
        candidates = {compiled for variants in found for compiled in variants}
        return tuple(compiled for compiled in self.variants if compiled in candidates)


States = tuple[ModelState, ...]


def matching(
    states: States, leaves: Sequence[Any], spec: Any, current_modes: tuple[Any, ...], in_context: bool = True
) -> Iterator[tuple[Compiled, tuple[Any, ...]]]:
    """The variants whose guards accept a call, the most recent first, with the placeholders' tensors of each.

    Without ``in_context``, variants for other values of context variables are included.
    """
    for state in states:
        if state.guard.holds():
            for compiled in state.for_sizes(leaves):
                given = compiled.carried.extend(leaves, spec) if compiled.carried else (leaves, spec)
                tensors = compiled.guard.match(*given, current_modes)
                if tensors is not None and (not in_context or compiled.guard.in_context()):
                    yield compiled, tensors


def current(states: States, compiled: Compiled) -> ModelState | None:
    """The current state of the model among ``states``, with the same unwatched attributes as ``compiled``; or None."""
    return next((s for s in states if s.guard.unwatched == compiled.unwatched and s.guard.holds()), None)


def count(state: ModelState) -> int:
    """The number of variants, programs without a graph apart."""
    return sum(not compiled.is_sized() for compiled in state.variants)


def is_full(state: ModelState) -> bool:
    """Whether one more variant replaces the oldest one, programs without a graph apart."""
    return count(state) >= LARGEST_VARIANTS


def with_variant(states: States, state: ModelState, compiled: Compiled) -> States:
    """The states with one more variant, which is the most recent one of its state; this state becomes the first."""
    others = tuple(s for s in states if s is not state)
    is_sized = compiled.is_sized()
    alike = [one for one in state.variants if one.is_sized() is is_sized]
    dropped = alike[(LARGEST_SIZED if is_sized else LARGEST_VARIANTS) - 1 :]
    kept = tuple(one for one in state.variants if one not in dropped) if dropped else state.variants
    index = _with(_without(state.index, dropped), compiled)
    return (ModelState(state.guard, (compiled, *kept), index), *others)[:LARGEST_STATES]


def without(states: States, variants: Sequence[Compiled]) -> States:
    """The states without some variants."""
    return tuple(_state(s.guard, (c for c in s.variants if c not in variants)) for s in states)


def exchanged(states: States, old: Compiled, new: Compiled) -> States:
    """The states with ``new`` in place of ``old``."""
    return tuple(_state(s.guard, (new if c is old else c for c in s.variants)) for s in states)


def _state(guard: StateGuard, variants: Iterable[Compiled]) -> ModelState:
    kept = tuple(variants)
    index: Index = {}
    for compiled in reversed(kept):
        index = _with(index, compiled)
    return ModelState(guard, kept, index)


def _with(index: Index, compiled: Compiled) -> Index:
    positions, sizes = _key(compiled)
    by_sizes = index.get(positions, {})
    return {**index, positions: {**by_sizes, sizes: (compiled, *by_sizes.get(sizes, ()))}}


def _without(index: Index, variants: Sequence[Compiled]) -> Index:
    for compiled in variants:
        positions, sizes = _key(compiled)
        left = tuple(c for c in index[positions][sizes] if c is not compiled)
        by_sizes = {**index[positions], sizes: left}
        index = {**index, positions: by_sizes if left else {s: of for s, of in by_sizes.items() if s != sizes}}
    return {positions: by_sizes for positions, by_sizes in index.items() if by_sizes}


def _key(compiled: Compiled) -> tuple[tuple[int, ...], tuple[torch.Size | None, ...]]:
    """The positions and sizes by which a variant is found; none if it is given more than the leaves of a call."""
    sizes = () if compiled.carried else compiled.guard.sizes
    return tuple(position for position, _ in sizes), tuple(size for _, size in sizes)


def _sizes(leaves: Sequence[Any], positions: Sequence[int]) -> tuple[torch.Size | None, ...] | None:
    """The sizes of the leaves at some positions; None if a leaf is of a class that may tell other sizes."""
    found: list[torch.Size | None] = []
    for position in positions:
        leaf = leaves[position] if position < len(leaves) else None
        if type(leaf) is Tensor or type(leaf) is nn.Parameter:
            found.append(leaf.shape)
        elif isinstance(leaf, Tensor):
            return None
        else:
            found.append(None)
    return tuple(found)
