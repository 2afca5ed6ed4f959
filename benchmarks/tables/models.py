"""Tables of the models in ``models/`` and of those of the study."""

from __future__ import annotations

import re
import statistics
from typing import Any

from benchmarks.tables.common import LEFT_OUT, PEERS, median, overloaded, ratio

IN_SHORT = (
    *(f"models/{name}.py" for name in ("albert", "bert_crf", "rnnsearch", "texting")),
    *(f"models/{name}.py" for name in ("ligru", "lstm_layernorm", "resnet18", "transformer_encoder")),
)
"""The models in the README: those of the study, two loops, an image network, and one that gains little."""


def short_speed_table(results: dict[str, Any]) -> list[str]:
    """A row for some of the models, ``IN_SHORT``: the ratios, launches and first calls alone."""
    shown = not overloaded(results)
    lines = [
        "| model | eager / fuse | compile / fuse | launches, eager -> fuse | launches, compile | first call s, fuse "
        "| first call s, compile |",
        f"|---{'|--:' * 6}|",
    ]
    for case in results["cases"]:
        first, observed, compiled = case["first_call_seconds"], case["observed"], case.get("compiled_launches")
        target = " ".join(re.findall(r"models/\w+\.py|\w+=\d+", case["command"]))
        if target not in IN_SHORT:
            continue
        cells = [
            f"`{target}`",
            *(median(case["ratios"][peer]) if shown and peer in case["ratios"] else LEFT_OUT for peer in PEERS[:2]),
            f"{observed['before']:,} -> {observed['after']:,}",
            f"{compiled:,}" if compiled else LEFT_OUT,
            *(f"{first[peer]:.1f}" if shown and peer in first else LEFT_OUT for peer in ("fused", "compile")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def study_table(results: dict[str, Any]) -> list[str]:
    """A row a model and device: the fitted costs, and how far they are off where they were not fitted."""
    lines = [
        "| model | device | fixed ms | ms a sample | off at batch 2 | at 4 | at 16 |",
        f"|---|---{'|--:' * 5}|",
    ]
    for case in results["cases"]:
        rows = [
            (name, *(f"{one[cost]:.2f}" for cost in ("fixed_ms", "per_sample_ms")), one["errors"])
            for name, one in case["devices"].items()
        ]
        rows.append(("V100 / NPU", "", "", case["ratio_errors"]))
        for device, fixed, sample, errors in rows:
            tested = [f"{100 * errors[batch]:+.0f} %" for batch in ("2", "4", "16")]
            lines.append(f"| {' | '.join([case['model'], device, fixed, sample, *tested])} |")
    return lines


def study_launches_table(results: dict[str, Any]) -> list[str]:
    """A row a model: launches of a training step, the fixed milliseconds of each device for one of them, and the
    milliseconds that the device profiles model for forward and backward."""
    lines = [
        "| command | forward | backward | optimizer | fixed us a launch, V100 | NPU | modelled ms, V100 | NPU |",
        f"|---{'|--:' * 7}|",
    ]
    for case in results["cases"]:
        counted = case["launches"]
        step = counted["forward"][0] + counted["backward"][0] + counted["optimizer"]["AdamW"]["foreach"]
        fixed = [f"{1e3 * case['devices'][name]['fixed_ms'] / step:.1f}" for name in ("V100", "NPU")]
        halves = [f"{before:,} -> {after:,}" for before, after in (counted["forward"], counted["backward"])]
        adam = f"{counted['optimizer']['AdamW']['foreach']:,}"
        modelled = [
            " -> ".join(f"{ms:.1f}" for ms in counted.get("modelled_ms", {}).get(name, [])) or LEFT_OUT
            for name in ("V100", "NPU")
        ]
        cells = [f"`{counted['command']}`", *halves, adam, *fixed, *modelled]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def albert_table(results: dict[str, Any]) -> list[str]:
    """A row a length: as it is and frozen, against eager."""
    shown = not overloaded(results)
    lines = [
        "| model | eager ms | fuse ms | frozen ms | eager / fuse | eager / frozen | launches, frozen |",
        f"|---{'|--:' * 6}|",
    ]
    for case in results["cases"]:
        times = {name: timing["median"] for name, timing in case["milliseconds"].items()}
        cells = [
            f"`{case['target']}`",
            *(f"{times[name]:.1f}" if shown else LEFT_OUT for name in ("eager", "fused", "frozen")),
            *(ratio(case["ratios"][name]) if shown else LEFT_OUT for name in ("fused", "frozen")),
            f"{case['launches']['fused']}, {case['launches']['frozen']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def frozen_table(results: dict[str, Any]) -> list[str]:
    """A row a model: frozen against eager and ``torch.compile`` frozen, with first calls."""
    shown = not overloaded(results)
    lines = [
        "| model | eager ms | `torch.compile` frozen ms | fuse ms | fuse frozen ms | eager / frozen "
        "| compile frozen / frozen | launches | first call s |",
        f"|---{'|--:' * 8}|",
    ]
    for case in results["cases"]:
        times = {name: timing["median"] for name, timing in case["milliseconds"].items()}
        first = case["first_call_seconds"]
        cells = [
            f"`{case['target']}`",
            *(f"{times[name]:.2f}" if shown else LEFT_OUT for name in ("eager", "compile_frozen", "fused", "frozen")),
            *(ratio(case["ratios"][name]) if shown else LEFT_OUT for name in ("eager", "compile_frozen")),
            f"{case['launches']}",
            f"compile {first['compile_frozen']:.1f}, fuse {first['frozen']:.1f}" if shown else LEFT_OUT,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def memory_table(results: dict[str, Any]) -> list[str]:
    """A row a model: peaks measured without and with what libraries take, how they compare, and how near the
    prediction is."""
    heads = ["eager kB", "fuse kB", "fuse / eager", "predicted / measured"]
    heads += [f"{side} with its libraries kB" for side in ("eager", "fuse")] + ["fuse / eager"]
    lines = [f"| model | {' | '.join(heads)} |", f"|---{'|--:' * len(heads)}|"]
    for case in results["cases"]:
        eager, fused = case["eager"], case["fused"]
        cells = [f"`{case['target']}`"]
        for figure in ("measured", "with_libraries"):
            cells += [f"{side[figure] / 1000:,.0f}" for side in (eager, fused)]
            cells.append(f"{fused[figure] / eager[figure]:.2f}")
            if figure == "measured":
                cells.append(f"{fused['predicted'] / fused['measured']:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def blocks_table(results: dict[str, Any]) -> list[str]:
    """The mean of forty blocks, and those that are slower than a peer or launch more than ``torch.compile``."""
    cases = results["cases"]
    medians = {
        peer: {case["target"]: case["ratios"][peer]["median"] for case in cases} for peer in ("eager", "compile")
    }
    more = [case["target"] for case in cases if case["observed"]["after"] > case["compiled_launches"]]
    slower = {peer: [name for name, ratio in found.items() if ratio < 1] for peer, found in medians.items()}
    lines = ["| blocks of two to six operators behind a product or a convolution | |", "|---|--:|"]
    lines += [
        f"| measured | {len(cases)} |",
        f"| results that differ | {sum(bool(c['disagreements']) for c in cases)} |",
    ]
    for peer, names in (("eager", "eager"), ("compile", "`torch.compile`")):
        lines.append(f"| {names} / fuse, geometric mean | {statistics.geometric_mean(medians[peer].values()):.2f} |")
        below = ", ".join(f"{name} {medians[peer][name]:.2f}" for name in slower[peer])
        lines.append(f"| slower than {names} | {len(slower[peer])}{f': {below}' if below else ''} |")
    lines.append(f"| more launches than `torch.compile` | {len(more)}{': ' + ', '.join(more) if more else ''} |")
    return lines
