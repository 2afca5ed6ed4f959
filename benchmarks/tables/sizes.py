"""Tables of sizes that vary."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.common import LEFT_OUT, overloaded


def sizes_table(results: dict[str, Any]) -> list[str]:
    """A row a model: seconds of forty calls, calls that compiled, and a later call with a new size."""
    lines = [
        "| model | 40 calls s: eager | fuse | compile | calls that compile | that run eager "
        "| later call ms: eager | fuse | compile | fuse, captured | own program / program for all sizes "
        "| new sizes beyond 1.5 eager + 5 ms |",
        f"|---{'|--:' * 11}|",
    ]
    shown = not overloaded(results)
    for case in results["cases"]:
        sides = [case.get(name) for name in ("eager", "fuse", "compile")]
        seconds = [f"{side['seconds']:.2f}" if shown and side else LEFT_OUT for side in sides]
        later = [f"{1000 * side['later']:.1f}" if shown and side else LEFT_OUT for side in sides]
        fuse = case["fuse"]
        capture, own = (f"{1000 * fuse['capture']:.1f}", f"{fuse['of_own']:.2f}") if shown else (LEFT_OUT, LEFT_OUT)
        beyond = case.get("beyond")
        over = f"{beyond['over']} of {beyond['new']}" if beyond else LEFT_OUT
        cells = [case["model"], *seconds, str(fuse["compiled"]), str(fuse["ran_eager"]), *later, capture, own, over]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def lengths_table(results: dict[str, Any]) -> list[str]:
    """A row a model and way of making batches: the processor's time a batch, and what fuse captured and compiled."""
    lines = [
        "| model | batches | filled | eager ms | fuse ms | later batch ms: eager | fuse "
        "| calls that compile | sizes captured | with the graph of others | calls that run eager "
        "| launches a fused batch |",
        f"|---|---{'|--:' * 10}|",
    ]
    for case in results["cases"]:
        eager, fuse = case["eager"], case["fuse"]
        times = [1000 * side["seconds"] / case["batches"] for side in (eager, fuse)]
        times += [1000 * side["later"] for side in (eager, fuse)]
        training = ", trained" if case["kind"] == "training" else ""
        cells = [
            f"{case['model']}{training}",
            case["way"],
            f"{case['filled']:.2f}",
            *(f"{taken:.2f}" for taken in times),
            *(f"{fuse.get(name, 0):,}" for name in ("compiled", "captured", "resized", "ran_eager")),
            f"{fuse['launches']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
