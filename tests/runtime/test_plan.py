"""The buffer planner never lets two live values overlap, and uses memory again."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from fuse.runtime.plan import ALIGNMENT, Lifetime, arrange

spans = st.tuples(st.integers(0, 40), st.integers(0, 8), st.sampled_from([0, 4, 64, 100, 1000]))


@settings(max_examples=200, deadline=None)
@given(st.lists(spans, max_size=50), st.integers(0, 300))
def test_values_that_live_at_the_same_step_never_overlap(drawn: list[tuple[int, int, int]], reserved: int) -> None:
    lifetimes = [Lifetime(size, first, first + length) for first, length, size in drawn]
    arena = arrange(lifetimes, reserved)
    placed = [(o, o + v.size, v) for o, v in zip(arena.offsets, lifetimes, strict=True) if v.size]
    for i, (start, stop, value) in enumerate(placed):
        assert start % ALIGNMENT == 0
        assert reserved <= start
        assert stop <= arena.size
        for other_start, other_stop, other in placed[:i]:
            if value.first <= other.last and other.first <= value.last:
                assert stop <= other_start or other_stop <= start


def test_a_chain_in_place_needs_the_memory_of_one_value() -> None:
    chain = [Lifetime(256, i, i + 1, heir_of=(i - 1,) if i else ()) for i in range(100)]
    assert arrange(chain).size == 256


def test_only_one_heir_takes_a_place() -> None:
    arena = arrange([Lifetime(64, 0, 1), Lifetime(64, 1, 2, (0,)), Lifetime(64, 1, 2, (0,))])
    assert len({arena.offsets[1], arena.offsets[2]}) == 2


def test_twenty_thousand_values_are_placed_in_well_under_a_second() -> None:
    start = time.process_time()  # other programs must not count
    arena = arrange([Lifetime(512 * (1 + i % 3), i, i + i % 7) for i in range(20_000)])
    assert time.process_time() - start < 4.0  # 0.1 s on an idle machine
    assert arena.size < 512 * 3 * 16
