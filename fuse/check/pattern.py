"""Hold a pattern to what it says: its replacement gives what the pattern gives, and near misses do not fire.

    samples  ->  capture  ->  match  ->  rewrite  ->  run before and after, op by op  ->  compare
    near misses of each   ->  the same: no match, or a right one

A pattern without ``replace`` becomes a region of the graph's own operators and cannot say anything else; for those
it is ``fuse check-pattern`` that runs the generated kernel. A pattern with one is tried before it is first used, and is
refused where a counterexample is found. What was found is remembered on disk by the pattern's source.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fuse.check.alterations import alterations
from fuse.check.compare import compare
from fuse.check.gradients import wrong_gradient
from fuse.check.oracle import check
from fuse.check.samples import SHAPES, Sample, samples
from fuse.check.source import source_of
from fuse.errors import CaptureError, FuseError
from fuse.graph.capture import capture
from fuse.graph.ends import outputs_of
from fuse.graph.function import Function, Holding
from fuse.graph.signature import held_tensor
from fuse.passes.match_patterns import build, match_patterns, prepare
from fuse.rewrite import regions
from fuse.rewrite.patterns import language
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.language import running
from fuse.rewrite.patterns.matching import Outcome, match
from fuse.rewrite.patterns.registry import alone
from fuse.rewrite.pipeline import run_passes
from fuse.runtime import cache as disk

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of the largest value: what sums in another order and folded factors may cost. A wrong formula costs more."""

CLEANING = ("dead_code", "common_subexpressions", "view_chains", "no_ops", "constant_folding")
"""Passes that run before patterns are looked for, as they do in a model."""

SCHEMA_VERSION = 1
QUICK_SHAPES = 4
"""Other sizes that are tried before a pattern is first used."""

_VERIFIED = "verified"


@dataclass(frozen=True)
class Counterexample:
    """A call on which the pattern is wrong."""

    sample: str
    problem: str

    def __str__(self) -> str:
        return f"{self.problem} ({self.sample})"


@dataclass
class Verification:
    """What came of trying one pattern; ``declined`` and ``missed`` are calls at which it did not fire."""

    pattern: Pattern
    fired: int = 0
    declined: int = 0
    near_fired: int = 0
    missed: int = 0
    gradients: int = 0
    kernels: int = 0
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
        ]
        return "\n".join([*lines, f"  refused: {self.counterexample}" if self.counterexample else "  passed"])


def verify(pattern: Pattern, *, quick: bool = False) -> Verification:
    """Try ``pattern`` on samples and on near misses of them, up to the first counterexample.

    ``quick`` leaves out most sizes, the gradients of all calls but the usual ones, and the generated kernels.

    Raises:
        FuseError: the pattern cannot be run at all.
    """
    found = Verification(pattern)
    for problem in _tried(found, quick):
        if problem is not None:
            found.counterexample = problem
            break
    return found


@cache
def refusal(pattern: Pattern) -> str | None:
    """Why ``pattern`` must not be used, or None: what trying it quickly gave, now or at an earlier time.

    Only a pattern with ``replace`` or ``backward`` can be wrong.
    """
    if pattern.replace is None and pattern.backward is None:
        return None
    key = disk.key_of("pattern", source_of(pattern), _judge(), torch.__version__, platform.python_version())
    if entry := disk.find(key):
        said = entry[1].decode()
    else:
        wrong = verify(pattern, quick=True).counterexample
        said = _VERIFIED if wrong is None else f"refused: {wrong}"
        disk.store(key, said.encode())
    return None if said == _VERIFIED else said


@cache
def _judge() -> str:
    """The source of what matches and judges: what another one found does not hold."""
    files = [*Path(language.__file__).parent.glob("*.py"), *Path(__file__).parent.glob("*.py")]
    return "".join(file.read_text() for file in sorted(files))


# ---- what is tried -------------------------------------------------------------------------------------------------


def _tried(found: Verification, quick: bool) -> Iterator[Counterexample | None]:
    pattern = found.pattern
    reasons: list[str] = []
    for sample in samples(pattern, QUICK_SHAPES if quick else SHAPES):
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
        yield _counterexample(str(sample), tried)
        if sample.what == "as usual":
            yield from _near_misses(found, sample)
            if tried.fired and not quick:
                yield _kernel(found, sample)
        if tried.fired and (sample.what == "as usual" or not (quick or sample.may_be_at_a_kink)):
            yield _gradients(found, sample)
            yield _own_gradients(found, sample)
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
            continue  # what is changed that way does not run
        found.near_fired += tried.fired
        found.missed += not tried.fired
        yield _counterexample(f"near miss, {altered.what}; {sample}", tried)


def _gradients(found: Verification, sample: Sample) -> Counterexample | None:
    """Where pattern and replacement can both be differentiated, their gradients are equal."""
    pattern = found.pattern
    if pattern.replace is None:
        return None
    try:
        wanted, given = (_gradients_of(function, sample) for function in (pattern.function, pattern.replace))
    except Exception:  # one of them has no gradient
        return None
    for want, have in zip(wanted, given, strict=True):
        if (want is None) != (have is None):
            return Counterexample(str(sample), "one of pattern and replace has a gradient where the other has none")
        if want is not None and have is not None:
            if problem := _difference("gradient", have.contiguous(), want.contiguous(), None):
                return Counterexample(str(sample), problem)
            found.gradients += 1
    return None


def _own_gradients(found: Verification, sample: Sample) -> Counterexample | None:
    """The gradients that the pattern has a rule for are those of what it computes."""
    if found.pattern.backward is None:
        return None
    problem, right = wrong_gradient(found.pattern, sample, differences=sample.what == "as usual")
    found.gradients += right
    return Counterexample(str(sample), problem) if problem else None


def _gradients_of(function: Callable[..., Any], sample: Sample) -> list[Tensor | None]:
    arguments = pytree.tree_map_only(Tensor, _wide, list(sample.arguments()))
    leaves = [leaf.requires_grad_() for leaf in pytree.tree_leaves(arguments) if leaf.is_floating_point()]
    with torch.enable_grad(), running(sample.environment):
        results = [one for one in pytree.tree_leaves(function(*arguments)) if one.requires_grad]
    weights = [torch.linspace(0.5, 1.5, one.numel(), dtype=one.dtype).reshape(one.shape) for one in results]
    return list(torch.autograd.grad(results, leaves, weights, allow_unused=True))


def _kernel(found: Verification, sample: Sample) -> Counterexample | None:
    """The pattern alone, as generated code, is held to eager as ``fuse check`` holds a model."""
    with alone(found.pattern):
        model, arguments = as_model(bound(found.pattern, sample), sample.arguments(), constants(found.pattern))
        report = check(model, arguments, passes=[match_patterns.__name__])
    found.kernels += 1
    return None if report.passed else Counterexample(str(sample), "; ".join(report.problems))


# ---- one call ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """What came of looking for a pattern in one call: whether it fired, why not, and what is wrong if it did."""

    fired: bool
    reasons: Sequence[str]
    problem: str


def bound(pattern: Pattern, sample: Sample) -> Callable[..., Any]:
    """The pattern with the constants of ``sample`` and by its alternatives."""

    def function(*arguments: Any) -> Any:
        with running(sample.environment):
            return pattern.function(*arguments)

    return function


def constants(pattern: Pattern) -> list[int]:
    """The places of the tensors that ``pattern`` wants to be the same in every call."""
    wanted = pattern.constrained
    return [at for at, one in enumerate(pattern.parameters) if one.name in wanted and wanted[one.name].constant]


def as_model(
    function: Callable[..., Any], arguments: Sequence[Any], held: Collection[int] = ()
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model that computes ``function(*arguments)`` and has those ``held`` itself, and what else it is called with."""
    if not held:
        return Function(function), tuple(arguments)
    return Holding(function, arguments, held), tuple(one for at, one in enumerate(arguments) if at not in held)


def tensors_of(graph: GraphModule, model: nn.Module, arguments: Sequence[Any]) -> list[Tensor]:
    """What the placeholders of ``graph``, which ``model`` was captured as, are in a call with ``arguments``."""
    leaves = pytree.tree_leaves(list(arguments))
    inputs = graph.meta["signature"].inputs
    return [leaves[spec.index] if spec.kind == "argument" else held_tensor(spec, model) for spec in inputs]


def judged(
    pattern: Pattern, function: Callable[..., Any], arguments: Sequence[Any], held: Collection[int] = ()
) -> Judged:
    """Whether ``pattern`` fires in ``function``, and what is wrong with the result if it does.

    The arguments at the places ``held`` are the same in every call, as weights are.
    """
    model, given = as_model(function, arguments, held)
    before, after = (capture(model, given) for _ in range(2))
    run_passes(after, CLEANING)
    outcomes = rewrite(after, [pattern])
    reasons = [f"{one.kind}: {one.reason}" for one in outcomes if one.kind != "matched"]
    if len(reasons) == len(outcomes):
        needs_none = pattern.backward is not None and any(one.kind == "refused by lowering" for one in outcomes)
        return Judged(needs_none, reasons, "")  # a rule for gradients needs no kernel
    if pattern.replace is None:
        return Judged(True, reasons, "")
    tensors = tensors_of(before, model, given)
    return Judged(True, reasons, _wrong(before, after, tensors, function, arguments))


def rewrite(graph: GraphModule, patterns: Sequence[Pattern]) -> list[Outcome]:
    """Rewrite what ``patterns`` match in ``graph``; what became of each candidate."""
    outcomes, moved = match(graph, patterns, prepare), dict[Any, Any]()
    for one in outcomes:
        if one.kind == "matched":
            build(graph, one.prepared, moved)
    regions.sort(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return outcomes


def _wrong(
    before: GraphModule,
    after: GraphModule,
    tensors: Sequence[Tensor],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> str:
    """How the results of ``after`` differ from those of ``before``; nothing where they do not."""
    with torch.no_grad():
        try:
            eager = before(*tensors)
        except Exception:  # what has no kernel for this dtype fails in eager, and goes on to fail
            return ""
        try:
            mine = after(*tensors)
        except Exception as error:  # whatever the user's replacement raises
            return f"replace fails, {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        exact = _in_float64(before, function, arguments) or [None] * len(eager)
    for number, (result, want, reference) in enumerate(zip(mine, eager, exact, strict=True)):
        if problem := _difference(f"result {number}", result, want, reference):
            return problem
    return ""


def _in_float64(before: GraphModule, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any] | None:
    """The flat outputs of the graph, computed in float64; None where the function does not run so."""
    wide = pytree.tree_map_only(Tensor, _wide, list(arguments))
    try:
        results = pytree.tree_leaves(function(*wide))
    except Exception:  # not every function runs in float64
        return None
    found: dict[int, Any] = {}
    for spec, result in zip(before.meta["signature"].outputs, results, strict=True):
        if spec.kind == "graph" and spec.view is None:
            found[spec.index] = result
    return [found.get(place) for place in range(len(outputs_of(before.graph)))]


def _wide(tensor: Tensor) -> Tensor:
    """A copy, in float64 where it holds real numbers."""
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def _difference(name: str, mine: Tensor, eager: Tensor, reference: Tensor | None) -> str:
    usable = reference is not None and reference.shape == eager.shape
    finite = eager[torch.isfinite(eager)] if eager.is_floating_point() else eager
    largest = finite.abs().max().item() if finite.numel() else 0.0
    atol = TOLERANCE.get(eager.dtype, 0.0) * largest
    problem = compare(name, mine, eager, reference if usable else None, atol=atol).problem
    return f"{name}: {problem}" if problem else ""


def _counterexample(sample: str, tried: Judged) -> Counterexample | None:
    return Counterexample(sample, tried.problem) if tried.problem else None
