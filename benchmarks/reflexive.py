"""Does a function, given as a pattern, match itself? Every operator of PyTorch's own list, as pattern and as model.

    alone        f(x, y)
    middle       cos(f(sin(x), sin(y)))
    loop         three times, each on the sines of what was before
    train()      alone, in a module that trains

A sample counts where a model can be captured at all. What does not match is told with the reason: at registration (the
pattern cannot be run, draws random numbers, computes nothing) or by the candidate that came nearest. Run it as::

    python -m benchmarks.reflexive [--samples 6] [--only NAME ...] [-o benchmarks/results/reflexive.json]
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

from benchmarks import op_db
from fuse.check.judging import quiet
from fuse.errors import CaptureError, FuseError
from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.rewrite import nested
from fuse.rewrite.patterns.definition import Pattern, define
from fuse.rewrite.patterns.matching import Outcome, match
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.registry import earlier_than

STEPS = 3
WANTED = 0.98

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Case:
    """One sample in one setting. ``reason`` says why it does not match; ``registration``: it is told before."""

    operator: str
    sample: int
    setting: str
    matched: bool
    registration: bool = False
    reason: str = ""


def pattern_of(function: Callable[..., Any], tensors: Tensors) -> Pattern:
    """``function`` of these tensors as a pattern."""
    names = [f"t{place}" for place in range(len(tensors))]

    class Sample:
        def pattern(self, *given: Tensor) -> Any:
            return function(*given)

        def examples(self) -> Any:
            return tuple(tensors)

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Sample.pattern.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return define(Sample)


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: function(*given)


def in_the_middle(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: [_after(one) for one in pytree.tree_leaves(function(*map(_before, given)))]


def in_a_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    def looped(*given: Tensor) -> Any:
        found: list[Any] = []
        for _ in range(STEPS):
            given = tuple(map(_before, given))
            found += [_after(one) for one in pytree.tree_leaves(function(*given))]
        return found

    return looped


SETTINGS = {"alone": alone, "middle": in_the_middle, "loop": in_a_loop, "train()": alone}


def _before(one: Tensor) -> Tensor:
    return torch.sin(one) if one.is_floating_point() else one


def _after(one: Any) -> Any:
    return torch.cos(one) if isinstance(one, Tensor) and one.is_floating_point() else one


def cases(name: str, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], op: Callable[..., Any]) -> list[Case]:
    """What came of each sample, in each setting in which the model can be captured."""
    found = []
    for number, call in enumerate(calls):
        leaves, spec = pytree.tree_flatten(call)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place].detach() for place in places]

        def function(*given: Tensor, leaves: Any = leaves, spec: Any = spec, places: Any = places) -> Any:
            filled = list(leaves)
            for place, one in zip(places, given, strict=True):
                filled[place] = one
            args, kwargs = pytree.tree_unflatten(filled, spec)
            answer = op(*args, **kwargs)
            return answer if isinstance(answer, Tensor) else tuple(pytree.tree_leaves(answer))

        if not tensors:
            continue
        for setting, within in SETTINGS.items():
            with quiet():
                case = _case(name, number, setting, pattern_of(function, tensors), within(function), tensors)
            if case is not None:
                found.append(case)
    return found


def _case(
    name: str, number: int, setting: str, pattern: Pattern, model: Callable[..., Any], tensors: Tensors
) -> Case | None:
    module = Function(model).train(setting == "train()")
    try:
        with torch.no_grad():
            graph = capture(module, tuple(tensors))
    except CaptureError:
        return None
    if not any(node.op == "call_function" for node in graph.graph.nodes):
        return None
    outcomes: list[Outcome] = []
    try:
        run_passes(graph, earlier_than("match_patterns"))
        for body, _ in nested.walk(graph):
            outcomes += match(body, [pattern], lambda found, around: found)
    except FuseError as error:
        return Case(name, number, setting, False, True, str(error).partition(": ")[2] or str(error))
    if any(one.kind == "matched" for one in outcomes):
        return Case(name, number, setting, True)
    best = max(outcomes, key=lambda one: one.progress, default=None)
    reason = "no candidate" if best is None else f"{best.kind}: {best.reason}"
    return Case(name, number, setting, False, best is not None and best.kind == "alias or mutation", reason)


def sweep(op: OpInfo, samples: int) -> list[Case]:
    """The cases of one operator's samples."""
    return cases(op_db.full_name(op), op_db.calls_of(op, samples), op.op)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--samples", type=int, default=op_db.SAMPLES)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--part", default="0/1", help="I/N: every Nth operator, from the Ith")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    first, step = map(int, options.part.split("/"))
    warnings.simplefilter("ignore")
    found: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FUSE_CACHE_DIR"] = str(Path(folder) / "cache")
        for op in op_db.operators(options.only)[first::step]:
            try:
                found += sweep(op, options.samples)
            except Exception as error:  # a fault of ours, or of the list: the others still count
                text = (str(error).splitlines() or [""])[0]
                found.append(Case(op_db.full_name(op), 0, "alone", False, False, f"{type(error).__name__}: {text}"))
            print(op_db.full_name(op), file=sys.stderr)
    report(found)
    if options.output:
        options.output.write_text(json.dumps([asdict(one) for one in found if not one.matched], indent=1) + "\n")
    silent = sum(not (one.matched or one.registration) for one in found)
    return 0 if silent <= (1 - WANTED) * len(found) else 1


def report(found: Sequence[Case]) -> None:
    """The table: cases and what became of them, by setting; then each reason with the operators that have it."""
    for setting in SETTINGS:
        there = [one for one in found if one.setting == setting]
        matched, told = (sum(getattr(one, what) for one in there) for what in ("matched", "registration"))
        share = (matched + told) / max(len(there), 1)
        print(f"{setting:<8} {len(there):>5} samples  {matched:>5} match  {told:>5} told at registration  {share:.1%}")
    missed = [one for one in found if not one.matched]
    for (when, reason), count in Counter((one.registration, one.reason) for one in missed).most_common():
        names = sorted({one.operator for one in missed if (one.registration, one.reason) == (when, reason)})
        print(f"{count:>5} {'told' if when else 'MISSED'}  {reason[:110]}  ({', '.join(names)[:100]})")


if __name__ == "__main__":
    sys.exit(main())
