"""The collector is paused while graphs grow, and their garbage is collected in the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from fuse.graph import garbage_collection
from fuse.graph.capture import capture
from fuse.graph.garbage_collection import without_garbage_collection


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """All objects are collected again once a few of them became old; the number of times."""
    monkeypatch.setattr(garbage_collection, "MANY", 1_000)
    monkeypatch.setattr(garbage_collection, "FEWEST", 1_000)
    monkeypatch.setattr(garbage_collection, "_COLLECTOR", garbage_collection._Collector())
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            found.append(info["collected"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def cycles(count: int) -> None:
    """Garbage that only the collector finds."""
    for _ in range(count):
        one: list[object] = []
        one.append(one)


def test_all_objects_are_collected_once_there_are_half_as_many_more(collections: list[int]) -> None:
    with without_garbage_collection():
        cycles(2_000)
    assert len(collections) == 1
    del collections[:]
    all_objects = len(gc.get_objects())
    with without_garbage_collection():
        cycles(all_objects // 4)
    assert not collections
    with without_garbage_collection():
        cycles(all_objects)
    assert len(collections) == 1
    assert collections[0] > 1.2 * all_objects
    assert len(gc.get_objects()) < 1.1 * all_objects


def test_nothing_is_collected_where_the_caller_has_disabled_it(collections: list[int]) -> None:
    gc.disable()
    try:
        with without_garbage_collection():
            cycles(4 * len(gc.get_objects()))
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert not collections
    gc.collect()


def test_captures_leave_no_garbage_for_good(collections: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(150)))
    capture(model, (torch.randn(2, 4),))
    all_objects = len(gc.get_objects())
    monkeypatch.setattr(garbage_collection._COLLECTOR, "before", int(all_objects * 0.7))
    for size in range(3, 12):
        capture(model, (torch.randn(size, 4),))
    assert sum(collections) > 5_000
