"""Tables of the models of published packages."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from benchmarks.tables.common import LATE_SECONDS, SLOWER
from benchmarks.zoo_world import is_equal


def zoo_table(results: dict[str, Any]) -> list[str]:
    """A row a package: how many models were run, are right and ran fused as a whole, at batch 1, 8 and in training.
    What took too long or failed is not right."""
    kinds = {"check_1": "batch 1", "check_8": "batch 8", "train_1": "trained"}
    titles = [title for kind in kinds.values() for title in (f"{kind}, right", "without fallback")]
    lines = [f"| package | models | {' | '.join(titles)} |", f"|---{'|--:' * (1 + len(titles))}|"]
    packages = dict.fromkeys(case["name"].partition(":")[0] for case in results["cases"])
    rows = [(package, [c for c in results["cases"] if c["name"].startswith(f"{package}:")]) for package in packages]
    for package, cases in [*rows, ("together", results["cases"])]:
        cells = [package, str(len(cases))]
        for kind in kinds:
            known = [case[kind] for case in cases if kind in case]
            right = sum(one.get("passed", False) for one in known)
            whole = sum(not one.get("fallbacks", True) for one in known)
            cells += [f"{right} of {len(known)}", f"{whole} of {len(known)}"] if known else ["-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    found = [case[kind].get("commit", "older") for case in results["cases"] for kind in kinds if kind in case]
    states = ", ".join(f"{commit}: {count}" for commit, count in Counter(found).most_common())
    return [*lines, "", f"Figures by the commit of the engine that they hold for: {states}."]


def zoo_world_table(results: dict[str, Any]) -> list[str]:
    """How many models run eager behind fuse as in a process without it, bit by bit."""
    cases = results["cases"]
    together = sorted({case["together"] for case in cases})
    return [
        "| eager, in a process that ran the models through fuse before | |",
        "|---|--:|",
        f"| models | {len(cases)} |",
        f"| equal bit by bit to a process without fuse | {sum(map(is_equal, cases))} |",
        f"| models in one process | {' to '.join(map(str, sorted({together[0], together[-1]})))} |",
    ]


def zoo_speeds_table(results: dict[str, Any]) -> list[str]:
    """A row a package: what eager and ``torch.compile`` take for each second of fuse's, and first calls, of models that
    fill a cache in the first call and are captured in the second left out."""
    titles = ["timed", "eager / fuse", "least", "at batch 8", "eager / fuse", "least"]
    titles += ["slowest first call s", "against compile", "compile / fuse", "least"]
    lines = [f"| package | {' | '.join([*titles, 'most of its first call'])} |", f"|---{'|--:' * (1 + len(titles))}|"]
    timed = [case for case in results["cases"] if "ratios" in case.get("bench_1", {})]
    packages = dict.fromkeys(case["name"].partition(":")[0] for case in timed)
    rows = [(package, [c for c in timed if c["name"].startswith(f"{package}:")]) for package in packages]
    for package, cases in [*rows, ("together", timed)]:
        both = [case["compile_1"] for case in cases if "ratios" in case.get("compile_1", {})]
        firsts, shares = _first_calls(cases), _shares_of_first_calls(both)
        eights = [case["bench_8"] for case in cases if "ratios" in case.get("bench_8", {})]
        cells = [package, str(len(cases)), *_mean_and_least([one["bench_1"] for one in cases], "eager")]
        cells += [str(len(eights)), *_mean_and_least(eights, "eager")]
        cells += [f"{max(firsts.values()):.1f}" if firsts else "-", str(len(both)), *_mean_and_least(both, "compile")]
        cells.append(f"{max(shares):.2f}" if shares else "-")
        lines.append(f"| {' | '.join(cells)} |")
    slow = [
        f"{case['name']} at batch {kind.partition('_')[2]}"
        for case in timed
        for kind in ("bench_1", "bench_8")
        if "ratios" in case.get(kind, {}) and case[kind]["ratios"]["eager"]["median"] < SLOWER
    ]
    late = [f"{name} ({seconds:.1f} s)" for name, seconds in firsts.items() if seconds > LATE_SECONDS]
    found = Counter(
        case[kind]["commit"] for case in timed for kind in ("bench_1", "bench_8", "compile_1") if kind in case
    )
    states = ", ".join(f"{commit}: {count}" for commit, count in found.most_common())
    return [
        *lines,
        "",
        f"Below {SLOWER} of eager: {', '.join(slow) or 'none'}. First calls above {LATE_SECONDS} s: "
        f"{', '.join(late) or 'none'}.",
        f"First calls take at most a third of `torch.compile`'s in {sum(one <= 1 / 3 for one in shares)} of "
        f"{len(shares)} models (median {statistics.median(shares):.2f}).",
        f"Figures by the commit of the engine that they hold for: {states}.",
    ]


def _first_calls(cases: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of the first calls that ran fused, by the models' names."""
    timed = {case["name"]: case["bench_1"] for case in cases}
    return {name: one["first_call_seconds"]["fused"] for name, one in timed.items() if not one["fallbacks"]}


def _shares_of_first_calls(timed: list[dict[str, Any]]) -> list[float]:
    """Fuse's first calls, for each second of ``torch.compile``'s."""
    firsts = [one["first_call_seconds"] for one in timed if not one["fallbacks"]]
    return [one["fused"] / one["compile"] for one in firsts]


def _mean_and_least(timed: list[dict[str, Any]], peer: str) -> list[str]:
    """The geometric mean of what ``peer`` takes for each second of fuse's, and the least."""
    found = [one["ratios"][peer]["median"] for one in timed]
    return [f"{statistics.geometric_mean(found):.2f}", f"{min(found):.2f}"] if found else ["-", "-"]
