"""The variants of one model, by the state of the model for which they were made.

    states      state guard     variants, the most recent first
                state guard     variants ...

States are replaced and never changed in place, because another thread may be searching for a variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuse.runtime.guards.state_guard import StateGuard
from fuse.runtime.variants.compiled import Compiled

LARGEST_STATES = 8
"""Most states of one model that are kept, such as training and evaluation, with and without frozen layers. A search
asks the guard of each."""
LARGEST_VARIANTS = 64
"""Most variants of one state that are kept; the oldest is dropped. A search takes 3 microseconds for the newest, and
55 for the oldest of 64."""


@dataclass(frozen=True, eq=False)
class ModelState:
    """The variants made while the model was in one state."""

    guard: StateGuard
    variants: tuple[Compiled, ...] = ()


States = tuple[ModelState, ...]


def matching(
    states: States, leaves: Sequence[Any], spec: Any, current_modes: tuple[Any, ...], in_context: bool = True
) -> Iterator[tuple[Compiled, tuple[Any, ...]]]:
    """The variants whose guards accept a call, the most recent first, with the placeholders' tensors of each.

    Without ``in_context``, variants for other values of context variables are included.
    """
    for state in states:
        if state.guard.holds():
            for compiled in state.variants:
                given = compiled.carried.extend(leaves, spec) if compiled.carried else (leaves, spec)
                tensors = compiled.guard.match(*given, current_modes)
                if tensors is not None and (not in_context or compiled.guard.in_context()):
                    yield compiled, tensors


def current(states: States, compiled: Compiled) -> ModelState | None:
    """The current state of the model among ``states``, with the same unwatched attributes as ``compiled``; or None."""
    return next((s for s in states if s.guard.unwatched == compiled.unwatched and s.guard.holds()), None)


def is_full(state: ModelState) -> bool:
    """Whether one more variant replaces the oldest."""
    return len(state.variants) >= LARGEST_VARIANTS


def with_variant(states: States, state: ModelState, compiled: Compiled) -> States:
    """The states with one more variant, which is the most recent one of its state; this state becomes the first."""
    others = tuple(s for s in states if s is not state)
    variants = (compiled, *state.variants)[:LARGEST_VARIANTS]
    return (ModelState(state.guard, variants), *others)[:LARGEST_STATES]


def without(states: States, variants: Sequence[Compiled]) -> States:
    """The states without some variants."""
    return tuple(replace(s, variants=tuple(c for c in s.variants if c not in variants)) for s in states)


def exchanged(states: States, old: Compiled, new: Compiled) -> States:
    """The states with ``new`` in place of ``old``."""
    return tuple(replace(s, variants=tuple(new if c is old else c for c in s.variants)) for s in states)
