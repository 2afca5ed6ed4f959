"""A pattern is found in other spellings of its code, and in nothing else."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.metamorphic import CHANGING, IN_TURN, KEEPING, run


def test_every_step_comes_twice_in_a_turn() -> None:
    assert Counter(step for _, steps in IN_TURN for step in steps) == dict.fromkeys([*KEEPING, *CHANGING], 2)


@pytest.mark.parametrize("seed", [0, 20_000])
def test_spellings_match_and_changes_do_not(seed: int) -> None:
    found = run(25, seed)
    assert [one for one in found if one.failed] == []
    assert {one.preserves for one in found} == {True, False}
