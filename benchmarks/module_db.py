"""Every module that PyTorch tests itself with, forward and gradients, through both doors: is any wrong, how many fuse?

    for each module of module_db, on the CPU:    results, buffers, gradients    eager, fused, and in float64

    compile   fuse.compile(model)
    dynamo    torch.compile(model, backend="fuse"), recurrent layers allowed (torch._dynamo.config.allow_rnn)

A wrong value, dtype, shape, stride or gradient is a failure. A module counts as captured when none of its samples fell
back: no call, backward pass or operator of a region ran as eager would, and Dynamo broke no graph. Run it as::

    python -m benchmarks.module_db [--samples 6] [--only NAME ...] [-o benchmarks/results/module_db.json]
    python -m benchmarks.module_db --samples 200 --dtype float64 --unoptimised    # all samples

The samples of one module, in training mode and, where that differs, in evaluation, are one model first, which is one
capture. Where that falls back or differs, each sample is its own model, so that the sample at fault is named. Lazy
modules get their shapes from a call before, as they do in eager.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils import _pytree as pytree

import fuse
from benchmarks.common import RESULTS, Call, conditions, leaves, tangent, without_optimising
from fuse.check import oracle
from fuse.check.compare import compare
from fuse.check.inputs import widened
from fuse.errors import FuseError

SAMPLES = 6
"""Samples a module and mode."""

DTYPES = ("float32", "float64", "bfloat16", "float16")
Door = str


@dataclass(frozen=True)
class Outcome:
    """One module through one door. ``fallbacks`` are the reasons of what ran as eager would."""

    name: str
    door: Door
    samples: int
    fallbacks: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ran:
    """What one call left behind, by name, and why parts of it ran as eager would."""

    tensors: dict[str, Any]
    fallbacks: tuple[str, ...] = ()


class Several(nn.Module):
    """Modules side by side, each called with arguments of its own."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.several = nn.ModuleList(modules)

    def forward(self, calls: Sequence[Call]) -> list[Any]:
        return [module(*args, **kwargs) for module, (args, kwargs) in zip(self.several, calls, strict=True)]


def modules(names: Sequence[str] = ()) -> list[ModuleInfo]:
    """Modules of ``module_db``: all, or those named."""
    return [info for info in module_db if not names or info.name in names]


def sweep(info: ModuleInfo, door: Door, samples: int = SAMPLES, dtype: torch.dtype = torch.float32) -> Outcome:
    """Run the samples of one module through one door, and judge them."""
    made = _samples(info, samples, dtype)
    together = _judge(info, door, made)
    if not (together.fallbacks or together.wrong) or len(made) <= 1:
        return together
    apart = [_judge(info, door, [one]) for one in made]
    fallbacks = tuple(dict.fromkeys(reason for one in apart for reason in one.fallbacks))
    wrong = tuple(f"sample {i}: {text}" for i, one in enumerate(apart) for text in one.wrong)
    return Outcome(info.name, door, len(made), fallbacks, wrong or together.wrong)


def _samples(info: ModuleInfo, samples: int, dtype: torch.dtype) -> list[tuple[nn.Module, Call]]:
    """Modules with arguments that need gradients where they can, spread over the listing; those that eager accepts.

    Two modules are given random positions in float64, whatever they are asked for; they are run in float64.
    """
    return _samples_in(info, samples, dtype) or _samples_in(info, samples, torch.float64)


def _samples_in(info: ModuleInfo, samples: int, dtype: torch.dtype) -> list[tuple[nn.Module, Call]]:
    found = []
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        listed = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        step = max(1, len(listed) // samples)
        for sample in listed[::step][:samples]:
            if sample.forward_input is None:
                continue
            made = sample.constructor_input
            module = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
            call = leaves((tuple(sample.forward_input.args), dict(sample.forward_input.kwargs)))
            if _accepted(module, call, keep=info.is_lazy):
                found.append((module, call))
    return found


def _accepted(module: nn.Module, call: Call, keep: bool) -> bool:
    args, kwargs = copy.deepcopy(call)
    try:
        with torch.no_grad():
            (module if keep else copy.deepcopy(module))(*args, **kwargs)
    except Exception:  # what eager does not run is no case
        return False
    return True


def _judge(info: ModuleInfo, door: Door, samples: Sequence[tuple[nn.Module, Call]]) -> Outcome:
    model, calls = Several([module for module, _ in samples]), [call for _, call in samples]
    eager = _run(lambda m: m, model, calls, times=2)
    exact = _in_float64(model, calls)
    fused = DOORS[door](model, calls)
    wrong = []
    for name, expected in eager.tensors.items():
        got = fused.tensors.get(name)
        problem = _problem(got, expected, exact.get(name))
        wrong += [f"{name}: {problem}"] if problem else []
    wrong += [f"{name}: eager has no such thing" for name in fused.tensors.keys() - eager.tensors.keys()]
    if wrong and door == "compile":
        wrong = _confirmed(model, calls, wrong)
    return Outcome(info.name, door, len(samples), fused.fallbacks, tuple(wrong))


def _confirmed(model: nn.Module, calls: Sequence[Call], wrong: list[str]) -> list[str]:
    """What the oracle reports as well, which knows what an element was added up from (a sum whose terms cancel)."""
    try:
        report = oracle.check(copy.deepcopy(model), copy.deepcopy((calls,)), train=True)
    except FuseError as error:
        return [*wrong, str(error)]
    return [problem for problem in report.problems if "launches" not in problem]


def _run(
    compiled: Callable[[nn.Module], Callable[..., Any]], model: nn.Module, calls: Sequence[Call], times: int
) -> Ran:
    """Forward and backward, several times over: the call that compiles, and a later one."""
    model, calls = copy.deepcopy((model, calls))
    run = compiled(model)
    named: dict[str, Any] = {}
    for number in range(times):
        torch.manual_seed(0)
        result = run(calls)
        leaves = pytree.tree_leaves(result)
        trained = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        if trained:
            torch.autograd.backward(trained, [tangent(t) for t in trained])
        named |= {f"call {number}, result {i}": _kept(leaf) for i, leaf in enumerate(leaves)}
    arguments = (t for t in pytree.tree_leaves(calls) if isinstance(t, Tensor))
    named |= {f"gradient of argument {i}": a.grad for i, a in enumerate(arguments)}
    named |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    named |= {f"buffer {name}": b for name, b in model.named_buffers()}
    return Ran(named)


def _kept(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _through_compile(model: nn.Module, calls: Sequence[Call]) -> Ran:
    made: list[Any] = []

    def compiled(copied: nn.Module) -> nn.Module:
        made.append(fuse.compile(copied))
        return made[0]

    ran = _run(compiled, model, calls, times=2)
    last = made[0].last_run
    fallbacks = (*last.fallbacks, *(last.backward.fallbacks if last.backward else ()))
    return Ran(ran.tensors, tuple(dict.fromkeys(f.reason for f in fallbacks)))


def _through_dynamo(model: nn.Module, calls: Sequence[Call]) -> Ran:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(allow_rnn=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ran = _run(lambda copied: torch.compile(copied, backend="fuse"), model, calls, times=2)
    told = (str(one.message) for one in caught)
    reasons = [text for text in told if "runs eager" in text or "runs op by op" in text]
    reasons += [f"graph break: {reason.splitlines()[0]}" for reason in counters["graph_break"]]
    if not counters["stats"]["unique_graphs"]:
        reasons.append("Dynamo made no graph")
    return Ran(ran.tensors, tuple(dict.fromkeys(reasons)))


DOORS: dict[Door, Callable[[nn.Module, Sequence[Call]], Ran]] = {
    "compile": _through_compile,
    "dynamo": _through_dynamo,
}


def _in_float64(model: nn.Module, calls: Sequence[Call]) -> dict[str, Any]:
    """What the call leaves behind in float64, or nothing where it has no such form."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wide = pytree.tree_map_only(Tensor, widened, copy.deepcopy(calls))
        return _run(lambda m: m, copy.deepcopy(model).double(), wide, times=2).tensors
    except Exception:  # not every module runs in float64
        return {}
    finally:
        torch.set_default_dtype(before)


def _problem(got: Any, expected: Any, exact: Any) -> str:
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        same = type(got) is type(expected) and (isinstance(got, Tensor) or got == expected)
        return "" if same else f"{_short(got)} instead of {_short(expected)}"
    if not isinstance(exact, Tensor) or not _close(expected, exact):
        exact = None
    return compare("", got, expected, exact).problem


def _short(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def _close(eager: Tensor, exact: Tensor) -> bool:
    """Whether float64 tells the same story as eager: not where it drew other random numbers or another branch."""
    same = eager.shape == exact.shape and eager.is_floating_point()
    return same and torch.allclose(eager.double(), exact.double(), rtol=1e-2, atol=1e-2, equal_nan=True)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures: how many are wrong and how many captured, by door."""
    doors = {}
    for door in dict.fromkeys(one.door for one in outcomes):
        tried = [one for one in outcomes if one.door == door and one.samples]
        whole = [one for one in tried if not one.fallbacks]
        reasons = Counter(reason for one in tried for reason in one.fallbacks)
        doors[door] = {
            "modules": len(tried),
            "wrong": [one.name for one in tried if one.wrong],
            "captured": round(len(whole) / len(tried), 4) if tried else 0.0,
            "fallback_reasons": dict(reasons.most_common()),
        }
    return {"torch": torch.__version__, "doors": doors, "outcomes": [asdict(one) for one in outcomes]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples a module and mode")
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="modules to run instead of all")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of modules and arguments")
    parser.add_argument("--unoptimised", action="store_true", help="compile much faster, and slower kernels")
    parser.add_argument("--doors", nargs="*", default=list(DOORS), choices=list(DOORS), help="ways in")
    parser.add_argument("-o", "--output", type=Path, help="results/module_db.json of float32, nothing of others")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.unoptimised:
        without_optimising()
    outcomes: list[Outcome] = []
    chosen = modules(options.only)
    for number, info in enumerate(chosen, 1):
        for door in options.doors:
            start = time.perf_counter()
            outcome = sweep(info, door, options.samples, getattr(torch, options.dtype))
            outcomes.append(outcome)
            note = "; ".join((*(f"WRONG {text}" for text in outcome.wrong[:2]), *outcome.fallbacks[:2]))
            seconds = time.perf_counter() - start
            print(
                f"{number:>4}/{len(chosen)} {outcome.name:<28} {door:<8} {outcome.samples:>3} samples "
                f"{seconds:5.1f} s  {note}",
                file=sys.stderr,
                flush=True,
            )
    figures = {**conditions("module_db"), **summary(outcomes)}
    output = options.output or (RESULTS / "module_db.json" if options.dtype == "float32" and not options.only else None)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures["doors"], indent=1))
    return 1 if any(door["wrong"] for door in figures["doors"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
