"""Write the tables of README.md and docs (measured, mutation, precision, study) from the measured JSON, or check them.

    <!-- figures: lstm -->          | model | eager | ...
    (anything)                ->    | ... from benchmarks/results/lstm.json
    <!-- end -->

``python -m benchmarks.tables`` writes, ``python -m benchmarks.tables --check`` exits with 1 where a table is stale, so
that no figure in a table was ever typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from typing import Any

from benchmarks import survivors
from benchmarks.common import RESULTS, ROOT
from benchmarks.zoo_world import is_equal

BUSY = 1.25
"""Load a core above which something besides the benchmark, which uses all cores, was running."""

OVERLOADED = 2.0
"""Load a core above which wall times and their ratios say nothing, and are left out; launches still hold."""

SLOWER = 0.95
"""Of eager's speed: less is a defect."""

LATE_SECONDS = 15
"""What a first call of a published model may take."""

LEFT_OUT = "-"

IN_SHORT = (
    *(f"models/{name}.py" for name in ("albert", "bert_crf", "rnnsearch", "texting")),
    *(f"models/{name}.py" for name in ("ligru", "lstm_layernorm", "resnet18", "transformer_encoder")),
)
"""What the README shows of the models: those of the study, two loops, an image network, and one that gains little."""

PEERS = ("eager", "compile", "tuned")
"""What fuse is timed against, in the order of the columns."""

FIRST_CALLS = (("compile", "compile"), ("fuse", "fused"))
"""How the table names whose first call it is."""

PLACE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


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


def capture_table(results: dict[str, Any]) -> list[str]:
    """A row a length: what it takes to capture a loop and to run all passes over it."""
    lines = [
        "| loop | operators | capture s | passes s | s for 1,000 operators | graph nodes |",
        f"|---{'|--:' * 5}|",
    ]
    for case in results["cases"]:
        cells = [
            case["what"],
            f"{case['operators']:,}",
            f"{case['capture_seconds_real']:.2f}",
            f"{case['passes_seconds']:.2f}",
            f"{case['seconds_per_1000_operators']:.2f}",
            f"{case['nodes']:,} -> {case['nodes_after']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def overhead_table(results: dict[str, Any]) -> list[str]:
    """Microseconds a launch and a call."""
    chain, small = results["cases"]
    return [
        "| overhead | microseconds |",
        "|---|--:|",
        f"| each launch, the kernel included: slope over {chain['what']} | {chain['microseconds_per_launch']:.3f} |",
        f"| each call: the same line at no kernels | {chain['fixed_microseconds']:.1f} |",
        f"| Python's share of a call: {small['what']} | {small['microseconds_in_python']:.1f} |",
    ]


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


def first_call_table(results: dict[str, Any]) -> list[str]:
    """A row a loop and length: seconds of the first call and of one with another length, by the clock and of the
    processor."""
    lines = [
        "| loop | first call s | processor s | call with another length s | processor s |",
        f"|---{'|--:' * 4}|",
    ]
    shown = not overloaded(results)
    for case in results["cases"]:
        seconds = case["seconds"]
        cells = [f"`models/{case['model']}.py`, {case['steps']:,} steps"]
        for name in ("first", "another_length"):
            cells += [f"{seconds[name]:.2f}" if shown else LEFT_OUT, f"{seconds[f'{name}_processor']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def compiling_table(results: dict[str, Any]) -> list[str]:
    """A row a model: processor seconds of a first call, of its compilers, and of its units compiled in other ways."""
    lines = [
        "| model | once a machine s | units | lines | this process s | compilers s | read and checked s "
        "| not optimised s | as fuse does s | linked s |",
        f"|---{'|--:' * 9}|",
    ]
    for case in results["cases"]:
        seconds = [case["call"]["own"], case["call"]["compilers"], *case["again"].values()]
        once = case["once"]["own"] + case["once"]["compilers"]
        cells = [f"`models/{case['model']}.py`", f"{once:.2f}", str(case["units"]), f"{case['lines']:,}"]
        lines.append(f"| {' | '.join([*cells, *(f'{one:.2f}' for one in seconds)])} |")
    return lines


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


def op_db_table(results: dict[str, Any]) -> list[str]:
    """How PyTorch's own operator tests fare."""
    return [
        "| `2 * op(x) + 1` for every operator of PyTorch's `op_db`, float32 | |",
        "|---|--:|",
        f"| operators, forward and gradient formulas | {results['operators']} |",
        f"| wrong | {len(results['wrong'])} |",
        f"| captured without falling back | {results['captured']:.1%} |",
        f"| the operator itself runs in a generated kernel | {results['in_kernel']:.1%} |",
        f"| in a generated kernel or a library call | {results['in_kernel_or_library']:.1%} |",
    ]


def module_db_table(results: dict[str, Any]) -> list[str]:
    """How PyTorch's own modules fare with gradients, a column for each way in."""
    doors = results["doors"]
    titles = {"compile": "`fuse.compile`", "dynamo": '`torch.compile(backend="fuse")`'}
    rows = {
        "modules, forward and gradients, float32": [str(door["modules"]) for door in doors.values()],
        "wrong": [str(len(door["wrong"])) for door in doors.values()],
        "without falling back": [f"{door['captured']:.1%}" for door in doors.values()],
    }
    return [
        f"| every module of PyTorch's `module_db` | {' | '.join(titles[name] for name in doors)} |",
        f"|---{'|--:' * len(doors)}|",
        *(f"| {what} | {' | '.join(cells)} |" for what, cells in rows.items()),
    ]


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


def pipeline_table(results: dict[str, Any]) -> list[str]:
    """A row a model: its two stages, and a batch with and without a worker."""
    lines = [
        "| command | host stage ms | device stage ms | a batch without a worker ms | with one ms | ratio |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for case in results["cases"]:
        taken = [median(case["milliseconds"][way]) for way in ("plain", "pipeline")]
        cells = [f"`{case['command']}`", f"{case['host']:.1f}", f"{case['device']:.1f}", *taken, ratio(case["ratio"])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def viewer_table(results: dict[str, Any]) -> list[str]:
    """A row a page: its size, and how long it takes to paint, pan, search and step."""
    shown = not overloaded(results)
    figures = ("first_paint_s", "frame_ms", "frame_all_ms", "search_ms", "step_ms", "step_all_ms")
    heads = ["file MB", "first paint s", "frame ms", "frame ms, all", "search ms", "a step ms", "a step ms, all"]
    lines = [f"| page | {' | '.join(heads)} |", f"|---{'|--:' * len(heads)}|"]
    for case in results["cases"]:
        cells = [f"{case['megabytes']:.1f}", *(f"{case[name]:.1f}" if shown else LEFT_OUT for name in figures)]
        lines.append(f"| {' | '.join([case['page'], *cells])} |")
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
    """What forty blocks come to, and those that are slower than a peer or launch more than ``torch.compile``."""
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


def mutation_table(results: dict[str, Any]) -> list[str]:
    """A row a file: how many changed guards were noticed; then a row a survivor, with the reason."""
    cases = results["cases"]
    lines = ["| file | mutants | noticed | |", "|---|--:|--:|--:|"]
    rows = [(f"`{case['file']}`", case["mutants"], case["noticed"]) for case in cases]
    together = ("together", sum(case["mutants"] for case in cases), sum(case["noticed"] for case in cases))
    lines += [f"| {name} | {mutants} | {noticed} | {noticed / mutants:.0%} |" for name, mutants, noticed in rows]
    lines += [f"| {together[0]} | {together[1]} | {together[2]} | {together[2] / together[1]:.1%} |", ""]
    lines += ["| not noticed | changed to | why |", "|---|---|---|"]
    for survivor in (one for case in cases for one in case["survivors"]):
        stem = survivor["file"].rpartition("/")[2]
        before, after = changed_part(survivor["before"], survivor["after"])
        why = survivors.reason(survivor) or "**not explained**"
        lines.append(f"| {stem}: `{before}` | `{after}` | {why} |")
    return lines


def reads_table(results: dict[str, Any]) -> list[str]:
    """A row a kind of read: against the same without the read where values stay, else against eager; launches."""
    shown = not overloaded(results)
    patterns = ("stay", "alternate", "never repeat")
    titles = ("stays: without the read / fuse", "alternates: eager / fuse", "never repeats: eager / fuse", "launches")
    lines = [f"| what is read | {' | '.join(titles)} |", f"|---{'|--:' * 4}|"]
    for case in results["cases"]:
        cells = [
            f"{case['ratios'][pattern]:.2f}{', runs eager' if case['eager'][pattern] else ''}" if shown else LEFT_OUT
            for pattern in patterns
        ]
        launched = " / ".join(str(case["launches"][pattern] or "eager") for pattern in patterns)
        lines.append(f"| {case['name'].replace('_', ' ')} | {' | '.join(cells)} | {launched} |")
    return lines


def changed_part(before: str, after: str) -> tuple[str, str]:
    """The words in which two lines differ, with three more on each side."""
    ours, theirs = before.split(), after.split()
    start = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), 0)
    pairs = enumerate(zip(reversed(ours[start:]), reversed(theirs[start:]), strict=False))
    end = next((i for i, pair in pairs if pair[0] != pair[1]), 0)
    first, last = max(start - 3, 0), max(end - 3, 0)
    return " ".join(ours[first : len(ours) - last]), " ".join(theirs[first : len(theirs) - last])


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


def overloaded(results: dict[str, Any]) -> bool:
    """Whether the machine had so much else to do that times are not shown."""
    return bool(results["load_average"] > OVERLOADED * results["machine"]["cores"])


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


DOCUMENTS = (
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("measured.md", "mutation.md", "pipeline.md", "precision.md", "study.md")),
)

TABLES = {
    "albert": albert_table,
    "blocks": blocks_table,
    "busy": busy_table,
    "capture": capture_table,
    "cells": speed_table,
    "crf_share": crf_share_table,
    "curves": curves_table,
    "first_call": first_call_table,
    "compiling": compiling_table,
    "sizes": sizes_table,
    "lengths": lengths_table,
    "frozen": frozen_table,
    "limit": limit_table,
    "lstm": speed_table,
    "memory": memory_table,
    "viewer": viewer_table,
    "models": speed_table,
    "models_in_short": short_speed_table,
    "module_db": module_db_table,
    "mutation": mutation_table,
    "narrow": narrow_table,
    "op_db": op_db_table,
    "overhead": overhead_table,
    "precision": precision_table,
    "reads": reads_table,
    "pipeline": pipeline_table,
    "recurrent": recurrent_table,
    "recurrent_layers": recurrent_layers_table,
    "study": study_table,
    "study_launches": study_launches_table,
    "recurrent_in_short": short_recurrent_table,
    "training": speed_table,
    "training_steps": training_steps_table,
    "convolutions": convolutions_table,
    "zoo": zoo_table,
    "zoo_speeds": zoo_speeds_table,
    "zoo_world": zoo_world_table,
}
"""Each from the results of its name; ``_in_short``, ``_launches`` and ``_speeds`` from those of the whole table."""


def rendered(text: str) -> str:
    """``text`` with every marked table made anew from its JSON file."""

    def table(place: re.Match[str]) -> str:
        path = RESULTS / f"{re.sub('_(in_short|launches|speeds)$', '', place[2])}.json"
        if not path.exists():
            return place[1] + f"Not measured yet: `python -m benchmarks.{path.stem}`.\n" + place[3]
        results = json.loads(path.read_text())
        lines = [*TABLES[place[2]](results), "", conditions(results)]
        return place[1] + "\n".join(lines) + "\n" + place[3]

    return PLACE.sub(table, text)


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a table is stale")
    check = parser.parse_args().check
    fresh = {document: rendered(document.read_text()) for document in DOCUMENTS}
    stale = [document for document, text in fresh.items() if document.read_text() != text]
    if check and stale:
        names = " and ".join(str(document.relative_to(ROOT)) for document in stale)
        print(f"other figures than benchmarks/results in {names}; run python -m benchmarks.tables", file=sys.stderr)
        return 1
    if not check:
        for document in stale:
            document.write_text(fresh[document])
    return 0


if __name__ == "__main__":
    sys.exit(main())
