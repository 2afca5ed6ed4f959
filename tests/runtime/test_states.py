"""Variants are found by the sizes of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
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

FULL, FULL_OF_SIZED = 4, 6


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


@pytest.fixture(scope="module", autouse=True)
def _few_are_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(states, "LARGEST_VARIANTS", FULL)
        patched.setattr(states, "LARGEST_SIZED", FULL_OF_SIZED)
        yield


@given(st.lists(st.tuples(leaves, st.sets(st.integers(0, 1)), st.booleans()), max_size=16), st.data())
def test_a_call_finds_the_variants_whose_guards_accept_it_the_most_recent_first(made: list[Any], data: Any) -> None:
    known: states.States = (ModelState(StateGuard(nn.Module(), True, frozenset())),)
    then = st.sampled_from(["", "", "", "without", "exchanged"])
    expected: list[Compiled] = []
    for call, reads, is_sized in made:
        compiled = Compiled(guard_of(call, reads), None, resized=is_sized)
        known, expected = with_variant(known, known[0], compiled), [compiled, *expected]
        for sized, most in ((True, FULL_OF_SIZED), (False, FULL)):
            oldest = [one for one in expected if one.is_sized() is sized][most:]
            expected = [one for one in expected if one not in oldest]
        how, old = data.draw(then), data.draw(st.sampled_from(expected))
        if how == "without":
            known, expected = without(known, [old]), [one for one in expected if one is not old]
        elif how == "exchanged":
            new = Compiled(old.guard, None, resized=old.resized)
            known, expected = exchanged(known, old, new), [new if one is old else one for one in expected]
        assert list(known[0].variants) == expected
        for asked, *_ in made:
            fitting = [one for one in expected if one.guard.match(asked, None, modes()) is not None]
            assert [one for one, _ in matching(known, asked, None, modes())] == fitting


def test_few_variants_are_asked_however_many_there_are(monkeypatch) -> None:
    monkeypatch.setattr(states, "LARGEST_VARIANTS", 64)
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
