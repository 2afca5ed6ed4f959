"""Tables of narrow dtypes."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.common import LEFT_OUT


def precision_table(results: dict[str, Any]) -> list[str]:
    """A row a model and dtype: decibels of the result, and how many operators stay in float32 for the target."""
    lines = [
        "| model | dtype | SQNR dB | operators kept | SQNR dB with them | fused | launches |",
        f"|---|---{'|--:' * 5}|",
    ]
    for case in results["cases"]:
        named = [f"`models/{case['model']}.py`", case["dtype"]]
        if case.get("keep") is None:
            lines.append(f"| {' | '.join(named)} | {case['reason']} | | | | |")
            continue
        decibels = [
            f"{case[name]:.1f}" if case[name] is not None else LEFT_OUT for name in ("before", "after", "fused")
        ]
        launches = " -> ".join(f"{n:,}" for n in case["launches"])
        cells = [*named, decibels[0], str(len(case["keep"])), *decibels[1:], launches]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def narrow_table(results: dict[str, Any]) -> list[str]:
    """A row a model and dtype: decibels of each way to run it; the best, and what is as good to a tenth, in bold."""
    ways = ("eager", "fuse", "compile", "emulated")
    lines = [
        "| model | dtype | eager | fuse | compile | compile, emulating casts |",
        f"|---|---{'|--:' * 4}|",
    ]
    for case in results["cases"]:
        found = {way: case["sqnr"].get(way) for way in ways}
        best = max((value for value in found.values() if isinstance(value, float)), default=0.0)
        cells = []
        for value in found.values():
            if not isinstance(value, float):
                cells.append(LEFT_OUT if value is None else "raises")
            else:
                cells.append(f"**{value:.1f}**" if value > best - 0.1 else f"{value:.1f}")
        settings = "".join(f" --set {one}" for one in case["settings"])
        named = [f"`models/{case['model']}.py{settings}`", case["dtype"]]
        lines.append(f"| {' | '.join([*named, *cells])} |")
    return lines
