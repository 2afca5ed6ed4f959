"""Two reports side by side: corresponding lines, and the corresponding operators of each.

old.py:12  y = relu(x)            new.py:14  y = relu(x)          lines by their text, in order
  relu, region                      relu                          the operators of a line by name, in order
                                                                  region: only in the old one
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fuse.errors import FuseError
from fuse.report.files import write
from fuse.report.viewing import page
from fuse.rewrite.deltas import Called, CreatedNode, Delta, GraphState, Row

Report = Mapping[str, Any]
PLAIN = ("placeholder", "output", "get_attr")


def diff_page(old: Report, new: Report, names: tuple[str, str], path: Path) -> None:
    """Write the page of two saved reports to ``path``.

    Raises ``FuseError`` for a report without its record, and for a file that cannot be written.
    """
    if path.suffix != ".html":
        raise FuseError(f"cannot write {path}: its name must end in .html")
    for report, name in zip((old, new), names, strict=True):
        if "record" not in report:
            raise FuseError(f"{name} has no record of its rewrites; save it again with fuse show --json -o {name}")
    sheets = [{"name": name, "report": report} for name, report in zip(names, (old, new), strict=True)]
    before, after = old["after"]["launches"], new["after"]["launches"]
    summary = f"after the passes: {before:,} → {after:,} launches"
    text = page(f"{names[0]} and {names[1]}", sheets, old["device"], match=alignment(old, new), summary=summary)
    write(path, text)


def alignment(old: Report, new: Report) -> dict[str, Any]:
    """The alignment of two reports: pairs of ``lines``, pairs of ``nodes`` after the passes, and ``differences``."""
    lines = dict(_lines(old["record"], new["record"]))
    states = [state_of(report["record"]) for report in (old, new)]
    pairs, alone = _nodes(states, lines)
    differences = [
        {"title": "launches of a line", "rows": list(_changed_lines(old["record"], new["record"], lines))},
        {"title": "operators that went", "rows": list(_alone(states[0], alone[0], 0))},
        {"title": "operators that appeared", "rows": list(_alone(states[1], alone[1], 1))},
        {"title": "reasons that went", "rows": list(_reasons(old["record"], new["record"], 0))},
        {"title": "reasons that appeared", "rows": list(_reasons(new["record"], old["record"], 1))},
    ]
    return {"lines": list(lines.items()), "nodes": pairs, "differences": differences}


def state_of(record: Mapping[str, Any], fuel: int | None = None) -> GraphState:
    """The graphs of a saved record after its rewrites: all, or the first ``fuel``.

    >>> row = {"id": 0, "name": "x", "op": "placeholder", "target": "x"}
    >>> state_of({"places": [], "start": [row], "rewrites": []}).nodes()
    [0]
    """
    state = GraphState()
    last: dict[int, int] = {}
    for values in record["start"]:
        made = _made(values, record["places"])
        state.apply(Delta(0, "", 0, made=(made,), placed=((made.id, last.get(made.graph, -1)),)))
        last[made.graph] = made.id
    for values in record["rewrites"]:
        if fuel is not None and values["number"] > fuel:
            break
        state.apply(
            Delta(
                values["number"],
                values["pass"],
                values.get("graph", 0),
                made=tuple(_made(one, record["places"]) for one in values.get("made", ())),
                erased=tuple(values.get("erased", ())),
                changed=tuple((one["id"], _fields(one, record["places"])) for one in values.get("changed", ())),
                placed=tuple((node, after) for node, after in values.get("placed", ())),
            )
        )
    return state.settled()


def _made(values: Mapping[str, Any], places: Sequence[Mapping[str, Any]]) -> CreatedNode:
    plain = {"args": "", "uses": (), "value": "", "source": ""}
    return CreatedNode(values["id"], values.get("graph", 0), Row(**{**plain, **_fields(values, places)}))


def _fields(values: Mapping[str, Any], places: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {name: value for name, value in values.items() if name not in ("id", "graph", "at")}
    if "at" in values:
        found["source"] = places[values["at"]]["source"]
    if "uses" in found:
        found["uses"] = tuple(found["uses"])
    if found.get("called"):
        called = dict(found["called"])
        found["called"] = Called(**{**called, "reads": tuple(tuple(read) for read in called["reads"])})
    return found


def _lines(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of lines of files with one name, or of the only file of each report."""
    files = [record["files"] for record in (old, new)]
    by_name = {Path(path).name: path for path in files[1]}
    for path, text in files[0].items():
        other = by_name.get(Path(path).name) or (next(iter(files[1])) if len(files[0]) == len(files[1]) == 1 else None)
        if other is None:
            continue
        left, right = text.splitlines(), files[1][other].splitlines()
        for tag, a, b, c, d in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
            if tag == "equal" or (tag == "replace" and b - a == d - c):
                for step in range(b - a):
                    yield f"{Path(path).name}:{a + step + 1}", f"{Path(other).name}:{c + step + 1}"


def _nodes(states: Sequence[GraphState], lines: Mapping[str, str]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Pairs of nodes with the same operator and line, and the nodes of each graph without a partner."""
    pairs: list[tuple[int, int]] = []
    alone = [_operators(state) for state in states]
    for with_place in (True, False):  # an operator may be inside a kernel in one graph only
        waiting: dict[tuple[object, ...], list[int]] = {}
        for node in reversed(alone[1]):
            waiting.setdefault(_token(states[1], node, with_place), []).append(node)
        left = []
        for node in alone[0]:
            source, *what = _token(states[0], node, with_place)
            partners = waiting.get((lines.get(str(source), source), *what))
            if partners:
                pairs.append((node, partners.pop()))
            else:
                left.append(node)
        alone = [left, sorted(node for some in waiting.values() for node in some)]
    return pairs, alone


def _operators(state: GraphState) -> list[int]:
    return [node for graph in state.graphs() for node in state.nodes(graph)]


def _token(state: GraphState, node: int, with_place: bool) -> tuple[object, ...]:
    """Key of a node: its line, its operator and, with ``with_place``, whether it is inside a body."""
    row = state.rows[node]
    what = row.called.kind if row.called else row.name if row.op in PLAIN else row.target
    return row.source, what, with_place and state.graph_of[node] > 0


def _changed_lines(
    old: Mapping[str, Any], new: Mapping[str, Any], lines: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Lines whose launches after the passes differ, and lines that only one report has."""
    left, right = ({one["source"]: one for one in record["lines"]} for record in (old, new))
    for source, line in left.items():
        partner = right.get(lines.get(source, source))
        was, now = line["after"]["launches"], partner["after"]["launches"] if partner else 0
        if was != now:
            select = {"type": "line", "source": source}
            yield {"text": f"{source}  {line['text']}", "beside": f"{was:,} → {now:,}", "select": select, "side": 0}
    known = {lines.get(source, source) for source in left}
    for source, line in right.items():
        if source not in known and line["after"]["launches"]:
            select = {"type": "line", "source": source}
            beside = f"0 → {line['after']['launches']:,}"
            yield {"text": f"{source}  {line['text']}", "beside": beside, "select": select, "side": 1}


def _alone(state: GraphState, nodes: Sequence[int], side: int) -> Iterator[dict[str, Any]]:
    """Operators without a partner, by line."""
    alike: dict[tuple[str, str], list[int]] = {}
    for node in nodes:
        row = state.rows[node]
        if row.launches or row.called:
            what = row.called.kind if row.called else row.target.removeprefix("aten.").partition(".")[0]
            alike.setdefault((row.source, what), []).append(node)
    for (source, what), some in alike.items():
        select = {"type": "node", "id": some[0], "ids": some}
        yield {"text": f"{what}  {source}", "beside": f"{len(some):,} ×", "select": select, "side": side}


def _reasons(one: Mapping[str, Any], other: Mapping[str, Any], side: int) -> Iterator[dict[str, Any]]:
    """Reasons that decline more candidates in ``one`` than in the ``other``."""
    counts = [
        Counter({(r["pass"], r["pattern"], r["reason"]): len(r["candidates"]) for r in record["declined"]})
        for record in (one, other)
    ]
    for group, reason in enumerate(one["declined"]):
        key = (reason["pass"], reason["pattern"], reason["reason"])
        if counts[0][key] > counts[1][key]:
            select = {"type": "reason", "group": group}
            text = f"{reason['pattern'] or reason['pass']}: {reason['reason']}"
            yield {"text": text, "beside": f"{counts[0][key] - counts[1][key]:,} ×", "select": select, "side": side}
