"""Folding of repeated stretches."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from fuse.report.repeats import Folding, Repeat, fold, representatives


def expanded(folding: Folding, tokens: str) -> str:
    """The sequence that a folding stands for, with the first step of each run written as often as the run says."""
    return "".join(
        expanded(part.body, tokens) * part.count if isinstance(part, Repeat) else tokens[part] for part in folding
    )


def test_a_loop_between_other_entries_is_one_run() -> None:
    assert fold("x" + "abc" * 64 + "y") == (0, Repeat(1, 3, 64, (1, 2, 3)), 193)


def test_a_loop_inside_a_loop_is_folded_inside_its_step() -> None:
    (outer,) = fold(("p" + "abc" * 5) * 4)
    assert isinstance(outer, Repeat)
    assert (outer.period, outer.count) == (16, 4)
    assert outer.body == (0, Repeat(1, 3, 5, (1, 2, 3)))


def test_two_short_stretches_and_three_equal_entries_stay() -> None:
    assert fold("abab") == (0, 1, 2, 3)
    assert fold("aaab") == (0, 1, 2, 3)


def test_two_long_stretches_are_one_run() -> None:
    (run,) = fold("abcdefgh" * 2)
    assert isinstance(run, Repeat)
    assert (run.period, run.count) == (8, 2)


@given(st.text(alphabet="abc", max_size=60))
def test_a_folding_stands_for_exactly_the_sequence(tokens: str) -> None:
    assert expanded(fold(tokens), tokens) == tokens


@given(st.text(alphabet="ab", max_size=60))
def test_a_representative_has_the_same_token_and_stands_for_itself(tokens: str) -> None:
    chosen = representatives(fold(tokens), len(tokens))
    assert all(tokens[position] == tokens[drawn] and chosen[drawn] == drawn for position, drawn in enumerate(chosen))


def test_a_long_almost_repetition_takes_linear_time() -> None:
    stretch = list(range(7000))
    started = time.process_time()  # other programs must not count
    fold([*stretch, *stretch, *stretch[:-2], *range(10_000, 13_000)])
    assert time.process_time() - started < 6.0  # 0.3 s on an idle machine
