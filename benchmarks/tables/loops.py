"""Tables of loops: against hand-tuned layers, at several lengths, on busy machines."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.common import LEFT_OUT, PEERS, launches, median, overloaded, ratio


def scans_table(results: dict[str, Any]) -> list[str]:
    """A row for each value of each scan, and one for the lines fitted to its launches and milliseconds."""
    lines = [
        "| model | at | launches, eager -> fuse | eager ms | compile ms | fuse ms | eager / fuse | compile / fuse |",
        f"|---|---{'|--:' * 6}|",
    ]
    for scan in results["cases"]:
        name, target = scan["scan"]["name"], f"`{scan['target']}`"
        for case in scan["cases"]:
            times = [case["milliseconds"][peer]["median"] for peer in ("eager", "compile", "fused")]
            ratios = [f"{case['ratios'][peer]['median']:.2f}" for peer in PEERS[:2]]
            cells = [f"{name} = {case['value']:,}", launches(case), *(f"{time:.3f}" for time in times), *ratios]
            lines.append(f"| {target} | {' | '.join(cells)} |")
        of = {what: {peer: fitted(fit, what) for peer, fit in fits.items()} for what, fits in scan["fits"].items()}
        counts = f"{of['launches']['eager']} -> {of['launches']['fused']}"
        spent = (of["milliseconds"][peer] for peer in ("eager", "compile", "fused"))
        lines.append(f"| {target} | fitted, T = {name} | {counts} | {' | '.join(spent)} | | |")
    return lines


def fitted(fit: dict[str, float], what: str) -> str:
    """The line of a fit, ``3 + 12 T`` for launches."""
    digits = 0 if what == "launches" else 4
    return f"{fit['fixed']:,.{digits}f} + {fit['each']:,.{digits}f} T"


def short_recurrent_table(results: dict[str, Any]) -> list[str]:
    """Two rows a loop, the shapes at which it gains most and least over the hand-tuned layer."""
    shown = not overloaded(results)
    loops: dict[str, list[dict[str, Any]]] = {}
    for case in results["cases"]:
        loops.setdefault(case["model"], []).append(case)
    extremes = [
        choose(cases, key=lambda case: case["ratios"]["tuned"]["median"])
        for cases in loops.values()
        for choose in (max, min)
    ]
    lines = ["| steps, batch, width | loop | tuned / fuse | eager / fuse | launches |", f"|---|---{'|--:' * 3}|"]
    for case in extremes:
        cells = [
            ", ".join(map(str, case["shape"])),
            f"`models/{case['model']}.py`",
            *(median(case["ratios"][peer]) if shown else LEFT_OUT for peer in ("tuned", "eager")),
            str(case["launches"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def recurrent_table(results: dict[str, Any]) -> list[str]:
    """A row a shape: the user's loop through fuse, the hand-tuned layer, and the loop in eager mode."""
    shown = not overloaded(results)
    lines = [
        "| loop, (steps, batch, width) | eager ms | tuned layer ms | fuse ms | eager / fuse | tuned / fuse | launches |"
    ]
    lines.append(f"|---{'|--:' * 6}|")
    for case in results["cases"]:
        times = {name: timing["median"] for name, timing in case["milliseconds"].items()}
        shape = ", ".join(map(str, case["shape"]))
        cells = [
            f"`models/{case['model']}.py` ({shape})",
            *(f"{times[name]:.3f}" if shown else LEFT_OUT for name in ("eager", "tuned", "fused")),
            *(ratio(case["ratios"][peer]) if shown else LEFT_OUT for peer in ("eager", "tuned")),
            str(case["launches"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def limit_table(results: dict[str, Any]) -> list[str]:
    """A row a shape: the loop's time, and how much of it the machine's limits explain."""
    shown = not overloaded(results)
    lines = [
        "| loop, (steps, batch, width) | fuse ms | limit / fuse, the step's product | with the input's | bound by |",
        f"|---{'|--:' * 3}|---|",
    ]
    for case in results["cases"]:
        shape = ", ".join(map(str, case["shape"]))
        cells = [
            f"`models/{case['model']}.py` ({shape})",
            f"{case['milliseconds']['fused']:.3f}" if shown else LEFT_OUT,
            *(f"{case['ratios'][limit]:.2f}" if shown else LEFT_OUT for limit in ("recurrent", "whole")),
            case["bound"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def busy_table(results: dict[str, Any]) -> list[str]:
    """A row a case and situation: times of a call, and ratios by median and by mean."""
    shown = not overloaded(results)
    lines = [
        "| what | beside | eager ms, median, 90th percentile, mean | tuned layer ms | fuse ms "
        "| eager / fuse, median, mean | tuned / fuse |",
        f"|---|---{'|--:' * 5}|",
    ]
    for case in results["cases"][0]["cases"]:
        for found in results["cases"]:
            times = found["cases"][case]
            cells = [case, found["situation"]]
            for rival in ("eager", "tuned", "fuse"):
                figures = [f"{times[rival][of]:.2f}" for of in ("median", "p90", "mean")] if rival in times else []
                cells.append(", ".join(figures) if shown and figures else LEFT_OUT)
            for rival in ("eager", "tuned"):
                both = [f"{times[rival][of] / times['fuse'][of]:.2f}" for of in ("median", "mean") if rival in times]
                cells.append(", ".join(both) if shown and both else LEFT_OUT)
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def crf_share_table(results: dict[str, Any]) -> list[str]:
    """A row a batch: a step of the tagger without its CRF, and what the CRF adds to it."""
    shown = not overloaded(results)
    lines = ["| tagger | eager ms without CRF | it adds | fuse ms without CRF | it adds |", f"|---{'|--:' * 4}|"]
    for case in results["cases"]:
        cells = [f"`{case['target']}`"]
        for who in ("eager", "fused"):
            share = case["shares"][who]
            quartiles = f"{share['median']:.0%} ({share['lower_quartile']:.0%} - {share['upper_quartile']:.0%})"
            cells += (
                [f"{case['milliseconds'][f'{who}, without']['median']:.2f}", quartiles] if shown else [LEFT_OUT] * 2
            )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def recurrent_layers_table(results: dict[str, Any]) -> list[str]:
    """A row a layer, kind and shape: torch's own step and the fused one."""
    lines = [
        "| layer | steps, batch, width | torch ms | fuse ms | torch / fuse | launches |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for case in results["cases"]:
        taken = case["milliseconds"]
        cells = [
            f"`nn.{case['layer']}`, {case['kind']}",
            ", ".join(map(str, case["shape"])),
            median(taken["torch"]),
            median(taken["fused"]),
            ratio(case["ratio"]),
            ", ".join(map(str, case["launches"])),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
