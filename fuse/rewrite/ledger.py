"""The ledger of the passes: every rewrite by number, every declined candidate by reason, and the time of each pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fuse.rewrite.deltas import Recording


@dataclass(frozen=True)
class Fired:
    """One rewrite.

    ``number`` counts over all passes, from 1; ``fuel=number`` stops directly after it. ``launches_saved``: launches
    before minus launches after this rewrite, multiplied by the steps of a loop; negative if it prepares for a later
    pass.
    """

    number: int
    pass_name: str
    pattern: str | None
    nodes: tuple[str, ...]
    source: str
    launches_saved: int


@dataclass(frozen=True)
class Firings:
    """All rewrites of one pass (and pattern)."""

    pass_name: str
    pattern: str | None
    count: int
    launches_saved: int


@dataclass(frozen=True)
class Rejections:
    """All candidates that one pass (and pattern) declined for one reason.

    ``example``: the name of the first candidate. ``sources``: the user's lines of all.
    """

    pass_name: str
    pattern: str | None
    reason: str
    count: int
    example: str
    sources: tuple[str, ...]

    @property
    def source(self) -> str:
        """The first of the user's lines."""
        return self.sources[0] if self.sources else ""


@dataclass(frozen=True)
class Failed:
    """A pass that raised and was left out. ``reason``: its error in one line. ``source``: ``file.py:line`` of the
    error."""

    pass_name: str
    origin: str
    reason: str
    source: str
    traceback: str = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"pass {self.pass_name!r} of {self.origin} failed at {self.source} and was left out: {self.reason}"


@dataclass(frozen=True)
class Ledger:
    """The record of one run of the pipeline. ``failed``: passes that raised; they made none of the ``rewrites``.

    ``recording`` has every change of the graph, if it was requested.

    >>> ledger = Ledger(("no_ops",), (Fired(1, "no_ops", None, ("clone",), "m.py:3", 1),), (), {"no_ops": 0.001})
    >>> ledger.fired
    (Firings(pass_name='no_ops', pattern=None, count=1, launches_saved=1),)
    """

    passes: tuple[str, ...]
    rewrites: tuple[Fired, ...]
    rejected: tuple[Rejections, ...]
    seconds: Mapping[str, float]
    failed: tuple[Failed, ...] = ()
    recording: Recording | None = field(default=None, compare=False, repr=False)

    @property
    def fired(self) -> tuple[Firings, ...]:
        """The rewrites, grouped by pass and pattern in the order in which they first fired."""
        count: Counter[tuple[str, str | None]] = Counter()
        saved: Counter[tuple[str, str | None]] = Counter()
        for one in self.rewrites:
            count[one.pass_name, one.pattern] += 1
            saved[one.pass_name, one.pattern] += one.launches_saved
        return tuple(Firings(name, pattern, number, saved[name, pattern]) for (name, pattern), number in count.items())


def joined(first: Ledger, second: Ledger) -> Ledger:
    """The record of two runs, one after the other. Each reason and failure appears once; ``recording`` is the second's.

    >>> joined(Ledger(("no_ops",), (), (), {"no_ops": 1.0}), Ledger(("no_ops",), (), (), {"no_ops": 2.0})).seconds
    {'no_ops': 3.0}
    """
    moved = (replace(one, number=one.number + len(first.rewrites)) for one in second.rewrites)
    rejected = {(r.pass_name, r.pattern, r.reason): r for r in (*second.rejected, *first.rejected)}
    seconds = dict(first.seconds)
    for name, spent in second.seconds.items():
        seconds[name] = seconds.get(name, 0.0) + spent
    names = tuple(dict.fromkeys((*second.passes, *first.passes)))
    rewrites = (*first.rewrites, *moved)
    failed = {one.pass_name: one for one in (*second.failed, *first.failed)}
    return Ledger(names, rewrites, tuple(rejected.values()), seconds, tuple(failed.values()), second.recording)
