"""Every operator that PyTorch tests itself with, through ``fuse.compile``: is any wrong, and how many are captured?

    for each operator of op_db, on the CPU:    2 * op(x) + 1    eager, fused, and in float64

A wrong value, dtype, shape or stride is a failure. The rest is counted: operators captured without falling back, and
operators that run in a generated kernel, next to a library call, or still as ATen calls. Run it as::

    python -m benchmarks.op_db [--samples 6] [--dtype float32] [--only NAME ...] [-o benchmarks/results/op_db.json]
    python -m benchmarks.op_db --gradients --samples 2000 --unoptimised --limit 300    # all samples, trained

With ``--gradients`` the calls need gradients, and those of their arguments are compared too. Up to 24 samples of one
operator are one model first, which is one capture and one compiler call. Where that falls back or differs, each sample
is its own model, so that the sample at fault is named; the oracle has the last word (:mod:`fuse.check.oracle`).
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import fuse
from benchmarks.common import RESULTS, Call, conditions, leaves, tangent, without_optimising
from fuse.check import oracle
from fuse.check.compare import compare
from fuse.check.inputs import widened
from fuse.errors import FuseError

SAMPLES = 6
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "bool")
TOGETHER = 24
"""Samples of one model."""

UNDEFINED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators whose result is whatever the memory held: nothing but dtype, shape and stride can be compared."""

COARSE = {"nn.functional.hardsigmoid": 1e-7}
"""Operators whose gradient has a relative error in eager's float64, and not in fused: a sixth rounded to float32."""

# op_db seeds inside of its random operators; here that would be a part of the model, so the run seeds and they do not.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

Place = str  # "kernel", "library", "aten", "eager"


@dataclass(frozen=True)
class Outcome:
    """One operator.

    ``place`` is where it runs, for the sample that fares worst: a generated kernel, a library call next to generated
    kernels, an ATen call, or eager as a whole. Samples without elements, for which no kernel is worth making, count
    only when they run eager. ``fallbacks`` are the reasons of what ran eager or op by op, ``declined`` counts the
    samples that did as a whole. ``unfinished`` operators ran into the limit of time.
    """

    name: str
    samples: int
    place: Place
    fallbacks: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    declined: int = 0
    unfinished: bool = False


class TooLong(KeyboardInterrupt):
    """An operator takes longer than it may: passes that raise are left out, and interrupts are not."""


class TwicePlusOne(nn.Module):
    """``2 * op(*arguments) + 1`` for every call in a list, on each resulting tensor."""

    def __init__(self, op: Callable[..., Any]) -> None:
        super().__init__()
        self.call = lambda *args, **kwargs: op(*args, **kwargs)  # an operator itself is changed by its first call

    def forward(self, calls: Sequence[Call]) -> list[Any]:
        return [pytree.tree_map_only(Tensor, lambda t: 2 * t + 1, self.call(*args, **kwargs)) for args, kwargs in calls]


Calls = list[Call]


def operators(names: Sequence[str] = (), dtype: torch.dtype = torch.float32, gradients: bool = False) -> list[OpInfo]:
    """Operators of ``op_db`` that take ``dtype`` on the CPU: all, or those named (``name`` or ``name.variant``)."""
    found = [op for op in op_db if dtype in op.supported_dtypes("cpu")]
    if gradients:
        found = [op for op in found if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")]
    return [op for op in found if not names or op.name in names or full_name(op) in names]


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def sweep(op: OpInfo, samples: int = SAMPLES, dtype: torch.dtype = torch.float32, gradients: bool = False) -> Outcome:
    """Run up to ``samples`` sample inputs of one operator fused, and judge them."""
    calls = calls_of(op, samples, dtype, gradients)
    filled = [call for call in calls if not _is_empty(call)]
    empty = [call for call in calls if _is_empty(call)]
    parts = [_together_or_apart(op, part, gradients) for part in (*_parts(filled), *_parts(empty))]
    if not parts:
        return Outcome(full_name(op), 0, "kernel")
    counted = parts[: len(_parts(filled))] or parts  # a kernel for no elements is worth nothing
    places = [one.place for one in counted] + [one.place for one in parts if one.place == "eager"]
    return Outcome(
        full_name(op),
        len(calls),
        _worst(places),
        tuple(dict.fromkeys(reason for one in parts for reason in one.fallbacks)),
        tuple(text for one in parts for text in one.wrong),
        sum(one.declined for one in parts),
    )


def _parts(calls: Calls) -> list[Calls]:
    return [calls[start : start + TOGETHER] for start in range(0, len(calls), TOGETHER)]


def _worst(places: Sequence[Place]) -> Place:
    return next(place for place in ("eager", "aten", "library", "kernel") if place in places)


def _together_or_apart(op: OpInfo, calls: Calls, gradients: bool) -> Outcome:
    together = _judge(op, calls, gradients)
    if together.place != "eager" and not together.wrong:
        return together
    apart = [together] if len(calls) == 1 else [_judge(op, [call], gradients) for call in calls]
    wrong = [
        f"sample {_short(call)}: {text}"
        for call, one in zip(calls, apart, strict=True)
        for text in _confirmed(op, [call], gradients, one.wrong)
    ]
    if not any(one.wrong for one in apart):
        wrong = list(_confirmed(op, calls, gradients, together.wrong))
    return Outcome(
        full_name(op),
        len(calls),
        _worst([one.place for one in apart]),
        tuple(dict.fromkeys(reason for one in apart for reason in one.fallbacks)),
        tuple(wrong),
        sum(one.declined for one in apart),
    )


def _confirmed(op: OpInfo, calls: Calls, gradients: bool, wrong: Sequence[str]) -> Sequence[str]:
    """What the oracle reports as well, which knows what an element was added up from (a sum whose terms cancel)."""
    if not wrong or op.name in UNDEFINED:
        return wrong
    try:
        report = oracle.check(TwicePlusOne(op.op), (calls,), train=gradients)
    except FuseError as error:
        return (*wrong, str(error))
    return [problem for problem in report.problems if "launches" not in problem]


def _short(call: Any) -> str:
    """A call, with shapes instead of values."""
    return str(pytree.tree_map_only(Tensor, lambda t: (str(t.dtype), tuple(t.shape), t.stride()), call))


def _is_empty(call: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.numel() == 0 for leaf in pytree.tree_leaves(call))


def calls_of(op: OpInfo, samples: int, dtype: torch.dtype = torch.float32, gradients: bool = False) -> Calls:
    """Sample inputs spread over the listing, those that eager itself accepts."""
    torch.manual_seed(0)
    listed: list[SampleInput] = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
    step = max(1, len(listed) // samples)
    calls: Calls = [leaves(((s.input, *s.args), dict(s.kwargs))) for s in listed[::step][:samples]]
    return [call for call in calls if _accepted(op, call, gradients)]


def _accepted(op: OpInfo, call: Call, gradients: bool) -> bool:
    try:
        _run(TwicePlusOne(op.op), [call], gradients)
    except Exception:  # what eager does not run is no case
        return False
    return True


def _run(model: nn.Module, calls: Calls, gradients: bool) -> Any:
    """The results, and the gradients of the arguments behind them."""
    calls = copy.deepcopy(calls)
    torch.manual_seed(0)
    with torch.set_grad_enabled(gradients):
        results = model(calls)
    if not gradients:
        return results
    trained = [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.backward(trained, [tangent(t) for t in trained])
    arguments = [t for t in pytree.tree_leaves(calls) if isinstance(t, Tensor)]
    return [results, [(t.grad is None, t.grad) for t in arguments]]


def _judge(op: OpInfo, calls: Calls, gradients: bool) -> Outcome:
    model = TwicePlusOne(op.op)
    fused = fuse.compile(model)
    eager = _run(model, calls, gradients)
    result = _run(fused, calls, gradients)
    run = fused.last_run
    assert run is not None
    if fused.compiled is None:
        place: Place = "eager"
    else:
        place = "aten" if run.aten else "library" if run.libraries else "kernel"
    backward = run.backward.fallbacks if run.backward else ()
    reasons = tuple(dict.fromkeys(f.reason for f in (*run.fallbacks, *backward)))
    exact = None if op.name in UNDEFINED else _in_float64(model, calls, gradients)
    wrong = _differences(op, eager, result, exact)
    wrong += _differences(op, eager, _run(fused, calls, gradients), exact, "second call: ")
    declined = len(calls) if place == "eager" else 0
    return Outcome(full_name(op), len(calls), place, reasons, tuple(wrong), declined)


def _in_float64(model: nn.Module, calls: Calls, gradients: bool) -> Any:
    """The results in float64, or None where the operator draws numbers, fixes a dtype or has no such form."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wide = pytree.tree_map_only(Tensor, widened, copy.deepcopy(calls))
        return _run(model, wide, gradients)
    except Exception:  # not every operator runs in float64
        return None
    finally:
        torch.set_default_dtype(before)


def _differences(op: OpInfo, eager: Any, fused: Any, exact: Any, when: str = "") -> list[str]:
    theirs, mine = pytree.tree_leaves(eager), pytree.tree_leaves(fused)
    if len(theirs) != len(mine):
        return [f"{when}{len(mine)} results instead of {len(theirs)}"]
    best = pytree.tree_leaves(exact)
    if len(best) != len(theirs) or not _close(theirs, best):
        best = [None] * len(theirs)
    problems = []
    for position, (one, other, reference) in enumerate(zip(mine, theirs, best, strict=True)):
        if not isinstance(other, Tensor):
            problem = "" if one == other else f"{one!r} instead of {other!r}"
        elif op.name in UNDEFINED:
            problem = compare("", torch.zeros_like(one), torch.zeros_like(other)).problem
        elif other.layout is torch.strided:
            problem = compare("", one, other, reference, rtol=COARSE.get(op.name)).problem
        else:
            problem = compare("", one.to_dense(), other.to_dense()).problem
        if problem:
            problems.append(f"{when}result {position}: {problem}")
    return problems


def _close(eager: Iterable[Any], exact: Iterable[Any]) -> bool:
    """Whether float64 tells the same story as eager: not where it drew other random numbers or another branch."""
    for one, other in zip(eager, exact, strict=True):
        if isinstance(one, Tensor) and one.is_floating_point():
            if not isinstance(other, Tensor) or one.shape != other.shape:
                return False
            if not torch.allclose(one.double(), other.double(), rtol=1e-2, atol=1e-2, equal_nan=True):
                return False
    return True


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures: how many are wrong, captured, and where operators run."""
    tried = [one for one in outcomes if one.samples]
    places = Counter(one.place for one in tried)
    reasons = Counter(reason for one in tried for reason in one.fallbacks)
    return {
        "torch": torch.__version__,
        "operators": len(tried),
        "samples": sum(one.samples for one in tried),
        "declined": sum(one.declined for one in tried),
        "unfinished": [one.name for one in tried if one.unfinished],
        "without_samples": [one.name for one in outcomes if not one.samples],
        "wrong": [one.name for one in tried if one.wrong],
        "captured": _share(len(tried) - places["eager"], len(tried)),
        "in_kernel": _share(places["kernel"], len(tried)),
        "in_kernel_or_library": _share(places["kernel"] + places["library"], len(tried)),
        "places": dict(places),
        "fallback_reasons": dict(reasons.most_common()),
        "outcomes": [asdict(one) for one in outcomes],
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=SAMPLES, help="sample inputs an operator")
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="operators to run instead of all")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the samples")
    parser.add_argument("--gradients", action="store_true", help="of the arguments too")
    parser.add_argument("--unoptimised", action="store_true", help="compile much faster, and slower kernels")
    parser.add_argument("--limit", type=int, default=0, metavar="SECONDS", help="for one operator, none by default")
    parser.add_argument("-o", "--output", type=Path, help="results/op_db.json of float32 without it, nothing of others")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.unoptimised:
        without_optimising()
    signal.signal(signal.SIGALRM, _stop)
    outcomes: list[Outcome] = []
    dtype: torch.dtype = getattr(torch, options.dtype)
    chosen = operators(options.only, dtype, options.gradients)
    for number, op in enumerate(chosen, 1):
        start = time.perf_counter()
        signal.alarm(options.limit)
        try:
            outcome = sweep(op, options.samples, dtype, options.gradients)
        except FuseError as error:
            outcome = Outcome(full_name(op), 1, "eager", (str(error),), declined=1)
        except TooLong:
            outcome = Outcome(full_name(op), 1, "eager", (f"more than {options.limit} s",), unfinished=True)
        finally:
            signal.alarm(0)
        outcomes.append(outcome)
        note = "; ".join((*(f"WRONG {text}" for text in outcome.wrong[:2]), *outcome.fallbacks[:2]))
        print(
            f"{number:>4}/{len(chosen)} {outcome.name:<52} {outcome.place:<8} {outcome.samples:>4} samples "
            f"{time.perf_counter() - start:5.1f} s  {note}",
            file=sys.stderr,
            flush=True,
        )
    figures = {**conditions("op_db"), **summary(outcomes)}
    plain = options.dtype == "float32" and not (options.only or options.gradients)
    output = options.output or (RESULTS / "op_db.json" if plain else None)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps({name: value for name, value in figures.items() if name != "outcomes"}, indent=1))
    return 1 if figures["wrong"] else 0


def _stop(*_: Any) -> None:
    raise TooLong


if __name__ == "__main__":
    sys.exit(main())
