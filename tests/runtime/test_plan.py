"""The buffer planner never lets two live values overlap, and uses memory again."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse.graph.garbage_collection import without_garbage_collection
from fuse.runtime.programs.plan import ALIGNMENT, LiveRange, assign_offsets

SMALL, LARGE = 16_384, 131_136

spans = st.tuples(st.integers(0, 40), st.integers(0, 8), st.sampled_from([0, 4, 64, 100, 1000]))


@settings(max_examples=200, deadline=None)
@given(st.lists(spans, max_size=50), st.integers(0, 300))
def test_values_that_live_at_the_same_step_never_overlap(drawn: list[tuple[int, int, int]], reserved: int) -> None:
    live_ranges = [LiveRange(size, first, first + length) for first, length, size in drawn]
    arena = assign_offsets(live_ranges, reserved)
    assert arena.size >= reserved + most_at_once(drawn)
    placed = [(o, o + v.size, v) for o, v in zip(arena.offsets, live_ranges, strict=True) if v.size]
    for i, (start, stop, value) in enumerate(placed):
        assert start % ALIGNMENT == 0
        assert reserved <= start
        assert stop <= arena.size
        for other_start, other_stop, other in placed[:i]:
            if value.first <= other.last and other.first <= value.last:
                assert stop <= other_start or other_stop <= start


def most_at_once(drawn: list[tuple[int, int, int]]) -> int:
    """The most bytes that live at one step, by their sizes alone."""
    steps = range(max((first + length for first, length, _ in drawn), default=0) + 1)
    return max(sum(size for first, length, size in drawn if first <= step <= first + length) for step in steps)


def test_memory_for_one_step_does_not_part_what_lives_longer() -> None:
    """``models/mlp.py``: residual blocks whose products pack a weight."""
    block = [(0, 3, SMALL), (0, 1, SMALL), (1, 1, SMALL), (1, 0, LARGE), (2, 1, SMALL)]
    blocks = [
        LiveRange(size, 1 + 3 * i + first, 1 + 3 * i + first + more) for i in range(3) for first, more, size in block
    ]
    arena = assign_offsets([LiveRange(SMALL, 0, 1), *blocks, LiveRange(SMALL, 10, 10), LiveRange(LARGE, 10, 10)])
    packed = -(-LARGE // ALIGNMENT) * ALIGNMENT
    assert arena.size == packed + 3 * SMALL


def test_the_largest_are_placed_first_where_few_live_at_once() -> None:
    """Placed in order of life, ``c`` would find only half of its place behind ``b``."""
    a, b, c = LiveRange(128, 0, 1), LiveRange(64, 1, 4), LiveRange(192, 2, 4)
    assert assign_offsets([a, b, c]).size == 256


@pytest.mark.parametrize("alive_for", [7, 60, 20_000])
def test_ever_more_values_at_once_are_placed_in_well_under_a_second(alive_for: int) -> None:
    with without_garbage_collection():  # the garbage of other tests must not count
        start = time.process_time()  # nor other programs
        arena = assign_offsets([LiveRange(512, i, i + alive_for - 1) for i in range(20_000)])
        assert time.process_time() - start < 4.0  # 0.4 s on an idle machine
    assert arena.size == 512 * min(alive_for, 20_000)


def test_values_of_distinct_sizes_share_places_where_many_live_at_once() -> None:
    long_lived = [LiveRange(64, 0, 1000) for _ in range(200)]
    growing = [LiveRange(1024 * (i + 1), i, i) for i in range(1000)]  # a concatenation that grows with each step
    assert assign_offsets([*long_lived, *growing]).size < 64 * 200 + 8 * 1024 * 1000


def test_a_chain_in_place_needs_the_memory_of_one_value() -> None:
    chain = [LiveRange(256, i, i + 1, heir_of=(i - 1,) if i else ()) for i in range(100)]
    assert assign_offsets(chain).size == 256


def test_only_one_heir_takes_a_place() -> None:
    arena = assign_offsets([LiveRange(64, 0, 1), LiveRange(64, 1, 2, (0,)), LiveRange(64, 1, 2, (0,))])
    assert len({arena.offsets[1], arena.offsets[2]}) == 2


def test_twenty_thousand_values_are_placed_in_well_under_a_second() -> None:
    with without_garbage_collection():
        start = time.process_time()
        arena = assign_offsets([LiveRange(512 * (1 + i % 3), i, i + i % 7) for i in range(20_000)])
        assert time.process_time() - start < 4.0  # 0.1 s on an idle machine
    assert arena.size < 512 * 3 * 16
