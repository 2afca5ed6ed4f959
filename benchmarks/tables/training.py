"""Tables of training steps, convolutions and training curves."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.tables.common import LEFT_OUT, overloaded


def curves_table(results: dict[str, Any]) -> list[str]:
    """A row a model: how long eager and fused train to one loss, and how far their curves are apart."""
    shown = not overloaded(results)
    lines = [
        "| model | loss | steps, eager | fused | curves differ by at most | step, eager ms | fused ms |",
        f"|---{'|--:' * 6}|",
    ]
    for case in results["cases"]:
        times = (f"{case['milliseconds'][name]:.0f}" if shown else LEFT_OUT for name in ("eager", "fused"))
        cells = [
            f"`models/{case['model']}.py`",
            f"{case['target']:g}",
            *(str(case["steps"][name]) for name in ("eager", "fused")),
            f"{case['largest_relative_difference']:.0e}",
            *times,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def training_steps_table(results: dict[str, Any]) -> list[str]:
    """A row a model, and one for all loops of the tests' table."""
    lines = [
        "| loop | call us | training step us | step / call | eager's step / call | launches |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    cells = [case for case in results["cases"] if case["target"].startswith("cell ")]
    for case in results["cases"]:
        if case not in cells:
            name = f"`{case['target']}`"
            taken = [f"{case['fuse']['quiet'][way]:.0f}" for way in ("call", "step")]
            ratios = [f"{case[who]['ratio']['quiet']:.1f}" for who in ("fuse", "eager")]
            launches = ", ".join(map(str, case["launches"]))
            lines.append(f"| {' | '.join([name, *taken, *ratios, launches])} |")
    found = {who: sorted(cell[who]["ratio"]["quiet"] for cell in cells) for who in ("fuse", "eager")}
    told = [f"{statistics.median(one):.1f} ({one[0]:.1f} - {one[-1]:.1f})" for one in found.values()]
    lines.append(f"| {len(cells)} small loops of the tests, median (least - most) |  |  | {' | '.join(told)} |  |")
    return lines


def convolutions_table(results: dict[str, Any]) -> list[str]:
    """A row a convolution: times, and what eager and ``torch.compile`` take for each of fuse's."""
    lines = [
        "| convolution | call us | eager / fuse | compile / fuse | step us | eager / fuse | compile / fuse |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for case in results["cases"]:
        cells = [f"`{case['target']}`"]
        for way in ("call", "step"):
            times = case[way]
            ratios = [f"{times[peer] / times['fuse']:.2f}" for peer in ("eager", "compile")]
            cells += [f"{times['fuse']:.0f}", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
