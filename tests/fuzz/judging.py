"""Is a random program fused right? The oracle for one call, and call after call of one compiled model for several.

eager accepts the calls, and its values stay small    else the program says nothing: ``UNFIT``
fused differs, raises something else, or falls back for an error of ours    the problem, as text
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import fuse
from fuse.check import oracle
from fuse.check.draws import RecordedDraws
from fuse.check.inputs import CheckCall, copied
from fuse.check.outcome import structure_problems
from fuse.errors import FuseError
from fuse.kernel.cpu import emit, loop_kernel, loop_units
from fuse.loops import distributing
from fuse.rewrite.pipeline import run_passes
from fuse.runtime import making
from fuse.runtime.cpu import toolchain
from tests.fuzz.drawing import Inputs, Program, copies

LARGEST = {True: 50.0, False: 1e3}
"""What a value may be in a loop, where errors grow from step to step, and elsewhere."""
OURS = ("internal error", "failed (", "cannot be built")


@dataclass(frozen=True)
class Verdict:
    """``problem`` is empty where the fused calls cannot be told from eager's. An ``unfit`` program says nothing.

    ``eager`` calls ran as eager would, of all ``calls``; ``rolled`` captures had a loop, of all ``captured``.
    """

    problem: str = ""
    unfit: bool = False
    calls: int = 0
    eager: int = 0
    captured: int = 0
    rolled: int = 0


def judge(program: Program, *, unoptimised: bool = False) -> Verdict:
    """Run a program's calls eager and fused, and compare. ``unoptimised`` compiles much faster, and slower kernels."""
    calls = fit(program)
    if not calls:
        return Verdict(unfit=True)
    loops: list[bool] = []
    with warnings.catch_warnings(), _drawn(program, loops, unoptimised):
        warnings.simplefilter("ignore")
        try:
            problem, eager = _one(program) if len(calls) == 1 else _in_turn(replace(program, calls=calls))
        except FuseError as error:
            if "cannot be copied" in str(error):  # a model whose state has come to need gradients
                return Verdict(unfit=True)
            problem, eager = f"FuseError: {error}", 0
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            return Verdict(unfit=True)  # likewise: eager refuses its second step
    return Verdict(problem, False, len(calls), eager, len(loops), sum(loops))


def fit(program: Program) -> tuple[Inputs, ...]:
    """The calls that eager accepts with values that stay small. None if the first is not among them."""
    accepted = []
    for inputs in program.calls:
        given = copies(inputs)
        try:
            with torch.set_grad_enabled(program.train), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = program.model()(*given)
                if program.train:
                    oracle._backward(results)
        except (RuntimeError, IndexError, ValueError, TypeError, NameError, AttributeError, ZeroDivisionError):
            results = None
        if results is not None and all(_small(t, program) for t in (*results, *given)):
            accepted.append(inputs)
        elif not accepted:
            return ()
    return tuple(accepted)


def _small(value: Any, program: Program) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    if program.widths and not value.isfinite().all():
        return False
    return bool((value.detach()[value.isfinite()].abs() <= LARGEST[bool(program.widths)]).all())


def _one(program: Program) -> tuple[str, int]:
    tolerance, inputs = program.tolerance, copies(program.calls[0])
    report = oracle.check(program.model(), inputs, train=program.train, atol=tolerance, rtol=tolerance)
    ours = [f.reason for f in report.fallbacks if any(text in f.reason for text in OURS)]
    empty = any(not t.numel() for t in inputs)  # of which launches are predicted a few off: docs/trust.md
    problems = [problem for problem in report.problems if not (empty and "launches predicted" in problem)]
    return f"{report}" if problems or ours else "", int(not report.regions)


def _in_turn(program: Program) -> tuple[str, int]:
    """Calls of one compiled model, each beside an eager model of its own and one in float64."""
    theirs, mine = program.model(), program.model()
    fused = fuse.compile(mine)
    ran_eager = 0
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(program.train):
        for number, inputs in enumerate(program.calls):
            call, fused_call = CheckCall(theirs, copies(inputs), {}), CheckCall(mine, copies(inputs), {})
            theirs.zero_grad()
            mine.zero_grad()
            before = copied(call)
            with RecordedDraws() as draws:
                eager = oracle._outcome(call, None, 0, program.train)
            exact, _ = oracle._reference(before, eager, 0, program.train, draws)
            try:
                outcome = oracle._outcome(fused_call, fused, 0, program.train)
            except Exception as error:  # eager has just done the same without one
                return f"call {number}: {type(error).__name__}: {error}", ran_eager
            tolerance = program.tolerance
            compared = oracle._compare_all(outcome, eager, exact, tolerance, tolerance, 0.0, dict)
            problems = [f"{c.name}: {c.problem}" for c in compared if c.problem]
            problems += structure_problems(outcome, eager)
            run = fused.last_run
            assert run is not None
            problems += [f.reason for f in run.fallbacks if any(text in f.reason for text in OURS)]
            if problems:
                return f"call {number}: " + "; ".join(problems), ran_eager
            ran_eager += int(fused.compiled is None)
    return "", ran_eager


@contextmanager
def _drawn(program: Program, loops: list[bool], unoptimised: bool) -> Iterator[None]:
    """Three threads, small work shared out where the program says so, and a note of each capture: has it a loop?"""

    def noted(graph: GraphModule, *rest: Any) -> Any:
        ledger = run_passes(graph, *rest)
        loops.append(any(f.pass_name in ("roll_loops", "roll_whole_loops") for f in ledger.fired))
        return ledger

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(making, "run_passes", noted)
        if unoptimised:
            options = tuple(o for o in toolchain.REQUIRED_OPTIONS if o != "-O2")
            patched.setattr(toolchain, "REQUIRED_OPTIONS", (*options, "-O0"))
        if program.shared_out:
            patched.setattr(emit, "PARALLEL_WORK", 1)
            patched.setattr(loop_kernel, "PARALLEL_WORK", 1)
            patched.setattr(loop_units, "WORK_FOR_A_THREAD", 1)
            patched.setattr(distributing, "LEAST_WORK", 1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
