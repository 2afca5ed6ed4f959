"""Tables of checks: PyTorch's own tests, mutations of guards, values that ``forward`` reads."""

from __future__ import annotations

from typing import Any

from benchmarks import survivors
from benchmarks.tables.common import LEFT_OUT, overloaded


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
