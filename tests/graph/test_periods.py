"""Repeated stretches are found wherever they start, in linear time."""

from __future__ import annotations

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from fuse.graph.periods import RepeatedStretch, find_repetitions


def test_a_loop_between_a_prologue_and_an_epilogue_is_found() -> None:
    assert find_repetitions("pabcabcabcabcxyz") == [RepeatedStretch(1, 3, 4)]


def test_two_loops_one_after_another_are_two_runs() -> None:
    assert find_repetitions("ababababcdecdecdecde") == [RepeatedStretch(0, 2, 4), RepeatedStretch(8, 3, 4)]


def test_a_step_that_repeats_one_operator_is_still_one_step() -> None:
    assert find_repetitions("aabaabaabaab") == [RepeatedStretch(0, 3, 4)]


def test_an_irregular_step_ends_the_run() -> None:
    assert find_repetitions("abcabcabXabcabcabc") == [RepeatedStretch(9, 3, 3)]


def test_too_few_repeats_are_no_run() -> None:
    assert find_repetitions("abab") == []
    assert find_repetitions("") == []


@given(st.text("abc", max_size=60), st.integers(2, 4))
def test_every_run_really_repeats(text: str, least: int) -> None:
    for run in find_repetitions(text, least):
        step = text[run.start : run.start + run.period]
        assert text[run.start : run.end] == step * run.count
        assert run.count >= least


def test_the_time_is_linear() -> None:
    def seconds(length: int) -> float:
        generator = random.Random(0)
        body = [generator.randrange(5) for _ in range(12)]
        items = body * (length // 12)
        started = time.process_time()  # other programs must not count
        find_repetitions(items)
        return time.process_time() - started

    seconds(1_200)
    assert seconds(120_000) < 40 * max(seconds(12_000), 1e-3)
