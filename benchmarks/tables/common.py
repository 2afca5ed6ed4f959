"""Shared by the tables: when figures count, and how times, ratios, launches and conditions are written."""

from __future__ import annotations

from typing import Any

BUSY = 1.25
"""Load a core above which something besides the benchmark, which uses all cores, was running."""

OVERLOADED = 2.0
"""Load a core above which wall times and their ratios say nothing, and are left out; launches still hold."""

SLOWER = 0.95
"""Of eager's speed: less is a defect."""

LATE_SECONDS = 15
"""Limit of a first call of a published model, in seconds."""

LEFT_OUT = "-"

PEERS = ("eager", "compile", "tuned")
"""The contenders beside fuse, in the order of the columns."""

FIRST_CALLS = (("compile", "compile"), ("fuse", "fused"))
"""How the table names whose first call it is."""


def speed_table(results: dict[str, Any]) -> list[str]:
    """A row a case: times, ratios with quartiles, launches and first calls."""
    shown = not overloaded(results)
    peers = [peer for peer in PEERS if any(peer in case["ratios"] for case in results["cases"])]
    titles = [
        "command",
        *(f"{peer} ms" for peer in (*peers, "fuse")),
        *(f"{peer} / fuse" for peer in peers),
        "launches",
        "first call s",
    ]
    lines = [f"| {' | '.join(titles)} |", f"|---{'|--:' * (len(titles) - 1)}|"]
    for case in results["cases"]:
        times = {name: timing["median"] for name, timing in case["milliseconds"].items()}
        first = case["first_call_seconds"]
        cells = [
            f"`{case['command']}`",
            *(f"{times[name]:.3f}" if shown and name in times else LEFT_OUT for name in (*peers, "fused")),
            *(ratio(case["ratios"][peer]) if shown and peer in case["ratios"] else LEFT_OUT for peer in peers),
            launches(case),
            ", ".join(f"{label} {first[name]:.1f}" for label, name in FIRST_CALLS if name in first)
            if shown
            else LEFT_OUT,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def launches(case: dict[str, Any]) -> str:
    """Before and after; for a training step those of the backward pass too, and those of ``torch.compile``."""
    halves = [case[name] for name in ("observed", "observed_backward") if case.get(name)]
    compiled = f" (compile {case['compiled_launches']:,})" if case.get("compiled_launches") else ""
    return ", ".join(f"{half['before']:,} -> {half['after']:,}" for half in halves) + compiled


def overloaded(results: dict[str, Any]) -> bool:
    """Whether the machine had so much else to do that times are not shown."""
    return bool(results["load_average"] > OVERLOADED * results["machine"]["cores"])


def ratio(quartiles: dict[str, float]) -> str:
    return f"{quartiles['median']:.2f} ({quartiles['lower_quartile']:.2f} - {quartiles['upper_quartile']:.2f})"


def median(quartiles: dict[str, float]) -> str:
    return f"{quartiles['median']:.2f}"


def conditions(results: dict[str, Any]) -> str:
    """One line on what the figures hold for; it says so when the machine was not idle."""
    machine, versions = results["machine"], results["versions"]
    busy = results["load_average"] > BUSY * machine["cores"]
    return (
        f"`{results['command']}`, {results['date']}: {machine['cores']} cores of {machine['processor']}, "
        f"torch {versions['torch']}, Python {versions['python']}, load average {results['load_average']:.1f}"
        f"{' (**other programs were running: measure again**)' if busy else ''}."
    )
