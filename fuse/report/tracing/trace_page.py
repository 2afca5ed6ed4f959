"""A trace of a real run as a page: the launches in their order, by kind, time and pauses; two traces side by side.

    launches of a thread or stream  ->  a chain of operators, repeats folded    middle
    kinds, lines, repeats, pauses   ->  findings, each a selection              left
    the model's source              ->  launches and time beside each line      right

The page is that of ``fuse show --html``: a trace has nodes and lines, but no rewrites.
"""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fuse.cost.profiles import DEFAULT
from fuse.errors import FuseError
from fuse.graph.sources import Line
from fuse.report.files import write
from fuse.report.tracing.trace_launches import Launch
from fuse.report.tracing.trace_report import TINY_MICROSECONDS, TraceReport, compare
from fuse.report.viewing import page

MOST_SHOWN = 20_000
"""The most launches that a page draws; of a longer trace, it draws the first ones and counts all."""
_LONGEST = 20


def trace_page(report: TraceReport, path: Path, other: TraceReport | None = None) -> None:
    """Write the page of a trace, or of two side by side, to ``path``; each call that a bench annotated is a sheet.

    Raises ``FuseError`` for a file that cannot be written.
    """
    if path.suffix != ".html":
        raise FuseError(f"cannot write {path}: its name must end in .html")
    if other is not None:
        sides = [_Sheet(report), _Sheet(other)]
        changes = compare(report, other)
        summary = f"{report.launches:,} → {other.launches:,} launches   ·   {_ms(report.span)} → {_ms(other.span)}"
        match = _alignment(sides, changes)
        sheets = [{"name": side.report.name, "report": side.to_dict()} for side in sides]
        write(path, page(f"{report.name} and {other.name}", sheets, DEFAULT, match=match, summary=summary))
        return
    parts = [{"name": part.name, "report": _Sheet(part).to_dict()} for part in report.parts or (report,)]
    write(path, page(report.name, parts, DEFAULT, sheet="call"))


class _Sheet:
    """One trace, or one annotated call of it, in the form of a page: a row for each operator that launched."""

    def __init__(self, report: TraceReport) -> None:
        self.report = report
        self.launches: list[Launch] = []
        self.ids: list[int] = []  # one for each launch; launches of one operator share it
        self.count: dict[int, int] = defaultdict(int)
        for one in report.read:
            if not self.launches or self.launches[-1] is not one:
                self.launches.append(one)
            self.ids.append(len(self.launches) - 1)
            self.count[self.ids[-1]] += 1
        lines = {str(one.source): one.source for one in self.launches if isinstance(one.source, Line)}
        self.known = lines
        self.paths = {Path(line.path).name: line.path for line in lines.values()}
        self.pauses = _pauses(self.launches)

    def to_dict(self) -> dict[str, Any]:
        """The sheet as a report of schema 2 whose record has rows and lines only, and ``trace`` and ``findings``."""
        report, shown = self.report, self.launches[:MOST_SHOWN]
        places = {source: number for number, source in enumerate(dict.fromkeys(str(one.source) for one in shown))}
        count = {"launches": report.launches, "by_kind": {share.name: share.launches for share in report.by_kind}}
        times = [[number, round(one.duration, 3)] for number, one in enumerate(shown)]
        record = {
            "files": {path: text for path in self.paths.values() if (text := "".join(linecache.getlines(path)))},
            "places": [self._place(source) for source in places],
            "inputs": {},
            "start": list(self._rows(shown, places)),
            "rewrites": [],
            "declined": [],
            "kernels": [],
            "lines": list(self._lines()),
            "microseconds": {"before": times, "after": times},
            "pauses": [[number, round(pause, 3)] for number, pause in self.pauses.items() if number < MOST_SHOWN],
        }
        return {
            "schema_version": 2,
            "target": report.name,
            "device": "a device" if report.on_device else "the processor",
            "passes": [],
            "before": count,
            "after": count,
            "loops": [],
            "trace": self._facts(),
            "findings": list(self._findings()),
            "record": record,
        }

    def _place(self, source: str) -> dict[str, Any]:
        name, _, number = source.rpartition(":")
        return {
            "source": source,
            "file": self.paths.get(name, ""),
            "line": int(number) if number.isdigit() else 0,
            "module": getattr(self.known.get(source), "module", ""),
        }

    def _rows(self, shown: Sequence[Launch], places: Mapping[str, int]) -> Iterator[dict[str, Any]]:
        last: dict[tuple[object, object], int] = {}
        for number, one in enumerate(shown):
            target = one.name.replace("::", ".") if one.name.startswith("aten::") else one.name
            before = last.get(one.where)
            last[one.where] = number
            yield {
                "id": number,
                "name": f"{one.name.removeprefix('aten::')} {number + 1:,}",
                "op": "call_function",
                "target": target,
                "kind": one.kind,
                "launches": self.count[number],
                **({"args": "%", "uses": [before]} if before is not None else {}),
                **({"at": places[str(one.source)]} if one.source else {}),
            }

    def _lines(self) -> Iterator[dict[str, Any]]:
        nodes: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(self.launches[:MOST_SHOWN]):
            nodes[str(one.source)].append(number)
        for share in self.report.by_line:
            place = self._place(share.name)
            text = linecache.getline(place["file"], place["line"]).strip() if place["file"] else ""
            cost = {"launches": share.launches, "flops": 0, "bytes": 0, "microseconds": round(share.microseconds, 3)}
            about = {"source": share.name, "file": place["file"], "text": text}
            yield {**about, "before": cost, "after": cost, "nodes": nodes[share.name], "kernels": []}

    def _facts(self) -> list[list[str]]:
        report = self.report
        idle = report.span - report.busy
        facts = [
            ["launches", f"{report.launches:,}"],
            ["in launches", _ms(report.busy)],
            ["first to last", _ms(report.span)],
            ["no launch ran for", f"{_ms(idle)} ({idle / report.span:.0%})" if report.span else ""],
            ["pauses", f"{report.gaps:,}, {report.gap:.1f} µs in the median"],
            ["tiny", f"{report.tiny.launches:,} launches {report.tiny.name.replace('us', 'µs')}"],
        ]
        if report.formula:
            facts.append(["launches by steps", report.formula])
        if report.launching:
            facts.append(["host, launching", _ms(report.launching)])
        if report.unknown:
            facts.append(["of unknown kind", ", ".join(report.unknown[:5])])
        if len(self.launches) > MOST_SHOWN:
            facts.append(["drawn", f"the first {MOST_SHOWN:,} of {len(self.launches):,} operators"])
        if (made := report.rewritten) is not None:
            fused = f"{made.before:,} → {made.after:,} launches by fuse's passes, in each of {made.calls:,} calls"
            facts.append([made.target, fused if made.calls else f"no call was found: {made.obstacle}"])
        return facts

    def _findings(self) -> Iterator[dict[str, Any]]:
        report = self.report
        by_kind: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(self.launches[:MOST_SHOWN]):
            by_kind[one.kind].append(number)
        kinds = [
            _row(share.name, f"{share.launches:,} × · {_ms(share.microseconds)}", by_kind[share.name])
            for share in report.by_kind
        ]
        repeats = []
        for again in report.repeats:
            ids = list(dict.fromkeys(self.ids[again.start : again.start + again.period * again.count]))
            names = ", ".join(name.removeprefix("aten::") for name in again.names)
            repeats.append(_row(f"{again.period:,} launches  {again.source}  {names}", f"{again.count:,} ×", ids))
        lines = [
            {
                "text": share.name,
                "beside": f"{share.launches:,} × · {_ms(share.microseconds)}",
                "select": {"type": "line", "source": share.name},
                "side": 0,
            }
            for share in report.by_line
        ]
        longest = sorted(range(len(self.launches)), key=lambda n: -self.launches[n].duration)[:_LONGEST]
        took = [_row(self._named(n), _us(self.launches[n].duration), [n]) for n in longest]
        waits = sorted(self.pauses, key=lambda n: -self.pauses[n])[:_LONGEST]
        waited = [_row(f"before {self._named(n)}", _us(self.pauses[n]), [n]) for n in waits]
        tiny = [n for n, one in enumerate(self.launches[:MOST_SHOWN]) if one.duration < TINY_MICROSECONDS]
        tinies = [_row(f"take {report.tiny.name.replace('us', 'µs')}", f"{len(tiny):,} ×", tiny)] if tiny else []
        titled = {
            "kinds": kinds,
            "what repeats": repeats,
            "lines": lines,
            "tiny launches": tinies,
            "longest launches": took,
            "longest pauses": waited,
        }
        for title, rows in titled.items():
            if rows:
                yield {"title": title, "rows": [row for row in rows if row["select"]]}

    def _named(self, number: int) -> str:
        one = self.launches[number]
        return f"{one.name.removeprefix('aten::')}  {one.source}"


def _row(text: str, beside: str, ids: Sequence[int], side: int = 0) -> dict[str, Any]:
    """One finding; launches that are not drawn cannot be selected."""
    drawn = [one for one in ids if one < MOST_SHOWN]
    select = {"type": "node", "id": drawn[0], "ids": drawn} if drawn else None
    return {"text": text, "beside": beside, "select": select, "side": side}


def _pauses(launches: Sequence[Launch]) -> dict[int, float]:
    """Microseconds between each launch and the end of the one before it in its thread or stream."""
    ended: dict[tuple[object, object], float] = {}
    found = {}
    for number, one in enumerate(launches):
        if one.where in ended and one.start > ended[one.where]:
            found[number] = one.start - ended[one.where]
        ended[one.where] = max(one.end, ended.get(one.where, one.end))
    return found


def _alignment(sides: Sequence[_Sheet], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The alignment of two traces: launches of equal name and line, in order; and the differences."""
    waiting: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, one in enumerate(sides[1].launches[:MOST_SHOWN]):
        waiting[one.name, str(one.source)].append(number)
    taken: dict[tuple[str, str], int] = defaultdict(int)
    pairs = []
    for number, one in enumerate(sides[0].launches[:MOST_SHOWN]):
        key = one.name, str(one.source)
        if taken[key] < len(waiting.get(key, ())):
            pairs.append((number, waiting[key][taken[key]]))
            taken[key] += 1
    sources = [{str(one.source) for one in side.launches if one.source} for side in sides]
    alone = [
        {a for a, _ in pairs},
        {b for _, b in pairs},
    ]
    groups = [
        {"title": "launches of a kind", "rows": list(_kinds(sides, changes))},
        {"title": "launches of a line", "rows": list(_lines(sources, changes))},
        {"title": "operators that went", "rows": list(_alone(sides[0], alone[0], 0))},
        {"title": "operators that appeared", "rows": list(_alone(sides[1], alone[1], 1))},
    ]
    return {"lines": [(one, one) for one in sorted(sources[0] & sources[1])], "nodes": pairs, "differences": groups}


def _kinds(sides: Sequence[_Sheet], changes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for kind, ((was, now), (old, new)) in changes["by_kind"].items():
        side = 0 if was else 1
        ids = [number for number, one in enumerate(sides[side].launches) if one.kind == kind]
        yield _row(kind, _both(was, now, old, new), ids, side)


def _lines(sources: Sequence[set[str]], changes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for source, ((was, now), _) in changes["by_line"].items():
        select = {"type": "line", "source": source}
        beside = f"{was:,} → {now:,}"
        yield {"text": source, "beside": beside, "select": select, "side": int(source not in sources[0])}


def _alone(sheet: _Sheet, paired: set[int], side: int) -> Iterator[dict[str, Any]]:
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, one in enumerate(sheet.launches[:MOST_SHOWN]):
        if number not in paired:
            alike[one.name.removeprefix("aten::"), str(one.source)].append(number)
    for (name, source), ids in alike.items():
        yield _row(f"{name}  {source}", f"{len(ids):,} ×", ids, side)


def _both(was: int, now: int, old: float, new: float) -> str:
    """Launches and milliseconds of two traces."""
    return f"{was:,} → {now:,} · {old / 1000:,.2f} → {new / 1000:,.2f} ms"


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:,.3f} ms"


def _us(microseconds: float) -> str:
    return f"{microseconds:,.1f} µs"
