"""Seeds in a process of their own: what crashes or hangs there is a finding of the seed that it was at."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from tests.fuzz import loops, nnsmith, straight
from tests.fuzz.drawing import Program
from tests.fuzz.judging import Verdict, judge
from tests.fuzz.shrinking import shrink

KINDS: dict[str, Callable[[int], Program]] = {
    "straight": straight.program,
    "loops": loops.program,
    "nnsmith": nnsmith.program,
}
SECONDS_A_PROGRAM = 300
Line = dict[str, Any]


def block(seeds: range, only: str | None, unoptimised: bool, end: float) -> Iterator[Line]:
    """Run seeds in one process until it is done or the time is up. If it dies, the seed that it was at has failed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, seeds, only, unoptimised, end), daemon=True)
    process.start()
    theirs.close()
    problem, begun = "", None
    try:
        while ours.poll(SECONDS_A_PROGRAM):
            if (message := ours.recv()) is None:
                break
            begun = message if "problem" not in message else None
            if begun is None:
                yield message
        else:
            problem = f"takes more than {SECONDS_A_PROGRAM} s"
            process.kill()
        process.join()
    except EOFError:
        process.join()
        problem = f"crashed with exit status {process.exitcode}"
    if problem and begun is None:
        raise RuntimeError(f"the process that runs programs {problem}")
    if problem and begun is not None:
        yield {**begun, **vars(Verdict(problem)), "program": "", "seconds": 0.0}


def _work(results: Connection, seeds: range, only: str | None, unoptimised: bool, end: float) -> None:
    warnings.simplefilter("ignore")  # torch's, of what is drawn
    for seed in seeds:
        if time.monotonic() > end:
            break
        kind = only or ("straight", "straight", "loops")[seed % 3]
        results.send({"seed": seed, "kind": kind})
        start = time.monotonic()
        program = KINDS[kind](seed)
        verdict = judge(program, unoptimised=unoptimised)
        if verdict.problem and isinstance(program, nnsmith.Network) and nnsmith.told_by_rounding(program):
            verdict = Verdict(unfit=True)
        seconds = round(time.monotonic() - start, 2)
        if verdict.problem and not isinstance(program, nnsmith.Network):  # whose text is not Python
            program = _shrunk(program, unoptimised)
        shown = str(program) if verdict.problem else ""
        results.send({"seed": seed, "kind": kind, **vars(verdict), "program": shown, "seconds": seconds})
    results.send(None)


def _shrunk(program: Program, unoptimised: bool) -> Program:
    limit = time.monotonic() + SECONDS_A_PROGRAM / 2

    def fails(smaller: Program) -> bool:
        return time.monotonic() < limit and bool(judge(smaller, unoptimised=unoptimised).problem)

    return shrink(program, fails)
