"""A pattern is found in other spellings of its code, and in nothing else."""

from __future__ import annotations

import pytest

from benchmarks.metamorphic import run


@pytest.mark.parametrize("seed", [0, 20_000])
def test_spellings_match_and_changes_do_not(seed: int) -> None:
    found = run(25, seed)
    assert [one for one in found if one.failed] == []
    assert {one.preserves for one in found} == {True, False}
