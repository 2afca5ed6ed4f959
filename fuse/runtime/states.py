"""The variants of one model, by the state that the model was in when they were made.

    states      state guard     variants, the most recent first
                state guard     variants ...

States are replaced, never changed in place: another thread may be looking for a variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuse.runtime.state_guard import StateGuard
from fuse.runtime.variants import Compiled

LARGEST_STATES = 8
LARGEST_VARIANTS = 64


@dataclass(frozen=True, eq=False)
class ModelState:
    """The variants made while the model was in one state."""

    guard: StateGuard
    variants: tuple[Compiled, ...] = ()


States = tuple[ModelState, ...]


def matching(
    states: States, leaves: Sequence[Any], spec: Any, current_modes: tuple[Any, ...], in_context: bool = True
) -> Iterator[tuple[Compiled, tuple[Any, ...]]]:
    """The variants that serve a call as far as can be told before it, the most recent first, and the tensors of the
    call that each is given; without ``in_context`` those, too, that were made where context variables had other
    values."""
    for state in states:
        if state.guard.holds():
            for compiled in state.variants:
                given = compiled.carried.extend(leaves, spec) if compiled.carried else (leaves, spec)
                tensors = compiled.guard.match(*given, current_modes)
                if tensors is not None and (not in_context or compiled.guard.in_context()):
                    yield compiled, tensors


def current(states: States, compiled: Compiled) -> ModelState | None:
    """The state that the model is in, where a variant like this one was made in it before."""
    return next((s for s in states if s.guard.unwatched == compiled.unwatched and s.guard.holds()), None)


def is_full(state: ModelState) -> bool:
    """Whether one more variant takes the place of the oldest."""
    return len(state.variants) >= LARGEST_VARIANTS


def with_variant(states: States, state: ModelState, compiled: Compiled) -> States:
    """The states with one more variant, the most recent of its state, which becomes the first."""
    others = tuple(s for s in states if s is not state)
    variants = (compiled, *state.variants)[:LARGEST_VARIANTS]
    return (ModelState(state.guard, variants), *others)[:LARGEST_STATES]


def without(states: States, variants: Sequence[Compiled]) -> States:
    """The states without some variants."""
    return tuple(replace(s, variants=tuple(c for c in s.variants if c not in variants)) for s in states)


def exchanged(states: States, old: Compiled, new: Compiled) -> States:
    """The states with ``new`` in place of ``old``."""
    return tuple(replace(s, variants=tuple(new if c is old else c for c in s.variants)) for s in states)
