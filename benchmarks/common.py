"""Shared by the benchmarks: one measurement by a command that a reader can repeat, and its JSON file.

    fuse bench TARGET ... --json  in a process of its own  ->  case   several  ->  benchmarks/results/NAME.json

Run them from the repository's root, on an idle machine: ``python -m benchmarks.NAME``.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.report.timing.machine import machine, versions
from fuse.runtime.cpu import toolchain

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Call = tuple[tuple[Any, ...], dict[str, Any]]


def bench(*arguments: str) -> dict[str, Any]:
    """The measurements of ``fuse bench``, with the command line that repeats them.

    Each case runs in a new process: no compiled code, warm cache or thread pool of another case is left over.
    """
    command = ["bench", *arguments]
    print(f"fuse {shlex.join(command)}", file=sys.stderr, flush=True)
    ran = subprocess.run(
        [sys.executable, "-m", "fuse.cli", *command, "--json", "--quiet"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(ran.stdout)
    return {"command": f"fuse {shlex.join(command)}", **report}


def conditions(name: str, load: float | None = None) -> dict[str, Any]:
    """The conditions of the figures of ``python -m benchmarks.NAME``: machine, versions, date and load.

    ``load_average`` is that of the minute before the end, unless told: above the cores, something else was running.
    """
    return {
        "command": f"python -m benchmarks.{name}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "load_average": round(os.getloadavg()[0] if load is None else load, 2),
    }


def save(name: str, cases: Sequence[dict[str, Any]], load: float | None = None) -> None:
    """Write ``cases`` to ``benchmarks/results/NAME.json`` with what they hold for."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**conditions(name, load), "cases": list(cases)}, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)


@contextmanager
def compilations() -> Iterator[list[Path]]:
    """The directories in which the compiler ran, as it does so."""
    found: list[Path] = []
    original = toolchain.compile_in

    def noted(directory: Path, source: str, *rest: Any) -> toolchain.CompilerRun:
        found.append(directory)
        return original(directory, source, *rest)

    toolchain.compile_in = noted
    try:
        yield found
    finally:
        toolchain.compile_in = original


def processor_seconds() -> float:
    """Processor seconds of this process and of those that it waited for (compilers)."""
    of_others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_others.ru_utime + of_others.ru_stime


def without_optimising() -> None:
    """From here on, compile kernels much faster, to slower code, for runs that only look at values."""
    options = (option for option in toolchain.REQUIRED_OPTIONS if option != "-O2")
    toolchain.REQUIRED_OPTIONS = (*options, "-O0")


def leaves(call: Call) -> Call:
    """Arguments as their caller's own tensors: some samples of torch's tests are results of operators."""
    own: dict[int, Tensor] = {}

    def leaf(argument: Tensor) -> Tensor:
        return own.setdefault(id(argument), argument.detach().requires_grad_(argument.requires_grad))

    return pytree.tree_map_only(Tensor, leaf, call)


def tangent(result: Tensor) -> Tensor:
    """Numbers that differ from element to element, the same for all dtypes."""
    return torch.arange(result.numel(), dtype=torch.float64).add(1).cos().reshape(result.shape).to(result.dtype)
