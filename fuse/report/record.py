"""The additions of schema 2 to a report: nodes, rewrites, declined candidates, kernels, and the user's lines.

    places    the line and the module that nodes come from           lines    launches, arithmetic and traffic of each
    start     the captured graph, a row for each node                kernels  source, nodes and lines of each
    rewrites  nodes each made, erased, changed and moved             declined with their nodes, by reason

``docs/report.md`` describes each key. All of it is plain values; ids are those of ``fuse.rewrite.deltas``.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch.fx import GraphModule

from fuse.cost.count import CountedCall, calls_of_dispatches, calls_of_graph
from fuse.graph.signature import Dispatch
from fuse.graph.sources import Line
from fuse.report.listing import Listed, kernels
from fuse.rewrite.deltas import CreatedNode, Delta, GraphState, Recording, Row
from fuse.rewrite.ledger import Ledger


def record_of(ledger: Ledger, dispatches: Sequence[Dispatch], graph: GraphModule) -> dict[str, Any]:
    """The ``record`` of a report, from a recorded run of the passes and the resulting ``graph``."""
    assert ledger.recording is not None
    writer = _Writer(ledger.recording)
    start = [writer.made(made) for made in ledger.recording.start.made]
    rewrites = list(writer.rewrites(ledger))
    declined = list(writer.declined())
    listed = list(writer.kernels(kernels(graph)))
    lines = list(writer.lines(calls_of_dispatches(dispatches), calls_of_graph(graph), listed))
    return {
        "files": writer.files(),
        "places": writer.places,
        "inputs": _inputs(graph),
        "start": start,
        "rewrites": rewrites,
        "declined": declined,
        "kernels": listed,
        "lines": lines,
    }


def _inputs(graph: GraphModule) -> dict[str, str]:
    """The meaning of each input of the graph, by name of its node."""
    signature = graph.meta.get("signature")
    nodes = graph.graph.find_nodes(op="placeholder")
    specs = signature.inputs if signature else ()
    return {node.name: spec.kind for node, spec in zip(nodes, specs, strict=False)}


class _Writer:
    """Converts rows, deltas and candidates to plain values, and collects their places."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.places: list[dict[str, Any]] = []
        self.final: GraphState = recording.after()
        self._known: dict[tuple[str, str], int] = {}
        self._paths: dict[str, None] = {}

    def place(self, source: str) -> int:
        """The number of a line and module among the places."""
        module = source.module if isinstance(source, Line) else ""
        if (source, module) not in self._known:
            self._known[source, module] = len(self.places)
            path, number = (source.path, source.number) if isinstance(source, Line) else ("", 0)
            self._paths[path] = None
            self.places.append({"source": str(source), "file": path, "line": number, "module": module})
        return self._known[source, module]

    def files(self) -> dict[str, str]:
        """The text of the user's readable files, by path."""
        for path in self._paths:
            linecache.checkcache(path)
        texts = {path: "".join(linecache.getlines(path)) for path in self._paths if path}
        return {path: text for path, text in texts.items() if text}

    def made(self, made: CreatedNode) -> dict[str, Any]:
        inside = {"graph": made.graph} if made.graph else {}
        return {"id": made.id, **inside, **self._values({**_shallow(made.row)})}

    def _values(self, values: dict[str, Any]) -> dict[str, Any]:
        """Fields of a row, without empty ones."""
        source = values.pop("source", "")
        if values.get("called") is not None:
            values["called"] = asdict(values["called"])
        said = {name: value for name, value in values.items() if value not in ("", 0, (), None, False)}
        return {**said, "at": self.place(source)} if source else said

    def rewrites(self, ledger: Ledger) -> Iterator[dict[str, Any]]:
        """Every delta; a numbered one with the ledger's entry for its rewrite."""
        fired = {one.number: one for one in ledger.rewrites[len(ledger.rewrites) - self._count() :]}
        first = min(fired, default=1) - 1  # rewrites of an earlier run, before gradients were taken
        for delta in self.recording.deltas:
            known = fired.get(delta.number + first)
            about: dict[str, Any] = {"number": delta.number, "pass": delta.pass_name}
            if known is not None and delta.number:
                about |= {"pattern": known.pattern, "source": known.source, "launches_saved": known.launches_saved}
            yield about | self._changes(delta)

    def _count(self) -> int:
        return sum(delta.number > 0 for delta in self.recording.deltas)

    def _changes(self, delta: Delta) -> dict[str, Any]:
        values = {
            "graph": delta.graph,
            "nodes": list(delta.nodes),
            "made": [self.made(made) for made in delta.made],
            "erased": list(delta.erased),
            "changed": [{"id": node, **self._different(different)} for node, different in delta.changed],
            "placed": [list(pair) for pair in delta.placed],
        }
        return {name: value for name, value in values.items() if value}

    def _different(self, different: Mapping[str, Any]) -> dict[str, Any]:
        """Changed fields, including those that are empty now."""
        values = dict(different)
        if "source" in values:
            values["at"] = self.place(values.pop("source"))
        if values.get("called") is not None:
            values["called"] = asdict(values["called"])
        return values

    def declined(self) -> Iterator[dict[str, Any]]:
        """The candidates, by pass, pattern and reason."""
        alike: dict[tuple[str, str | None, str], list[dict[str, Any]]] = {}
        for one in self.recording.declined:
            candidate = {"after": one.after, "source": str(one.source), "nodes": list(one.nodes)}
            alike.setdefault((one.pass_name, one.pattern, one.reason), []).append(candidate)
        for (name, pattern, reason), candidates in alike.items():
            yield {"pass": name, "pattern": pattern, "reason": reason, "candidates": candidates}

    def kernels(self, listed: Sequence[Listed]) -> Iterator[dict[str, Any]]:
        """Every generated kernel, with the nodes that call it, the nodes that it computes, and their lines."""
        by_name = {
            (graph, self.final.rows[node].name): node
            for graph in self.final.graphs()
            for node in self.final.nodes(graph)
        }
        numbers = {name: node for (_, name), node in by_name.items() if self.final.rows[node].called}
        for one in listed:
            callers = [numbers[name] for name in one.callers if name in numbers]
            inside = [node for caller in callers for node in self._inside(caller)]
            rows = [self.final.rows[node] for node in inside]
            own = [self.final.rows[node] for node in callers]
            yield {
                "name": one.callers[0],
                "callers": callers,
                "nodes": inside,
                "lines": list(dict.fromkeys(str(row.source) for row in rows if row.source)),
                "launches": sum(row.launches for row in own),
                "flops": sum(row.flops for row in own),
                "bytes": sum(row.bytes for row in own),
                "sizes": [dict(sizes) for sizes in one.sizes],
                "code": one.code,
                "reason": one.reason,
            }

    def _inside(self, node: int) -> Iterator[int]:
        called = self.final.rows[node].called
        if called is None or called.graph < 0:
            return
        for inner in self.final.nodes(called.graph):
            if self.final.rows[inner].op not in ("placeholder", "output"):
                yield inner
                yield from self._inside(inner)

    def lines(
        self, before: Iterator[CountedCall], after: Iterator[CountedCall], listed: Sequence[Mapping[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Every line with its costs before and after, its nodes in the captured graph, and its kernels."""
        costs = [_by_line(calls) for calls in (before, after)]
        nodes: dict[str, list[int]] = {}
        for made in self.recording.start.made:
            if made.row.source:
                nodes.setdefault(made.row.source, []).append(made.id)
        found: dict[str, list[int]] = {}
        for number, kernel in enumerate(listed):
            for line in kernel["lines"]:
                found.setdefault(line, []).append(number)
        sources = dict.fromkeys([*nodes, *costs[0], *costs[1]])
        for source in sources:
            if source:
                self.place(source)
                text = linecache.getline(source.path, source.number).strip() if isinstance(source, Line) else ""
                yield {
                    "source": str(source),
                    "file": source.path if isinstance(source, Line) else "",
                    "text": text,
                    "before": costs[0].get(source, _nothing()),
                    "after": costs[1].get(source, _nothing()),
                    "nodes": nodes.get(source, []),
                    "kernels": found.get(source, []),
                }


def _shallow(row: Row) -> dict[str, Any]:
    """The fields of a row, not copied."""
    return dict(vars(row))


def _nothing() -> dict[str, int]:
    return {"launches": 0, "flops": 0, "bytes": 0}


def _by_line(calls: Iterator[CountedCall]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter[str]] = {}
    for call in calls:
        count = total.setdefault(call.source, Counter())
        count["launches"] += call.launches * call.repeats
        count["flops"] += call.work.flops * call.repeats
        count["bytes"] += call.work.bytes * call.repeats
    return {source: dict(count) for source, count in total.items()}
