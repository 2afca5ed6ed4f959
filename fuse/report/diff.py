"""Compare two saved reports of ``fuse show --json``, before and after a change of a model, a pass or fuse itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fuse.errors import FuseError
from fuse.report.columns import columns, signed
from fuse.report.report import SCHEMA_VERSION

COUNTS = ("small_ops", "nodes", "flops", "bytes", "peak_bytes")


def read(path: Path) -> dict[str, Any]:
    """A saved report of any schema version. Raises ``FuseError`` for any other file."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FuseError(f"cannot read {path}: {error.strerror}; save one with fuse show --json -o {path}") from error
    except ValueError as error:
        raise FuseError(f"{path} is not JSON ({error}); save a report with fuse show --json -o FILE") from error
    versions = range(1, SCHEMA_VERSION + 1)
    if not isinstance(report, dict) or report.get("schema_version") not in versions or "after" not in report:
        raise FuseError(
            f"{path} is not a report of schema_version 1 to {SCHEMA_VERSION}; save one with fuse show --json"
        )
    return report


def launches_after(report: dict[str, Any]) -> int:
    """Launches after the passes in a saved report, including the backward pass.

    >>> inference = {"after": {"launches": 195}}
    >>> launches_after(inference), launches_after({**inference, "backward": {"after": {"launches": 5}}})
    (195, 200)
    """
    backward = report.get("backward")
    return int(report["after"]["launches"]) + (launches_after(backward) if backward else 0)


def compare(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Differences after the passes: total launches and launches by kind, the other counts, and firings of each pass.

    Every figure is a pair of the old and the new one; figures that agree are left out, launches excepted.

    >>> count = {"launches": 3, "by_kind": {"gemm": 3}} | dict.fromkeys(COUNTS, 0)
    >>> report = {"after": count, "fired": []}
    >>> compare(report, report)
    {'launches': [3, 3], 'by_kind': {}, 'counts': {}, 'fired': {}}
    """
    before, after = old["after"], new["after"]
    return {
        "launches": [before["launches"], after["launches"]],
        "by_kind": _changed(before["by_kind"], after["by_kind"]),
        "counts": _changed({name: before[name] for name in COUNTS}, {name: after[name] for name in COUNTS}),
        "fired": _changed(_fired(old), _fired(new)),
    }


def diff_table(changes: dict[str, Any], old: str, new: str) -> RenderableType:
    """The result of ``compare`` as a table, its columns named after the two files."""
    rows = [_row("launches", changes["launches"])]
    rows += [_row(f"  {kind}", pair) for kind, pair in changes["by_kind"].items()]
    rows += [_row(name, pair) for name, pair in changes["counts"].items()]
    tables: list[RenderableType] = [columns(["after the passes, predicted", old, new, "difference"], rows)]
    if changes["fired"]:
        rewrites = [_row(name, pair) for name, pair in changes["fired"].items()]
        tables += [Text(), columns(["fired", old, new, "difference"], rewrites)]
    return Group(*tables)


def _changed(old: dict[str, int], new: dict[str, int]) -> dict[str, list[int]]:
    pairs = {name: [old.get(name, 0), new.get(name, 0)] for name in dict.fromkeys([*old, *new])}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _fired(report: dict[str, Any]) -> dict[str, int]:
    return {
        f"{one['pass']} ({one['pattern']})" if one["pattern"] else one["pass"]: one["count"] for one in report["fired"]
    }


def _row(label: str, pair: list[int]) -> list[str]:
    return [label, f"{pair[0]:,}", f"{pair[1]:,}", signed(pair[1] - pair[0])]
