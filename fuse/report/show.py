"""Predict a model's launches before and after the passes, without a run and without memory for weights.

model -> capture -> count eager's dispatches -> passes -> count the resulting graph -> Report
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fuse.cost import profiles
from fuse.cost.count import by_source, count_dispatches, count_graph, unknown_ops
from fuse.cost.memory import StepMemory, step_memory
from fuse.cost.optimizers import optimizer_launches
from fuse.cost.profiles import DeviceProfile
from fuse.errors import CaptureError, FuseError
from fuse.gradients.saved import settle
from fuse.graph.backward.joint import capture_joint
from fuse.graph.backward.joint_graphs import Joint
from fuse.graph.capture import capture
from fuse.graph.signature import Dispatch
from fuse.graph.sources import modules_of
from fuse.graph.structure.result_structure import given_host_values
from fuse.graph.values.evaluating import NoData
from fuse.report.casts import cast_lines
from fuse.report.loops import loops
from fuse.report.pictures.sketch import sketch
from fuse.report.record import record_of
from fuse.report.report import LineLaunches, Report
from fuse.rewrite.ledger import joined
from fuse.rewrite.pipeline import run_passes
from fuse.runtime.programs.footprint import peak_of_program
from fuse.runtime.programs.steps import Fallback


def show(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    passes: Sequence[str] | None = None,
    device: str = profiles.DEFAULT,
    train: bool = False,
    fuel: int | None = None,
    target: str | None = None,
    record: bool = False,
    measure: bool = False,
    against: Sequence[str] = (),
) -> Report:
    """Count the kernel launches of ``model(*args, **kwargs)`` before and after the passes.

    Args:
        model: a module with real or fake tensors, which is not changed. If ``forward`` reads values, these are
            computed from real tensors. A call that cannot be captured is counted while a copy of it runs.
        args, kwargs: the arguments of one call; their shapes and dtypes determine the counts.
        passes: names of the passes to run; by default all that are enabled.
        device: the device profile (``cpu``, ``v100``, ``ascend910``, ``h200``). It decides which operators are small,
            and gives the estimated seconds.
        train: capture the call in training mode (dropout and the like) with its gradients, then restore the mode. The
            report's ``backward`` has the backward pass, ``optimizer`` the launches of optimizers.
        fuel: stop after this many rewrites.
        target: the name of the model in the report; by default its class.
        record: keep every rewrite and every candidate in the report's ``record``, in about twice the time.
        measure: run copies of the call, eager and fused, and time each line and kernel; implies ``record``.
        against: ``("compile",)`` runs ``torch.compile`` on a copy of the call, and lists the pairs it did not fuse.

    Raises:
        NoData: tensors are fake, but ``forward`` reads values, the call cannot be captured, or it must run.
        FuseError: the model fails in eager too, or a pass or the device is unknown.

    >>> report = show(nn.Linear(3, 2), (torch.zeros(4, 3),))
    >>> report.before.launches, report.after.launches, report.device
    (1, 1, 'cpu')
    """
    profile = profiles.get(device)
    _check_running(measure, against, train, fuel, device)
    record = record or measure
    started = time.perf_counter()
    joint: Joint | None = None
    eager: Joint | None = None
    try:
        with modules_of(model) if record else nullcontext():
            if train:
                from fuse.gradients.differentiating import by_loops

                with _training(model):
                    joint = eager = capture_joint(model, args, kwargs, differentiate=by_loops(passes, fuel))
                    if joint.rolled:  # eager launches what autograd does step by step
                        eager = capture_joint(model, args, kwargs)
            graph = joint.forward if joint else capture(model, args, kwargs)
    except NoData:
        raise
    except CaptureError as why:
        try:
            halves = _as_eager(model, args, kwargs or {}, train)
        except NoData:
            raise NoData(str(why)) from why
        except Exception:  # the failure in eager has been reported
            raise why from why.__cause__
        return _report_of_eager(halves, profile, passes, str(why), target or type(model).__name__, record)
    seconds = time.perf_counter() - started
    before = (eager.forward, eager.backward) if eager else (graph, None)
    if not graph.meta["signature"].eagers:
        before = _as_eager(model, args, kwargs or {}, train)
    forward = _GraphReport(graph, before[0], profile, passes, fuel, seconds, record)
    backward: Report | None = None
    memory: StepMemory | None = None
    optimizer: Mapping[str, Mapping[str, int]] = {}
    name = target or type(model).__name__
    if joint and joint.backward and eager and before[1]:
        optimizer = optimizer_launches(_trained(eager))
        given = settle(graph, joint.backward, joint.given)
        placeholders = joint.backward.graph.find_nodes(op="placeholder")
        saved = [node for node, what in zip(placeholders, given, strict=True) if what.kind == "saved"]
        other = _GraphReport(joint.backward, before[1], profile, passes, fuel, 0.0, record)
        backward = other.report(f"{name}, backward", device)
        memory = step_memory(forward.dispatches + other.dispatches, graph, joint.backward, saved)
    report = replace(forward.report(name, device), backward=backward, optimizer=optimizer, step_memory=memory)
    if given_host_values(args, kwargs or {}):
        from fuse.report.host_stage import host_stage

        report = replace(report, host=host_stage(model, args, kwargs or {}, passes, device))
    if measure:
        from fuse.report.tracing.measured import measure as timed

        assert report.record is not None
        measured, with_times = timed(model, args, kwargs or {}, report.record, forward.dispatches, passes)
        report = replace(report, measured=measured, record=with_times)
    if against:
        from fuse.report.timing.against import compiled

        report = replace(report, compiled=compiled(model, args, kwargs))
    return report


def _check_running(measure: bool, against: Sequence[str], train: bool, fuel: int | None, device: str) -> None:
    """Raise ``FuseError`` for flags that do not fit a report that runs the model."""
    unknown = [peer for peer in against if peer != "compile"]
    if unknown:
        raise FuseError(f"no peer {unknown[0]!r} to show; there is compile (fuse bench times others)")
    flag = "--measure" if measure else "--against"
    if (measure or against) and (train or fuel is not None or device != profiles.DEFAULT):
        what = "--train" if train else f"--device {device}" if device != profiles.DEFAULT else "--fuel"
        raise FuseError(f"{flag} runs one forward pass here, with all rewrites; leave {what} out")


def _as_eager(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool
) -> tuple[GraphModule, GraphModule | None]:
    """The dispatches of an eager run of a copy of the call, forward and backward."""
    from fuse.report.as_eager import graphs_of_eager, has_data

    if not has_data(model, args, kwargs):
        raise NoData("eager's launches depend on values, which fake tensors do not have")
    with _training(model) if train else nullcontext():
        return graphs_of_eager(model, args, kwargs, train)


def _report_of_eager(
    halves: tuple[GraphModule, GraphModule | None],
    profile: DeviceProfile,
    passes: Sequence[str] | None,
    why: str,
    name: str,
    record: bool,
) -> Report:
    """The report of a call that runs eager, equal before and after."""

    def unchanged(graph: GraphModule, label: str) -> Report:
        report = _GraphReport(graph, graph, profile, passes, 0, 0.0, record).report(label, profile.name)
        lines = tuple(replace(line, after=line.before) for line in report.lines)
        return replace(report, after=report.before, lines=lines)

    forward, backward = halves
    behind = unchanged(backward, f"{name}, backward") if backward else None
    return replace(unchanged(forward, name), backward=behind, fallbacks=(Fallback(name, "", why),))


def _trained(joint: Joint) -> list[torch.dtype]:
    """The dtypes of the parameters that get gradients."""
    inputs = joint.forward.meta["signature"].inputs
    placeholders = joint.forward.graph.find_nodes(op="placeholder")
    reached = zip(inputs, placeholders, joint.gradients, strict=False)  # passes may add constants behind them
    return [node.meta["val"].dtype for spec, node, place in reached if spec.kind == "parameter" and place is not None]


class _GraphReport:
    """A captured graph during the passes, forward or backward; ``eager`` is the graph of eager's run."""

    def __init__(
        self,
        graph: GraphModule,
        eager: GraphModule,
        profile: DeviceProfile,
        passes: Sequence[str] | None,
        fuel: int | None,
        captured: float,
        record: bool,
    ) -> None:
        self.graph = graph
        self.profile = profile
        self.dispatches: tuple[Dispatch, ...] = eager.meta["signature"].dispatches
        self.before = count_dispatches(self.dispatches, profile)
        self.sketch = sketch(eager)  # a drawing is smaller and faster made than a copy of the graph
        started = time.perf_counter()
        self.ledger = run_passes(graph, passes, fuel, record=record)
        if earlier := graph.meta.get("ledger"):
            self.ledger = joined(earlier, self.ledger)
        self.seconds = {"capture": captured, "passes": time.perf_counter() - started}

    def report(self, target: str, device: str) -> Report:
        """The report of the graph in its present state."""
        peak = peak_of_program(self.graph)
        return Report(
            target=target,
            device=device,
            before=self.before,
            after=replace(count_graph(self.graph, self.profile), peak_bytes=peak.bytes),
            held=peak.held(),
            loops=loops(self.dispatches, self.graph, self.ledger),
            lines=_lines(by_source(self.dispatches), by_source(self.graph)),
            unknown_ops=tuple(unknown_ops(self.dispatches)),
            seconds=self.seconds,
            ledger=self.ledger,
            before_sketch=self.sketch,
            graph=self.graph,
            reads=learning.lines if (learning := self.graph.meta["signature"].learning) else (),
            casts=cast_lines(self.dispatches, self.graph, self.profile),
            record=record_of(self.ledger, self.dispatches, self.graph) if self.ledger.recording else None,
        )


def _lines(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[LineLaunches, ...]:
    lines = [
        LineLaunches(source, before.get(source, 0), after.get(source, 0)) for source in dict.fromkeys([*before, *after])
    ]
    return tuple(sorted(lines, key=lambda line: -line.before))


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Set training mode; restore each submodule's own mode afterwards (some may be frozen on purpose)."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
