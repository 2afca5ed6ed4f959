"""What is measured for ``FUSE_TUNE=1``: the fastest way wins, once a machine, whatever becomes of the cache."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuse.runtime.building import cache, tuning

pytestmark = pytest.mark.usefixtures("empty_cache")


class Clock:
    """A clock that only ways to compute something move on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.run: list[str] = []

    def __call__(self) -> float:
        return self.now

    def way(self, name: str, *seconds: float) -> Callable[[], None]:
        """A way that takes these times in turn, the last for ever."""
        times = list(seconds)

        def run() -> None:
            self.run.append(name)
            self.now += times.pop(0) if len(times) > 1 else times[0]

        return run


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_known", {})


def test_the_way_with_the_shortest_round_wins() -> None:
    clock = Clock()
    ways = {"steady": clock.way("steady", 0.003), "disturbed": clock.way("disturbed", 0.001, 0.009, 0.002, 0.009)}
    assert tuning.fastest("a product", ways, clock) == "disturbed"


def test_the_first_round_does_not_count() -> None:
    clock = Clock()
    ways = {"early": clock.way("early", 0.001, 0.009), "warm": clock.way("warm", 0.009, 0.002)}
    assert tuning.fastest("a product", ways, clock) == "warm"


@pytest.mark.parametrize(("seconds", "winner"), [(0.00098, "usual"), (0.00096, "other")])
def test_the_first_way_stays_where_no_other_is_clearly_faster(seconds: float, winner: str) -> None:
    clock = Clock()
    ways = {"usual": clock.way("usual", 0.001), "other": clock.way("other", seconds)}
    assert tuning.fastest("a product", ways, clock) == winner


def test_rounds_go_on_while_a_way_becomes_faster() -> None:
    clock = Clock()
    disturbed = [0.009] * tuning.ROUNDS + [0.001]
    ways = {"steady": clock.way("steady", 0.003), "disturbed": clock.way("disturbed", *disturbed)}
    assert tuning.fastest("a product", ways, clock) == "disturbed"
    assert clock.run.count("steady") == 2 * tuning.ROUNDS


def test_slow_ways_are_not_measured_for_long() -> None:
    clock = Clock()
    tuning.fastest("a product", {"slow": clock.way("slow", 10.0), "slower": clock.way("slower", 11.0)}, clock)
    assert len(clock.run) == 2 * (1 + tuning.FEWEST_ROUNDS)


def test_what_is_known_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    ways = {"a": clock.way("a", 0.002), "b": clock.way("b", 0.001)}
    assert tuning.fastest("a product", ways, clock) == "b"
    measured = len(clock.run)
    assert tuning.fastest("a product", ways, clock) == "b"
    monkeypatch.setattr(tuning, "_known", {})  # as another process
    assert tuning.fastest("a product", ways, clock) == "b"
    assert len(clock.run) == measured
    tuning.fastest("another product", ways, clock)
    assert len(clock.run) == 2 * measured


def test_another_number_of_threads_is_measured_apart() -> None:
    clock, threads = Clock(), torch.get_num_threads()
    ways = {"a": clock.way("a", 0.002), "b": clock.way("b", 0.001)}
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            tuning.fastest("a product", ways, clock)
    finally:
        torch.set_num_threads(threads)
    assert len(clock.run) == 2 * 2 * (1 + tuning.ROUNDS)


@pytest.mark.parametrize("content", [b"", b"c", b"\xff\xfe"])
def test_what_cannot_be_read_is_measured_again(
    content: bytes, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    ways = {"a": clock.way("a", 0.001), "b": clock.way("b", 0.002)}
    tuning.fastest("a product", ways, clock)
    (kept,) = empty_cache.glob("*/*.txt")
    kept.write_bytes(content)
    monkeypatch.setattr(tuning, "_known", {})
    assert tuning.fastest("a product", ways, clock) == "a"
    assert len(clock.run) == 2 * 2 * (1 + tuning.ROUNDS)


def test_a_cache_that_cannot_be_written_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(target: Path, content: bytes) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "_publish", full)
    cache.warn_once.cache_clear()
    clock = Clock()
    ways = {"a": clock.way("a", 0.001), "b": clock.way("b", 0.002)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [tuning.fastest(subject, ways, clock) for subject in ("a product", "another", "a product")]
    assert found == ["a", "a", "a"]
    assert len([w for w in caught if "FUSE_TUNE" in str(w.message)]) == 1
    assert len(clock.run) == 2 * 2 * (1 + tuning.ROUNDS)
