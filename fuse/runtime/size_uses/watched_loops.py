"""Differences between the steps of a captured call's loops. Captures are watched like followings (``loop_steps.py``).

    x [64], x [1000]     captured: between their steps, only the counter t differs
    x [70], x [130]      followed with symbolic sizes: t is symbolic after the loop, so it may differ
    x [501]              step 499 of the capture of 1,000 steps was like its other steps: no capture

``forward`` is followed at few steps, and a longer loop may have an odd step. Of the capture of a longer loop, such a
step may leave nothing in the graph (``before, flag = flag, t == 499``).
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from fuse.graph.recording.code_events import Events
from fuse.graph.recording.watched_code import WatchedCode, watched
from fuse.runtime.size_uses.loop_steps import RESULT, LoopSteps, Place, looked_at
from fuse.runtime.size_uses.unrecorded_uses import is_known


@dataclass(frozen=True)
class StepDifference:
    """A difference between steps of a loop: its place, the variable or path that differs, and the number of steps."""

    place: Place
    what: str
    count: int


MOST = 1_000_000
"""About how many microseconds watching a capture may take: as many as a loop of 9,000 steps needs."""
LARGEST = 256
"""Lists and dictionaries with more entries are not looked at one by one: a vocabulary takes a millisecond a step."""


def loops_watched() -> AbstractContextManager[None]:
    """A context in which the loops of captured calls are watched."""
    return watched(lambda: _Loops().code())


def step_differences(found: Any) -> Collection[StepDifference]:
    """The differences between steps of loops that the watch of a capture found. If nobody watched it, or there was
    too much to look at, only the followed steps tell what differs."""
    return found or ()


class _Loops:
    """The loops of one capture. Results of functions are left out: their kind is the same in all steps."""

    def __init__(self) -> None:
        self._known: dict[CodeType, bool] = {}
        self._differences: dict[StepDifference, None] = {}
        self._steps = LoopSteps(self._is_own, self._note, lambda length, number: None, MOST, LARGEST)

    def code(self) -> WatchedCode:
        """The code of a capture, in which differences between steps are found."""
        return WatchedCode(Events(self._steps.trace, looked_at, self._is_own), self._found)

    def _is_own(self, frame: FrameType) -> bool:
        known = self._known.get(frame.f_code)
        if known is None:
            known = self._known[frame.f_code] = is_known(frame)
        return not known

    def _note(self, place: Place, what: str, count: int, recorded: bool) -> None:
        if what != RESULT:
            self._differences[StepDifference(place, what, count)] = None

    def _found(self) -> tuple[StepDifference, ...] | None:
        self._steps.end()
        return None if self._steps.gave_up else tuple(self._differences)
