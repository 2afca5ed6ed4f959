"""Variants are found by the sizes of a call."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.runtime.guards.call_guards import CallGuard, call_guard, modes
from fuse.runtime.guards.state_guard import StateGuard
from fuse.runtime.variants import states
from fuse.runtime.variants.compiled import Compiled
from fuse.runtime.variants.states import ModelState, exchanged, matching, with_variant, without

FULL = 6


class Renamed(Tensor):
    """A tensor of another class."""


def leaf(kind: int, size: int) -> Any:
    tensor = torch.zeros(size, 2)
    of = [tensor, nn.Parameter(tensor), tensor.as_subclass(Renamed), size, tensor.double()]
    return of[kind]


leaves = st.tuples(*[st.builds(leaf, st.integers(0, 4), st.integers(1, 3))] * 2)


def guard_of(call: tuple[Any, ...], reads: set[int]) -> CallGuard:
    """A guard of a variant that is given the tensors of a call at the positions ``reads``."""
    sources = [at for at in sorted(reads) if isinstance(call[at], Tensor)]
    return call_guard(call, None, sources, set())


@given(st.lists(st.tuples(leaves, st.sets(st.integers(0, 1))), max_size=12), st.data())
def test_a_call_finds_the_variants_whose_guards_accept_it_the_most_recent_first(made: list[Any], data: Any) -> None:
    guard = StateGuard(nn.Module(), True, frozenset())
    known: states.States = (ModelState(guard),)
    with_fewer = st.sampled_from(["", "", "without", "exchanged"])
    kept, states.LARGEST_VARIANTS = states.LARGEST_VARIANTS, FULL
    try:
        for call, reads in made:
            known = with_variant(known, known[0], Compiled(guard_of(call, reads), None))
            how, one = data.draw(with_fewer), data.draw(st.sampled_from(known[0].variants))
            if how:
                known = without(known, [one]) if how == "without" else exchanged(known, one, Compiled(one.guard, None))
            assert len(known[0].variants) <= FULL
            for asked, _ in made:
                expected = [c for c in known[0].variants if c.guard.match(asked, None, modes()) is not None]
                assert [c for c, _ in matching(known, asked, None, modes())] == expected
    finally:
        states.LARGEST_VARIANTS = kept


def test_few_variants_are_asked_however_many_there_are(monkeypatch) -> None:
    fused = fuse.compile(nn.ReLU(), dynamic_shapes=None)
    for size in range(1, 41):
        fused(torch.ones(size))
    asked: list[Any] = []
    match = CallGuard.match
    monkeypatch.setattr(CallGuard, "match", lambda guard, *call: asked.append(guard) or match(guard, *call))
    for size in (5, 20, 40):
        fused(torch.ones(size))
        assert fused.last_run.launches == 1
    assert len(asked) == 3
