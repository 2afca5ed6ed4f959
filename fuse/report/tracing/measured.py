"""Measure launches: run some calls of eager and fuse under torch's profiler, and join them with a report's record.

    eager, some calls  ->  trace  ->  launches as captured, in order   ->  line, row of ``start``
    fuse, some calls   ->  trace  ->  fuse::KIND NAME at LINE          ->  line, row at the end, kernel

Times are microseconds of one call, medians over the calls. The profiler lengthens short launches, so that its times
only compare lines and kernels with each other; ``fuse bench`` times whole calls.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import fuse
from fuse.graph.signature import Dispatch
from fuse.report.aligned import state_of
from fuse.report.report import Measured, Side
from fuse.report.tracing.profiling import silent
from fuse.report.tracing.trace_events import events
from fuse.report.tracing.trace_launches import Launch, recording
from fuse.report.tracing.trace_model import expected_launches

CALLS, SECONDS = 10, 2.0
"""The number of recorded calls of each side; fewer if they take too long."""
_CALL = "fuse measure"

Key = tuple[str, ...]
"""Key that matches launches with rows: line, and operator or kind."""


def measure(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    record: Mapping[str, Any],
    dispatches: Sequence[Dispatch],
    passes: Sequence[str] | None = None,
) -> tuple[Measured, dict[str, Any]]:
    """Time copies of a call, eager and fused; returns the times, and the ``record`` with times added."""
    sides: list[list[list[Launch]]] = []
    for fused in (False, True):
        own, own_args, own_kwargs = copy.deepcopy((model, args, dict(kwargs)))
        made = fuse.compile(own, passes=passes) if fused else own
        sides.append(_recorded(lambda made=made, a=own_args, k=own_kwargs: made(*a, **k)))  # type: ignore[misc]  # no type for a default
    before = _eager(sides[0], record, dispatches)
    after = _fused(sides[1], record)
    measured = Measured(len(sides[0]), torch.get_num_threads(), before, after)
    return measured, _with_times(record, measured)


def _recorded(call: Callable[[], Any]) -> list[list[Launch]]:
    """The launches of each recorded call, without the first calls, which compile and fill caches."""
    with torch.no_grad(), tempfile.TemporaryDirectory(prefix="fuse-measure-") as folder:
        call()
        started = time.perf_counter()
        call()
        calls = max(3, min(CALLS, int(SECONDS / max(time.perf_counter() - started, 1e-6))))
        with silent(), profile(activities=[ProfilerActivity.CPU]):
            call()  # the profiler's own first events are slow
        path = Path(folder) / f"{os.getpid()}.json"
        with silent(), profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(calls):
                with record_function(_CALL):
                    call()
        with silent():
            profiled.export_chrome_trace(str(path))
        read = recording(events(path))
    made = []
    for annotation in read.annotations:
        if annotation.name == _CALL:
            made.append([one for one in read.launches if annotation.start <= one.start < annotation.end])
    return made


def _eager(calls: Sequence[Sequence[Launch]], record: Mapping[str, Any], dispatches: Sequence[Dispatch]) -> Side:
    expected = expected_launches(dispatches)
    names = [name for name, _ in expected]
    rows = _by_key(
        (row["id"], (record["places"][row["at"]]["source"] if "at" in row else "", _base(row["target"])))
        for row in record["start"]
        if row.get("launches") and row["op"] == "call_function" and not row.get("called")
    )
    if any([one.name for one in call] != names for call in calls):
        made = len(calls[0]) if calls else 0
        return _side(
            calls, [{} for _ in calls], {}, f"eager launched {made:,} operators, not the {len(names):,} captured"
        )
    lined = [
        [(one, (source, _base(one.name))) for one, (_, source) in zip(call, expected, strict=True)] for call in calls
    ]
    lines = [_sums((key[0], one) for one, key in call) for call in lined]
    return _side(calls, lines, _assigned(lined, rows))


def _fused(calls: Sequence[Sequence[Launch]], record: Mapping[str, Any]) -> Side:
    state = state_of(record)
    inside = {node for kernel in record["kernels"] for node in kernel["nodes"]}
    rows = _by_key(
        (node, (row.source, row.kind))
        for graph in state.graphs()
        for node in state.nodes(graph)
        if node not in inside and (row := state.rows[node]).launches and row.op in ("call_function", "call_module")
    )
    keyed = [[(one, (one.source, one.kind)) for one in call] for call in calls]
    lines = [_sums((one.source, one) for one in call) for call in calls]
    return _side(calls, lines, _assigned(keyed, rows))


def _base(name: str) -> str:
    """``add`` for ``aten::add_`` and ``aten.add.Tensor``: captured graphs have no in-place operators."""
    parts = name.replace("::", ".").split(".")
    return parts[min(1, len(parts) - 1)].rstrip("_")


def _by_key(rows: Iterable[tuple[int, Key]]) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = defaultdict(list)
    for node, key in rows:
        found[key].append(node)
    return found


def _assigned(
    calls: Sequence[Sequence[tuple[Launch, Key]]], rows: Mapping[Key, Sequence[int]]
) -> dict[int, list[float]]:
    """Microseconds of each row in each call. Launches and rows of one key correspond in order, repeatedly in a loop.

    If the launches are no multiple of the rows, their order does not identify them, and no row gets a time.
    """
    times: dict[int, list[float]] = defaultdict(list)
    for call in calls:
        launched: dict[Key, list[Launch]] = defaultdict(list)
        for one, key in call:
            if not launched[key] or launched[key][-1] is not one:
                launched[key].append(one)
        for key, some in launched.items():
            nodes = rows.get(key, ())
            if not nodes or len(some) % len(nodes):
                continue
            for place, node in enumerate(nodes):
                times[node].append(sum(one.duration for one in some[place :: len(nodes)]))
    return times


def _sums(named: Iterable[tuple[str, Launch]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for name, one in {(name, id(one)): (name, one) for name, one in named}.values():
        total[name] += one.duration
    return total


def _side(
    calls: Sequence[Sequence[Launch]],
    lines: Sequence[Mapping[str, float]],
    rows: Mapping[int, Sequence[float]],
    obstacle: str = "",
) -> Side:
    names = dict.fromkeys(name for one in lines for name in one)
    busy = [sum(one.duration for one in {id(one): one for one in call}.values()) for call in calls]
    span = [max(one.end for one in call) - call[0].start if call else 0.0 for call in calls]
    return Side(
        launches=len(calls[0]) if calls else 0,
        busy=_median(busy),
        span=_median(span),
        lines={name: _median([one.get(name, 0.0) for one in lines]) for name in names},
        rows=[(node, _median(times)) for node, times in sorted(rows.items())],
        obstacle=obstacle,
    )


def _median(figures: Sequence[float]) -> float:
    return round(statistics.median(figures), 3) if figures else 0.0


def _with_times(record: Mapping[str, Any], measured: Measured) -> dict[str, Any]:
    """The record with microseconds beside lines, kernels and nodes."""
    sides = {"before": measured.before, "after": measured.after}
    ends = dict(measured.after.rows)
    lines = []
    for line in record["lines"]:
        timed = {
            name: {**line[name], "microseconds": side.lines[line["source"]]}
            for name, side in sides.items()
            if line["source"] in side.lines
        }
        lines.append({**line, **timed})
    kernels = []
    for kernel in record["kernels"]:
        known = [ends[caller] for caller in kernel["callers"] if caller in ends]
        whole = len(known) == len(kernel["callers"])
        kernels.append({**kernel, "microseconds": round(sum(known), 3)} if whole and known else kernel)
    return {
        **record,
        "lines": lines,
        "kernels": kernels,
        "microseconds": {name: [list(pair) for pair in side.rows] for name, side in sides.items()},
    }
