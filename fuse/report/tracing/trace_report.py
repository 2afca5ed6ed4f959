"""Report of a trace of a real run: launches by kind and line, tiny kernels, gaps, repeats, and launches with fuse.

trace.json.gz  ->  events  ->  launches  ->  one TraceReport for the whole, and one for each annotated part
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fuse.graph.loading.load import LoadedModel
from fuse.graph.periods import find_repetitions
from fuse.ops import REPORTED_KINDS
from fuse.report.tracing.trace_events import events
from fuse.report.tracing.trace_launches import BENCH, Launch, TraceRecording, recording
from fuse.report.tracing.trace_model import Rewritten, matched

SCHEMA_VERSION = 1
TINY_MICROSECONDS = 10.0
"""A launch shorter than this takes about as long to start as to run, in microseconds."""
_REPEATS_SHOWN = 5


@dataclass(frozen=True)
class TimeShare:
    """Launches of one kind or line, and the microseconds that they take."""

    name: str
    launches: int
    microseconds: float


@dataclass(frozen=True)
class RepeatedLaunches:
    """A sequence of ``period`` launches that occurs ``count`` times in a row, from launch number ``start`` on.

    ``names`` are its first few launches.
    """

    period: int
    count: int
    names: tuple[str, ...]
    source: str
    start: int = 0


@dataclass(frozen=True)
class TraceReport:
    """One trace, or a part of it. Times are microseconds.

    ``busy`` is the time in which at least one launch runs, ``span`` the time from the begin of the first launch to the
    end of the last; the difference is overhead of the host. ``gaps`` counts the pauses between launches, ``gap`` is
    their median. ``launching`` is the host's time in calls that launch on a device. ``unknown`` are names of unknown
    kind. ``parts`` has a report for each call of a model that ``fuse bench --profile`` made.
    """

    name: str
    on_device: bool
    launches: int
    by_kind: tuple[TimeShare, ...]
    by_line: tuple[TimeShare, ...]
    tiny: TimeShare
    gaps: int
    gap: float
    busy: float
    span: float
    launching: float
    steps: int
    repeats: tuple[RepeatedLaunches, ...]
    unknown: tuple[str, ...]
    parts: tuple[TraceReport, ...] = ()
    rewritten: Rewritten | None = None
    read: tuple[Launch, ...] = field(default=(), repr=False, compare=False)

    @property
    def formula(self) -> str:
        """Launches as a + b*T, by the repeat that holds most of them; "" where nothing repeats."""
        if not self.repeats:
            return ""
        most = self.repeats[0]
        return f"{self.launches - most.period * most.count:,} + {most.period:,}*T with T = {most.count:,}"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON."""
        parts = tuple(part.to_dict() for part in self.parts)
        plain = {name: value for name, value in asdict(replace(self, parts=(), read=())).items() if name != "read"}
        return {"schema_version": SCHEMA_VERSION, **plain, "formula": self.formula, "parts": parts}

    def __str__(self) -> str:
        from fuse.report.columns import as_text
        from fuse.report.tracing.trace_table import trace_table

        return as_text(trace_table(self))


def trace(path: Path, model: LoadedModel | None = None, target: str = "") -> TraceReport:
    """Read the trace at ``path``; with a ``model``, find its calls and their launches after fuse's passes.

    Raises ``FuseError`` where the file is not a Chrome trace, or the model cannot be captured.
    """
    read = recording(events(path))
    launches = read.launches
    rewritten: Rewritten | None = None
    if model is not None:
        rewritten, launches = matched(launches, model, target)
    parts = [
        replace(_report(annotation.name.removeprefix(BENCH), read, inside), launching=0.0)
        for annotation in read.annotations
        if annotation.name.startswith(BENCH)
        and (inside := [one for one in launches if annotation.start <= one.start < annotation.end])
    ]
    return replace(_report(str(path), read, launches), parts=tuple(parts), rewritten=rewritten)


def compare(one: TraceReport, other: TraceReport) -> dict[str, Any]:
    """The differences of two traces: launches and microseconds of both, by kind and by line."""

    def pairs(left: Sequence[TimeShare], right: Sequence[TimeShare]) -> dict[str, list[list[float]]]:
        first, second = ({share.name: share for share in shares} for shares in (left, right))
        none = TimeShare("", 0, 0.0)
        both = {name: (first.get(name, none), second.get(name, none)) for name in [*first, *second]}
        return {
            name: [[a.launches, b.launches], [a.microseconds, b.microseconds]]
            for name, (a, b) in both.items()
            if a.launches != b.launches or a.microseconds != b.microseconds
        }

    return {
        "schema_version": SCHEMA_VERSION,
        "traces": [one.name, other.name],
        "launches": [one.launches, other.launches],
        "busy": [one.busy, other.busy],
        "span": [one.span, other.span],
        "by_kind": pairs(one.by_kind, other.by_kind),
        "by_line": pairs(one.by_line, other.by_line),
    }


def _report(name: str, read: TraceRecording, launches: Sequence[Launch]) -> TraceReport:
    kinds = {kind: i for i, kind in enumerate(REPORTED_KINDS)}
    by_kind = sorted(_shares([(one.kind, one) for one in launches]), key=lambda share: kinds[share.name])  # type: ignore[index]  # names of kinds
    by_line = sorted(_shares([(one.source, one) for one in launches if one.source]), key=lambda s: -s.launches)
    tiny = [one for one in launches if one.duration < TINY_MICROSECONDS]
    distinct = _distinct(launches)
    gaps = _gaps(distinct)
    return TraceReport(
        name=name,
        on_device=read.on_device,
        launches=len(launches),
        by_kind=tuple(by_kind),
        by_line=tuple(by_line),
        tiny=TimeShare(f"below {TINY_MICROSECONDS:g} us", len(tiny), sum(one.duration for one in _distinct(tiny))),
        gaps=len(gaps),
        gap=statistics.median(gaps) if gaps else 0.0,
        busy=_covered(distinct),
        span=max(one.end for one in launches) - launches[0].start if launches else 0.0,
        launching=read.launching,
        steps=sum(annotation.name.startswith("ProfilerStep#") for annotation in read.annotations),
        repeats=_repeats(launches),
        unknown=tuple(sorted({one.name for one in launches if not one.known})),
        read=tuple(launches),
    )


def _distinct(launches: Sequence[Launch]) -> list[Launch]:
    """Each operator once, even if it counts as several launches."""
    return list({id(one): one for one in launches}.values())


def _shares(named: Sequence[tuple[str, Launch]]) -> list[TimeShare]:
    count: Counter[str] = Counter(name for name, _ in named)
    time: dict[str, float] = defaultdict(float)
    for name, one in {(name, id(one)): (name, one) for name, one in named}.values():
        time[name] += one.duration
    return [TimeShare(name, launches, time[name]) for name, launches in count.items()]


def _gaps(launches: Sequence[Launch]) -> list[float]:
    """Pauses between one launch and the next of the same thread or stream."""
    ended: dict[tuple[object, object], float] = {}
    gaps = []
    for one in launches:
        if one.where in ended and one.start > ended[one.where]:
            gaps.append(one.start - ended[one.where])
        ended[one.where] = max(one.end, ended.get(one.where, one.end))
    return gaps


def _covered(launches: Sequence[Launch]) -> float:
    """The time in which at least one launch runs; ``launches`` are in order of their begin."""
    total, until = 0.0, float("-inf")
    for one in launches:
        total += max(one.end - max(one.start, until), 0.0)
        until = max(until, one.end)
    return total


def _repeats(launches: Sequence[Launch]) -> tuple[RepeatedLaunches, ...]:
    """Sequences that occur three times in a row or more, the longest first."""
    names = [(one.name, one.source) for one in launches]
    runs = sorted(find_repetitions(names), key=lambda run: -run.period * run.count)
    return tuple(
        RepeatedLaunches(
            run.period,
            run.count,
            tuple(name for name, _ in names[run.start : run.start + min(run.period, 8)]),
            names[run.start][1],
            run.start,
        )
        for run in runs[:_REPEATS_SHOWN]
    )
