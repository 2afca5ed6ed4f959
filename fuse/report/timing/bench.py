"""Time a model eager, fused, under ``torch.compile`` and against a hand-tuned peer, and count the launches.

Every contender gets its own copy of the model and its inputs. First calls are measured separately, with cold caches:
both sides begin with an empty folder, and ``torch.compile`` without any other cache. Modules are imported before. Then
the calls are interleaved (``timing.py``). Ratios are peer over fused: above 1, fused is faster.
"""

from __future__ import annotations

import copy
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch import nn
from torch.utils import _pytree as pytree

import fuse
from fuse.check.compare import compare
from fuse.cost.observe import CountingMode
from fuse.errors import FuseError
from fuse.notebook import preformatted
from fuse.report.columns import columns
from fuse.report.timing.inductor import generated_code, launches_in
from fuse.report.timing.machine import machine, versions
from fuse.report.timing.timing import Quartiles, interleaved, quartiles
from fuse.report.tracing.profiling import write_profile

PEERS = ("eager", "compile", "tuned")
APART = 2.0
"""How many times the upper quartile of a ratio may be the lower one on a machine that does nothing else."""


@dataclass(frozen=True)
class Timing:
    """One contender: one call in milliseconds, and the seconds its first call took."""

    milliseconds: Quartiles
    first_call_seconds: float


@dataclass(frozen=True)
class BenchReport:
    """Measurements of ``bench``.

    ``ratios`` has for each peer the ratio of the medians, peer over fused, and the quartiles of the ratios of single
    rounds. ``observed_backward`` has the launches (before, after) of the backward pass in training;
    ``compiled_launches`` counts those in the code of ``torch.compile``, if it is a peer and there is no training.
    ``disagreements`` names the results of fused that differ from eager by more than the tolerance.
    """

    target: str
    train: bool
    threads: int
    rounds: int
    timings: Mapping[str, Timing]
    ratios: Mapping[str, Quartiles]
    observed_before: int
    observed_after: int
    fallbacks: tuple[Mapping[str, str], ...]
    disagreements: tuple[str, ...]
    observed_backward: tuple[int, int] | None = None
    compiled_launches: int | None = None

    @property
    def launches_after(self) -> int:
        """All observed launches of the fused call, including its backward pass."""
        return self.observed_after + (self.observed_backward[1] if self.observed_backward else 0)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, with the machine and the versions that it holds for."""
        return {
            "schema_version": 1,
            "target": self.target,
            "train": self.train,
            "threads": self.threads,
            "rounds": self.rounds,
            "milliseconds": {name: timing.milliseconds.to_dict() for name, timing in self.timings.items()},
            "ratios": {name: ratio.to_dict() for name, ratio in self.ratios.items()},
            "first_call_seconds": {name: timing.first_call_seconds for name, timing in self.timings.items()},
            "observed": {"before": self.observed_before, "after": self.observed_after},
            **(
                {"observed_backward": dict(zip(("before", "after"), self.observed_backward, strict=True))}
                if self.observed_backward
                else {}
            ),
            **({} if self.compiled_launches is None else {"compiled_launches": self.compiled_launches}),
            "fallbacks": [dict(fallback) for fallback in self.fallbacks],
            "disagreements": list(self.disagreements),
            "machine": machine(),
            "versions": versions(),
        }

    def _repr_html_(self) -> str:
        return preformatted(self)

    def __str__(self) -> str:
        from fuse.report.columns import as_text

        return as_text(bench_table(self))


def bench(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    against: Sequence[str] = ("eager",),
    tuned: nn.Module | None = None,
    passes: Sequence[str] | None = None,
    train: bool = False,
    seconds: float = 3.0,
    seed: int = 0,
    atol: float | None = None,
    rtol: float | None = None,
    target: str | None = None,
    profile: Path | None = None,
) -> BenchReport:
    """Time ``model(*args, **kwargs)`` fused and as the peers in ``against`` (``eager``, ``compile``, ``tuned``) run it.

    Args:
        tuned: a hand-tuned module for the same work, the peer of that name; its results are not compared.
        train: time the forward pass and the backward pass of the sum of all results; by default, no gradients.
        seconds: about how long to measure each contender, in seconds.
        seed: the random state each first call starts from; these results are compared.
        atol, rtol: absolute and relative tolerance between fused and eager; both or none, by default the dtype's.
        profile: write a Chrome trace of one more call of each contender into this file.

    Raises:
        FuseError: a peer is unknown, or only one of the tolerances is given.
    """
    unknown = [peer for peer in against if peer not in PEERS]
    if unknown:
        raise FuseError(f"no peer {unknown[0]!r} to bench against; there are {', '.join(PEERS)}")
    modules = {"tuned": tuned} if tuned is not None else {}
    if "tuned" in against and not modules:
        raise FuseError("a bench against tuned needs the hand-tuned module: give it as tuned=")
    if (atol is None) != (rtol is None):
        raise FuseError("--atol and --rtol go together; give both or none")
    call = _with_gradients if train else _without_gradients
    _import_compilers(against)
    with ExitStack() as caches:
        steps: dict[str, Callable[[], Any]] = {}
        results: dict[str, Any] = {}
        first_calls: dict[str, float] = {}
        wrappers: list[str] | None = None
        # Eager is always run once: it is the reference of the results and of the launches.
        for name in dict.fromkeys(["eager", "fused", *against]):
            own, own_args, own_kwargs = copy.deepcopy((modules.get(name, model), args, dict(kwargs or {})))
            made = _contender(name, own, passes, caches, profile is not None)
            steps[name] = lambda made=made, inputs=own_args, named=own_kwargs: call(made, inputs, named)  # type: ignore[misc]  # no type for a default
            torch.manual_seed(seed)
            recording: AbstractContextManager[list[str]] = generated_code() if name == "compile" else nullcontext([])
            with recording as code:
                started = time.perf_counter()
                results[name] = steps[name]()
                first_calls[name] = time.perf_counter() - started
            if name == "compile" and not train:
                wrappers = code
            if name == "fused":
                last_run = made.last_run
        timed = {name: steps[name] for name in dict.fromkeys(["fused", *against])}
        samples = interleaved(timed, seconds)
        if profile is not None:
            write_profile(profile, {name: steps[name] for name in dict.fromkeys(["eager", *against, "fused"])})
    own, own_args, own_kwargs = copy.deepcopy((model, args, dict(kwargs or {})))
    counting, counting_backward = _counted(own, own_args, own_kwargs, train)
    backward = last_run.backward
    fallbacks = (*last_run.fallbacks, *(backward.fallbacks if backward else ()))
    return BenchReport(
        target=target or type(model).__name__,
        train=train,
        threads=torch.get_num_threads(),
        rounds=len(samples["fused"]),
        timings={
            name: Timing(quartiles([1000 * sample for sample in taken]), first_calls[name])
            for name, taken in samples.items()
        },
        ratios={name: _ratio(samples[name], samples["fused"]) for name in against},
        observed_before=counting,
        # A call that ran eager as a whole has eager's launches; fuse observes only its own.
        observed_after=last_run.launches or counting,
        fallbacks=tuple({"op": one.op, "source": one.source, "reason": one.reason} for one in fallbacks),
        disagreements=tuple(_disagreements(results["fused"], results["eager"], atol, rtol)),
        observed_backward=(counting_backward, backward.launches if backward else counting_backward) if train else None,
        compiled_launches=None if wrappers is None else launches_in(wrappers),
    )


def bench_table(report: BenchReport) -> RenderableType:
    """Times, ratios and first calls in columns; launches are those observed."""
    rows = []
    for name, timing in report.timings.items():
        ratio = report.ratios.get(name)
        times = timing.milliseconds
        rows.append(
            [
                name,
                f"{times.median:.3f}",
                f"{times.lower:.3f} - {times.upper:.3f}",
                f"{ratio.median:.2f}" if ratio else "",
                f"{ratio.lower:.2f} - {ratio.upper:.2f}" if ratio else "",
                f"{timing.first_call_seconds:.2f}",
            ]
        )
    what = "forward and backward" if report.train else "forward"
    here = machine()
    lines = [
        f"{report.rounds} rounds, {report.threads} threads of {here['cores']} cores, {here['processor']}",
        f"launches observed: {report.observed_before:,} eager, {report.observed_after:,} fused",
        *(f"  torch.compile: {count:,}, in the code it generated" for count in [report.compiled_launches] if count),
        *(f"  backward: {eager:,} eager, {fused:,} fused" for eager, fused in filter(None, [report.observed_backward])),
        *(f"ran as eager: {one['op']} at {one['source']}: {one['reason']}" for one in report.fallbacks),
        "speed-up is the peer's median over fused's, with the quartiles of single rounds; above 1, fused is faster",
    ]
    unsure = [name for name, ratio in report.ratios.items() if ratio.upper > APART * ratio.lower]
    if unsure:
        lines.append(f"against {', '.join(unsure)}, the quartiles are far apart: other programs run, so measure again")
    titles = ["", "ms (median)", "quartiles", "speed-up", "quartiles", "first call (s)"]
    return Group(
        Text(f"{report.target}, {what}, measured", style="bold"),
        Text(),
        columns(titles, rows),
        Text(),
        *(Text(line) for line in lines),
    )


def _contender(name: str, model: nn.Module, passes: Sequence[str] | None, caches: ExitStack, profiled: bool) -> Any:
    """The model as the contender runs it, with empty caches until ``caches`` closes.

    If ``profiled``, the kernels of ``torch.compile`` also record events, which costs each a little time.
    """
    if name in ("eager", "tuned"):
        return model
    if name == "fused":
        caches.enter_context(_empty_fuse_cache())
        return fuse.compile(model, passes=passes)
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    caches.enter_context(fresh_cache())
    caches.enter_context(torch._inductor.config.patch(force_disable_caches=True))
    caches.enter_context(torch._inductor.config.patch({"cpp.enable_kernel_profile": profiled}))
    return torch.compile(model)


def _import_compilers(against: Sequence[str]) -> None:
    """Import the compilers before first calls, which measure compiling."""
    importlib.import_module("torch._dynamo")  # fake tensors of some operators need it
    if "compile" in against:
        importlib.import_module("torch._inductor.compile_fx")


@contextmanager
def _empty_fuse_cache() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="fuse-bench-") as folder:
        os.chmod(folder, 0o700)
        with mock.patch.dict(os.environ, {"FUSE_CACHE_DIR": folder}):
            yield


def _without_gradients(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


def _with_gradients(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    result = model(*args, **kwargs)
    for parameter in model.parameters():
        parameter.grad = None
    torch.autograd.backward([tensor.sum() for tensor in _tensors(result) if tensor.requires_grad])
    return result


def _counted(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool) -> tuple[int, int]:
    """Eager's launches in a call, and in the backward pass after it."""
    with torch.set_grad_enabled(train), CountingMode() as counting:
        result = model(*args, **kwargs)
    leaves = [tensor for tensor in _tensors(result) if tensor.requires_grad]
    tangents = [torch.ones_like(tensor) for tensor in leaves]
    with CountingMode() as counting_backward:
        if leaves:
            torch.autograd.backward(leaves, tangents)
    return counting.launches, counting_backward.launches


def _ratio(peer: Sequence[float], fused: Sequence[float]) -> Quartiles:
    rounds = quartiles([one / other for one, other in zip(peer, fused, strict=True)])
    medians = quartiles(list(peer)).median / quartiles(list(fused)).median
    return Quartiles(min(rounds.lower, medians), medians, max(rounds.upper, medians))


def _disagreements(actual: Any, expected: Any, atol: float | None, rtol: float | None) -> Iterator[str]:
    """The results of two calls that differ, and by how much."""
    for position, (one, other) in enumerate(zip(_tensors(actual), _tensors(expected), strict=True)):
        if problem := compare("", one, other, atol=atol, rtol=rtol).problem:
            yield f"result {position} of fused differs from eager: {problem}"


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
