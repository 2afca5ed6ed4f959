"""A trace, or two of them, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fuse.report.columns import columns
from fuse.report.tracing.trace_report import TimeShare, TraceReport

_LINES_SHOWN = 12
_UNKNOWN_SHOWN = 5


def trace_table(report: TraceReport) -> RenderableType:
    """Launches by kind and line, overhead of the host, repeats, and launches with fuse."""
    return Group(*_joined(report))


def _joined(report: TraceReport) -> Iterator[RenderableType]:
    where = "on a device" if report.on_device else "on the processor"
    yield Text(f"{report.name}, launches {where}, observed", style="bold")
    if report.parts:
        yield Text()
        yield columns(
            ["call", "launches", "busy (ms)", "span (ms)", "launches a step"],
            [[p.name, f"{p.launches:,}", _ms(p.busy), _ms(p.span), p.formula] for p in report.parts],
        )
        for part in report.parts:
            yield Text()
            yield Text(f"{part.name}", style="bold")
            yield from _one(part)
    else:
        yield from _one(report)
    if report.rewritten is not None:
        made = report.rewritten
        yield Text()
        if made.calls:
            calls = "1 call" if made.calls == 1 else f"{made.calls:,} calls"
            yield Text(
                f"{made.target}: {calls} of {made.before:,} launches in the trace; "
                f"fuse's passes make {made.after:,} of each"
            )
            yield Text(f"next: fuse show {made.target}")
        else:
            yield Text(f"{made.target}: no call of it was found: {made.obstacle}")


def _one(report: TraceReport) -> Iterator[RenderableType]:
    yield Text()
    yield columns(
        ["kind", "launches", "ms", "of the time"],
        [
            ["launches", f"{report.launches:,}", _ms(sum(s.microseconds for s in report.by_kind)), ""],
            *([f"  {s.name}", f"{s.launches:,}", _ms(s.microseconds), _part(s, report)] for s in report.by_kind),
            [f"tiny ({report.tiny.name})", f"{report.tiny.launches:,}", _ms(report.tiny.microseconds), ""],
        ],
    )
    if report.by_line:
        yield Text()
        shown = report.by_line[:_LINES_SHOWN]
        yield columns(
            ["launches by line", "launches", "ms"], [[s.name, f"{s.launches:,}", _ms(s.microseconds)] for s in shown]
        )
        if len(report.by_line) > len(shown):
            yield Text(f"and {len(report.by_line) - len(shown):,} more lines")
    yield Text()
    idle = report.span - report.busy
    share = f" ({idle / report.span:.0%})" if report.span else ""
    yield Text(f"busy {_ms(report.busy)} ms of {_ms(report.span)} ms; no launch ran for {_ms(idle)} ms{share}")
    yield Text(f"{report.gaps:,} gaps between launches, {report.gap:.1f} us in the median")
    if report.launching:
        yield Text(f"the host spent {_ms(report.launching)} ms in calls that launch")
    if report.steps:
        yield Text(f"{report.steps:,} steps of the profiler, {report.launches / report.steps:,.1f} launches each")
    for number, repeat in enumerate(report.repeats):
        names = ", ".join(name.removeprefix("aten::") for name in repeat.names)
        more = ", ..." if repeat.period > len(repeat.names) else ""
        at = f" at {repeat.source}" if repeat.source else ""
        yield Text(f"repeats: {repeat.count:,} times {repeat.period:,} launches{at}: {names}{more}", no_wrap=True)
        if number == 0:
            yield Text(f"launches = {report.formula}")
    if report.unknown:
        some = ", ".join(report.unknown[:_UNKNOWN_SHOWN])
        yield Text(f"{len(report.unknown):,} names of unknown kind, counted as other: {some}")


def comparison_table(changes: Mapping[str, Any]) -> RenderableType:
    """Two traces: launches and milliseconds of each, by kind and by line."""
    first, second = changes["traces"]
    rows = [["launches", *map("{:,}".format, changes["launches"]), *map(_ms, changes["busy"])]]
    rows += [_row(f"  {name}", pair) for name, pair in changes["by_kind"].items()]
    lines = [_row(name, pair) for name, pair in list(changes["by_line"].items())[:_LINES_SHOWN]]
    titles = ["launches", "launches", "ms", "ms"]
    parts: list[RenderableType] = [Text(f"{first} -> {second}, observed", style="bold"), Text()]
    parts.append(columns(["kind", *titles], rows))
    if lines:
        parts += [Text(), columns(["line", *titles], lines)]
    spans = " -> ".join(f"{_ms(span)} ms" for span in changes["span"])
    return Group(*parts, Text(), Text(f"from the first launch to the end of the last: {spans}"))


def _row(name: str, pair: Any) -> list[str]:
    (before, after), (old, new) = pair
    return [name, f"{before:,}", f"{after:,}", _ms(old), _ms(new)]


def _part(share: TimeShare, report: TraceReport) -> str:
    total = sum(one.microseconds for one in report.by_kind)
    return f"{share.microseconds / total:.0%}" if total else ""


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:,.3f}"
