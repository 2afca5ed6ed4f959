"""Test a pattern: its replacement gives the same results as the pattern, and near misses do not fire.

    samples  ->  capture  ->  match  ->  rewrite  ->  run before and after, op by op  ->  compare
    near misses of each   ->  the same: no match, or a right one

A pattern without ``replace`` becomes a region of the graph's own operators, which cannot compute anything else; ``fuse
check-pattern`` runs its generated kernel. A pattern with ``replace`` is tried before it is first used. It is refused
if it is wrong on a usual class of calls, or right on none. On other classes (dtypes, layouts, ranks, broadcasts) it is
declined where it raises or is wrong; the remaining classes are its domain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fuse.check.alterations import alterations
from fuse.check.gradients import wrong_gradient
from fuse.check.judging import (
    FLOAT64,
    as_float64,
    difference,
    gradients,
    numbered,
    quiet,
    said,
    sizes_of,
    unit_of,
    within,
)
from fuse.check.oracle import check
from fuse.check.samples import SHAPES, Sample, samples
from fuse.errors import CaptureError, FuseError
from fuse.graph.capture import capture
from fuse.graph.function import Function, FunctionWithBuffers
from fuse.graph.outputs import outputs_of
from fuse.graph.signature import held_tensor
from fuse.passes.match_patterns import build, match_patterns, prepare_untried
from fuse.rewrite import regions
from fuse.rewrite.patterns.call_classes import RIGHT, Trial, class_of
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.language import running
from fuse.rewrite.patterns.matching import Outcome, match
from fuse.rewrite.patterns.registry import alone
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.registry import of_stages

SCHEMA_VERSION = 1
QUICK_SHAPES = 4
"""The number of other sizes that are tried before a pattern is first used."""


@dataclass(frozen=True)
class Counterexample:
    """A call on which the pattern is wrong."""

    sample: str
    problem: str

    def __str__(self) -> str:
        return f"{self.problem} ({self.sample})"


@dataclass
class Verification:
    """The result of trying one pattern; ``declined`` and ``missed`` count calls in which it did not fire.

    ``domain`` has the verdict on each class of calls in which it did, ``particular`` the traits of each class.
    """

    pattern: Pattern
    fired: int = 0
    declined: int = 0
    near_fired: int = 0
    missed: int = 0
    gradients: int = 0
    kernels: int = 0
    domain: dict[str, Trial] = field(default_factory=dict)
    particular: dict[str, str] = field(default_factory=dict, repr=False)
    counterexample: Counterexample | None = field(default=None)

    @property
    def passed(self) -> bool:
        return self.counterexample is None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        wrong = self.counterexample
        return {
            "pattern": self.pattern.name,
            "source": self.pattern.source,
            "passed": self.passed,
            "samples": {"fired": self.fired, "declined": self.declined},
            "near_misses": {"fired_and_right": self.near_fired, "declined": self.missed},
            "gradients": self.gradients,
            "kernels": self.kernels,
            "domain": [{"calls": call_class, **asdict(one)} for call_class, one in self.domain.items()],
            "counterexample": None if wrong is None else {"sample": wrong.sample, "problem": wrong.problem},
        }

    def __str__(self) -> str:
        about = f": {self.pattern.summary}" if self.pattern.summary else ""
        lines = [
            f"{self.pattern.name} ({self.pattern.source}){about}",
            f"  samples      {self.fired} fired and right, {self.declined} declined",
            f"  near misses  {self.missed} declined, {self.near_fired} fired and right",
            f"  gradients    {self.gradients} equal",
            f"  kernels      {self.kernels} run",
            *(self._domain() if self.pattern.replace is not None else ()),
        ]
        return "\n".join([*lines, f"  refused: {self.counterexample}" if self.counterexample else "  passed"])

    def _domain(self) -> Iterator[str]:
        """The classes of calls that are declined, each with the reason, and the traits of the right ones."""
        rows = [(call_class, f"declined, {one}") for call_class, one in self.domain.items() if one.outcome != "right"]
        right = dict.fromkeys(
            self.particular[call_class] for call_class, one in self.domain.items() if one.outcome == "right"
        )
        if right:
            rows.insert(0, (", ".join(right), "right"))
        yield from (f"  calls        {call_class}: {outcome}" for call_class, outcome in rows)


def verify(pattern: Pattern, *, quick: bool = False) -> Verification:
    """Try ``pattern`` on samples and on near misses of them, up to the first counterexample.

    ``quick`` leaves out most sizes, the generated kernels, the gradients of unusual calls and, if the usual calls are
    right, all other classes of calls.

    Raises:
        FuseError: the pattern cannot be run at all.
    """
    found = Verification(pattern)
    with quiet():
        found.counterexample = next((one for one in _tried(found, quick) if one is not None), None)
    return found


# ---- what is tried -------------------------------------------------------------------------------------------------


def _tried(found: Verification, quick: bool) -> Iterator[Counterexample | None]:
    pattern = found.pattern
    reasons: list[str] = []
    usual: set[str] = set()
    for sample in samples(pattern, QUICK_SHAPES if quick else SHAPES):
        call_class = class_of(sample.arguments(), sample.choices)
        if sample.what == "as usual":
            usual.add(call_class)
        if quick and call_class not in usual and RIGHT in found.domain.values():
            continue
        try:
            tried = judged(pattern, bound(pattern, sample), sample.arguments(), constants(pattern))
        except CaptureError as error:  # a dtype that eager has no code for, say
            reasons.append(str(error))
            continue
        except FuseError as error:  # the pattern's own check
            yield Counterexample(str(sample), str(error))
            return
        found.fired += tried.fired
        found.declined += not tried.fired
        reasons += tried.reasons
        if tried.trial is not None and found.domain.get(call_class, RIGHT) == RIGHT:
            found.domain[call_class] = tried.trial
            found.particular.setdefault(call_class, sample.what)
        if tried.wrong and call_class not in usual:
            continue
        yield _counterexample(str(sample), tried)
        if tried.trial is not None and tried.trial.outcome == "raised":
            continue
        if sample.what == "as usual":
            yield from _near_misses(found, sample)
            if tried.fired and not quick:
                yield _kernel(found, sample)
        if tried.fired and (sample.what == "as usual" or not (quick or sample.may_be_at_a_kink)):
            yield _gradients(found, sample)
            yield _own_gradients(found, sample)
    unused = next((one for one in found.domain.values() if one.outcome == "raised"), None)
    if unused is not None and RIGHT not in found.domain.values():
        yield Counterexample("every call", unused.reason)
    if not quick and not found.fired:
        yield Counterexample(
            "every sample", f"it does not match its own computation: {(reasons or ['no candidate'])[0]}"
        )


def _near_misses(found: Verification, sample: Sample) -> Iterator[Counterexample | None]:
    model, arguments = as_model(bound(found.pattern, sample), sample.arguments(), constants(found.pattern))
    graph = capture(model, arguments)
    given = tensors_of(graph, model, arguments)
    held = [place for place, spec in enumerate(graph.meta["signature"].inputs) if spec.kind != "argument"]
    for altered in alterations(graph):
        try:
            tried = judged(found.pattern, altered.__call__, tuple(tensor.clone() for tensor in given), held)
        except CaptureError:
            continue  # the changed graph does not run
        found.near_fired += tried.fired
        found.missed += not tried.fired
        yield _counterexample(f"near miss, {altered.what}; {sample}", tried)


def _gradients(found: Verification, sample: Sample) -> Counterexample | None:
    """Compare the gradients of pattern and replacement, if both can be differentiated."""
    pattern = found.pattern
    if pattern.replace is None:
        return None
    functions = [gradients(within(one, sample.environment)) for one in (pattern.function, pattern.replace)]
    wide = pytree.tree_map_only(Tensor, as_float64, list(sample.arguments()))
    try:
        wanted, given = (one(*wide) for one in functions)
    except Exception:  # one of them has no gradient
        return None
    size = cache(partial(sizes_of, functions, wide, FLOAT64))
    for place, (want, have) in enumerate(zip(wanted, given, strict=True)):
        if (want is None) != (have is None):
            return Counterexample(str(sample), "one of pattern and replace has a gradient where the other has none")
        if want is not None and have is not None:
            one = numbered(size, place)
            if problem := difference("gradient", have.contiguous(), want.contiguous(), None, one):
                return Counterexample(str(sample), problem)
            found.gradients += 1
    return None


def _own_gradients(found: Verification, sample: Sample) -> Counterexample | None:
    """Compare the gradients by the pattern's own rule with those of the pattern."""
    if found.pattern.backward is None:
        return None
    usual = sample.what == "as usual"
    problem, right = wrong_gradient(found.pattern, sample.arguments(), sample.environment, differences=usual)
    found.gradients += right
    return Counterexample(str(sample), problem) if problem else None


def _kernel(found: Verification, sample: Sample) -> Counterexample | None:
    """Compare the generated kernel of the pattern alone with eager, as ``fuse check`` does for a model."""
    with alone(found.pattern):
        model, arguments = as_model(bound(found.pattern, sample), sample.arguments(), constants(found.pattern))
        report = check(model, arguments, passes=[match_patterns.__name__])
    found.kernels += 1
    return None if report.passed else Counterexample(str(sample), "; ".join(report.problems))


# ---- one call ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """The result of matching a pattern in one call: whether it fired, why not, and the verdict if it did."""

    fired: bool
    reasons: Sequence[str]
    trial: Trial | None

    @property
    def wrong(self) -> bool:
        return self.trial is not None and self.trial.outcome != "right"


def bound(pattern: Pattern, sample: Sample) -> Callable[..., Any]:
    """The pattern with the constants and the choice of alternatives of ``sample``."""

    def function(*arguments: Any) -> Any:
        with running(sample.environment):
            return pattern.function(*arguments)

    return function


def constants(pattern: Pattern) -> list[int]:
    """The positions of the tensors that ``pattern`` requires to be constants."""
    wanted = pattern.constrained
    return [at for at, one in enumerate(pattern.parameters) if one.name in wanted and wanted[one.name].constant]


def as_model(
    function: Callable[..., Any], arguments: Sequence[Any], held: Collection[int]
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model that computes ``function(*arguments)``, with the ``held`` ones as its attributes; and the other ones."""
    if not held:
        return Function(function), tuple(arguments)
    return FunctionWithBuffers(function, arguments, held), tuple(
        one for at, one in enumerate(arguments) if at not in held
    )


def tensors_of(graph: GraphModule, model: nn.Module, arguments: Sequence[Any]) -> list[Tensor]:
    """The values of the placeholders of ``graph``, captured from ``model``, in a call with ``arguments``."""
    leaves = pytree.tree_leaves(list(arguments))
    inputs = graph.meta["signature"].inputs
    return [leaves[spec.index] if spec.kind == "argument" else held_tensor(spec, model) for spec in inputs]


def judged(
    pattern: Pattern, function: Callable[..., Any], arguments: Sequence[Any], held: Collection[int] = ()
) -> Judged:
    """Whether ``pattern`` fires in ``function``, and the verdict on the result if it does.

    The arguments at the positions ``held`` are the same in every call, like weights.
    """
    model, given = as_model(function, arguments, held)
    before, after = (capture(model, given) for _ in range(2))
    run_passes(after, of_stages("clean"))
    outcomes = rewrite(after, [pattern])
    reasons = [f"{one.kind}: {one.reason}" for one in outcomes if one.kind != "matched"]
    if len(reasons) == len(outcomes):
        needs_none = pattern.backward is not None and any(one.kind == "refused by lowering" for one in outcomes)
        return Judged(needs_none, reasons, None)  # a pattern with its own gradients needs no kernel
    if pattern.replace is None:
        return Judged(True, reasons, RIGHT)
    tensors = tensors_of(before, model, given)
    folded = tensors_of(after, model, given)[len(tensors) :]  # folded constants are inputs too
    return Judged(
        True, reasons, _wrong(before, lambda *tensors: after(*tensors, *folded), tensors, function, arguments)
    )


def rewrite(graph: GraphModule, patterns: Sequence[Pattern]) -> list[Outcome]:
    """Rewrite the matches of ``patterns`` in ``graph``; returns the outcome of each candidate."""
    outcomes, moved = match(graph, patterns, prepare_untried), dict[Any, Any]()
    for one in outcomes:
        if one.kind == "matched":
            build(graph, one.prepared, moved)
    regions.sort(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return outcomes


def _wrong(
    before: GraphModule,
    after: Callable[..., Any],
    tensors: Sequence[Tensor],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> Trial:
    """The verdict on the results of ``after``, compared with those of ``before``."""
    with torch.no_grad():
        try:
            eager = before(*tensors)
        except Exception:  # eager has no kernel for this dtype: the rewritten graph may fail too
            return RIGHT
        try:
            mine = after(*tensors)
        except Exception as error:  # the user's replacement may raise anything
            return Trial("raised", f"replace fails, {said(error)}")
        exact = _in_float64(before, function, arguments) or [None] * len(eager)
    size = cache(partial(sizes_of, [before, after], tensors, unit_of(eager)))
    for number, (result, want, reference) in enumerate(zip(mine, eager, exact, strict=True)):
        if problem := difference(f"result {number}", result, want, reference, numbered(size, number)):
            return Trial("wrong", problem)
    return RIGHT


def _in_float64(before: GraphModule, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any] | None:
    """The flat outputs of the graph, computed in float64; None if the function does not run in float64."""
    wide = pytree.tree_map_only(Tensor, as_float64, list(arguments))
    try:
        results = pytree.tree_leaves(function(*wide))
    except Exception:  # not every function runs in float64
        return None
    found: dict[int, Any] = {}
    for spec, result in zip(before.meta["signature"].outputs, results, strict=True):
        if spec.kind == "graph" and spec.view is None:
            found[spec.index] = result
    return [found.get(place) for place in range(len(outputs_of(before.graph)))]


def _counterexample(call_class: str, tried: Judged) -> Counterexample | None:
    """The fault of a call, or None; a call on which the replacement raises is declined, which is no fault."""
    if tried.trial is None or tried.trial.outcome != "wrong":
        return None
    return Counterexample(call_class, tried.trial.reason)
