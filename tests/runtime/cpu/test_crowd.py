"""How many threads kernels are given, on a machine that is made up: times are told, none is measured."""

from __future__ import annotations

import ctypes
import os
from importlib import resources

import pytest

from fuse.runtime.cpu import compiler

MACHINE = """
// A kernel of `work` nanoseconds, which its threads share evenly; each call with more than `free` of them waits for a
// time slice of `slice` nanoseconds. Returns the threads of the last call of so many.
struct Simulated { Crowd crowd; Least least; int64_t now, spent; };
extern "C" Simulated *simulated() { return new Simulated{{}, {0, 0}, 1000000000, 0}; }
extern "C" int64_t calls(Simulated *of, int64_t count, int64_t allowed, int64_t work, int64_t free, int64_t slice) {
    Turn turn = {0, 0, 0};
    for (int64_t i = 0; i < count; ++i) {
        turn = of->crowd.begin(of->now, allowed);
        const int64_t elapsed = work / turn.members + (turn.members > free ? slice : 0);
        of->now += elapsed;
        of->spent += elapsed;
        of->crowd.end(of->now, elapsed, turn, of->least);
    }
    return turn.members;
}
extern "C" int64_t spent(Simulated *of) { const int64_t spent = of->spent; of->spent = 0; return spent; }
"""
WORK, SLICE = 1_000_000, 3_000_000
PROCESSORS = len(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(PROCESSORS < 2, reason="threads share one processor")


@pytest.fixture
def machine() -> ctypes.CDLL:
    text = resources.files("fuse.runtime.cpu").joinpath("crowd.h").read_text()
    library = compiler.build(text + MACHINE)
    library.simulated.restype = ctypes.c_void_p
    for function in (library.calls, library.spent):
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 5][: 6 if function is library.calls else 1]
    return library


def test_all_threads_stay_where_nobody_else_is(machine: ctypes.CDLL) -> None:
    of = machine.simulated()
    for _ in range(100):
        assert machine.calls(of, 100, 2, WORK, 2, SLICE) == 2


def test_a_kernel_that_waits_for_time_slices_gets_fewer_threads(machine: ctypes.CDLL) -> None:
    of = machine.simulated()
    machine.calls(of, 100, 2, WORK, 2, SLICE)
    machine.spent(of)
    assert machine.calls(of, 20, 2, WORK, 1, SLICE) == 1
    machine.calls(of, 5000, 2, WORK, 1, SLICE)
    assert machine.spent(of) < 1.1 * 5020 * WORK  # what trying more threads costs included
    assert machine.calls(of, 1100, 2, WORK, 2, SLICE) == 2  # within about a second
    machine.spent(of)
    machine.calls(of, 1000, 2, WORK, 2, SLICE)
    assert machine.spent(of) == 1000 * WORK // 2


def test_one_time_slice_now_and_then_changes_nothing(machine: ctypes.CDLL) -> None:
    of = machine.simulated()
    for _ in range(50):
        assert machine.calls(of, 100, 2, WORK, 2, SLICE) == 2
        machine.calls(of, 1, 2, WORK, 1, SLICE)


def test_threads_stay_where_fewer_would_take_longer_than_waiting(machine: ctypes.CDLL) -> None:
    of = machine.simulated()
    machine.calls(of, 100, 2, 100 * SLICE, 2, SLICE)
    for _ in range(20):
        assert machine.calls(of, 10, 2, 100 * SLICE, 1, SLICE) == 2


def test_a_kernel_that_was_fast_once_gets_its_threads_back(machine: ctypes.CDLL) -> None:
    """What it reads lay in a cache then, and never does again: more time with fewer threads too."""
    of = machine.simulated()
    machine.calls(of, 100, 2, WORK, 2, SLICE)
    machine.calls(of, 1000, 2, 8 * WORK, 2, SLICE)
    machine.spent(of)
    machine.calls(of, 1000, 2, 8 * WORK, 2, SLICE)
    assert machine.spent(of) < 1.05 * 1000 * 4 * WORK


def test_no_more_threads_than_processors(machine: ctypes.CDLL) -> None:
    assert machine.calls(machine.simulated(), 100, 4 * PROCESSORS, WORK, PROCESSORS, SLICE) == PROCESSORS
