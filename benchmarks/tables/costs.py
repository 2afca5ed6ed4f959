"""Tables of costs: first calls, the compiler, capture, calls, host work, the page."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.common import LEFT_OUT, median, overloaded, ratio


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


def first_call_table(results: dict[str, Any]) -> list[str]:
    """A row a loop and length: seconds of the first call and of those with other lengths, by the clock and of the
    processor."""
    lines = [
        "| loop | first call s | processor s | second length s | processor s | third length s | processor s "
        "| fourth length s | processor s |",
        f"|---{'|--:' * 8}|",
    ]
    shown = not overloaded(results)
    for case in results["cases"]:
        seconds = case["seconds"]
        cells = [f"`models/{case['model']}.py`, {case['steps']:,} steps"]
        for name in ("first", "another_length", "third_length", "fourth_length"):
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
