"""Reports as aligned text: figures in columns, marked as predicted or observed; the next command at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fuse.cost.count import Count
from fuse.cost.profiles import DEFAULT
from fuse.report.columns import columns, scaled, signed
from fuse.report.loops import Repetition, formula, trip_names
from fuse.report.report import HostStage, Measured, Report, TorchCompiled

TOP_LINES = 6
TOP_LOOPS = 4
TOP_REASONS = 12

_GUARDED = {
    "truth": "its truth",
    "number": "the number",
    "values": "all values",
    "size": "its size",
    "none": "any value: computed in each call",
}
"""The values for which the graph is valid, by kind of a read value."""


def report_table(report: Report) -> RenderableType:
    """The whole report, the most important tables first."""
    return Group(*_separated(_sections(report)))


def kinds_table(before: Count, after: Count, device: str) -> Table:
    """Launches by kind, then the other counts, before, after and as a difference; modelled time for a ``device``."""
    rows = [_row("launches", before.launches, after.launches)]
    for kind in dict.fromkeys([*before.by_kind, *after.by_kind]):
        counts = before.by_kind.get(kind, 0), after.by_kind.get(kind, 0)
        if any(counts):
            rows.append(_row(f"  {kind}", *counts))
    rows.append(_row("small operators", before.small_ops, after.small_ops))
    rows.append(_row("operator nodes", before.nodes, after.nodes))
    for name, unit in (("flops", ""), ("bytes", "B"), ("peak_bytes", "B")):
        old, new = getattr(before, name), getattr(after, name)
        difference = ("-" if new < old else "+") + scaled(abs(new - old), unit) if new != old else "0"
        label = {"flops": "arithmetic (flops)", "bytes": "memory traffic", "peak_bytes": "peak memory"}[name]
        rows.append([label, scaled(old, unit), scaled(new, unit), difference])
    if device:
        times = [1e3 * count.modelled_seconds for count in (before, after)]
        rows.append([f"time modelled for {device}, ms", *(f"{ms:.3f}" for ms in times), f"{times[1] - times[0]:+.3f}"])
        shares = [count.launching_seconds / (count.modelled_seconds or 1.0) for count in (before, after)]
        rows.append(["  of it waiting for launches", *(f"{share:.0%}" for share in shares), ""])
    return columns(["predicted", "before", "after", "difference"], rows)


def _row(label: str, before: int, after: int) -> list[str]:
    return [label, f"{before:,}", f"{after:,}", signed(after - before)]


def _sections(report: Report) -> Iterator[RenderableType]:
    yield Text(f"{report.target} on {report.device}, predicted", style="bold")
    yield kinds_table(report.before, report.after, report.device if report.device != DEFAULT else "")
    if report.held and report.after.peak_bytes > report.before.peak_bytes:
        parts = ", ".join(
            f"{name} {scaled(size, 'B')}" for name, size in report.held.items() if size > 1e-3 * report.after.peak_bytes
        )
        unseen = report.measured.libraries if report.measured else None
        said = "not counted" if unseen is None else f"{scaled(unseen, 'B')}, observed in a first run"
        yield Text(f"peak memory after: {parts}; workspaces of eager's libraries: {said}")
    if report.lines:
        yield _lines(report)
    if report.measured:
        yield from _measured(report.measured)
    if report.compiled:
        yield from _compiled(report.compiled)
    for fallback in report.fallbacks:
        what = f"{fallback.op} at {fallback.source} " if fallback.source else ""
        yield Text(f"{what}runs eager as it is: {fallback.reason}")
    if report.host:
        yield from _host_stage(report.host)
    if report.reads:
        rows = [[one.source or "(no line)", _GUARDED[one.guard], f"{one.count:,}"] for one in report.reads]
        yield columns(["values read", "the graph is made for", "reads"], rows, numbers_from=2)
    if report.casts:
        rows = [
            [
                *(one.source or "(no line)", one.casts, f"{one.before:,}", f"{one.after:,}"),
                *(scaled(one.bytes, "B"), f"{one.microseconds:.1f}"),
            ]
            for one in report.casts[:TOP_LINES]
        ]
        heads = ["casts by line", "from", "before", "after", "bytes before", "modelled us"]
        yield columns(heads, rows, numbers_from=2)
    yield from _loops(report)
    if report.fired:
        rows = [
            [one.pass_name + (f" ({one.pattern})" if one.pattern else ""), f"{one.count:,}", f"{one.launches_saved:,}"]
            for one in report.fired
        ]
        yield columns(["fired", "rewrites", "launches saved"], rows)
    else:
        yield Text("fired: nothing")
    yield from _rejected(report)
    for failed in report.ledger.failed:
        yield Text(str(failed))
    if report.unknown_ops:
        yield Text(f"unknown operators, each counted once: {', '.join(report.unknown_ops)}")
    if report.backward:
        yield from _sections(report.backward)
    if report.step_memory:
        held = report.step_memory
        bytes_held = f"{scaled(held.before, 'B')} before, {scaled(held.after, 'B')} after"
        yield Text(f"peak memory of a step: {bytes_held}; {scaled(held.saved, 'B')} saved for the backward pass")
    if report.optimizer:
        rows = [[name, *(f"{count:,}" for count in ways.values())] for name, ways in report.optimizer.items()]
        yield columns(["optimizer: launches a step", *next(iter(report.optimizer.values()))], rows)
    captured = f"capture {report.seconds['capture']:.2f} s, " if report.seconds["capture"] else ""
    yield Text(f"{captured}passes {report.seconds['passes']:.2f} s")
    if captured:
        yield Text(f"next: {_next_step(report)}")


def _host_stage(host: HostStage) -> Iterator[RenderableType]:
    first, last = host.lines
    rows = [
        [f"host stage, {first} to {last.rpartition(':')[2]}", f"{host.launches:,}", f"{host.launches:,}"],
        ["device stage", f"{host.before.launches:,}", f"{host.after.launches:,}"],
    ]
    yield columns(["launches by stage", "before", "after"], rows)
    crossing = [
        [one.name, one.what, scaled(one.bytes, "B"), "captured again for each value" if one.learned else ""]
        for one in host.crosses
    ]
    yield columns(["what crosses", "is", "bytes", ""], crossing, numbers_from=2)
    yield Text("host work of the next batches while this one computes: fuse.pipeline(fused, loader)")


def _lines(report: Report) -> Table:
    """The lines with the most launches, with measured times and launches of ``torch.compile``, if any."""
    titles, made = ["launches by line", "before", "after"], report.compiled
    if made:
        titles.append("torch.compile")
    if report.measured:
        titles += ["us before", "us after"]
    rows = []
    for line in report.lines[:TOP_LINES]:
        row = [line.source or "(no line)", f"{line.before:,}", f"{line.after:,}"]
        if made:
            row.append("" if made.obstacle else f"{made.lines.get(line.source, 0):,}")
        if report.measured:
            sides = report.measured.before, report.measured.after
            row += ["" if side.obstacle else f"{side.lines.get(line.source, 0.0):,.1f}" for side in sides]
        rows.append(row)
    return columns(titles, rows)


def _measured(measured: Measured) -> Iterator[RenderableType]:
    sides = {"before": measured.before, "after": measured.after}
    rows = [
        [name, f"{side.launches:,}", *(f"{time / 1000:,.3f}" for time in (side.busy, side.span))]
        for name, side in sides.items()
    ]
    yield Group(
        columns(["measured, by the profiler's clock", "launches", "ms in launches", "ms in all"], rows),
        Text(f"medians of {measured.calls:,} calls, {measured.threads:,} threads; fuse bench times whole calls"),
        *(Text(f"no times of lines {name}: {side.obstacle}") for name, side in sides.items() if side.obstacle),
    )


def _compiled(made: TorchCompiled) -> Iterator[RenderableType]:
    """The launches of ``torch.compile``, its graph breaks, and the pairs it did not fuse."""
    if made.obstacle:
        yield Text(f"torch.compile failed: {made.obstacle}")
        return
    graphs = f"{made.graphs:,} graph{'' if made.graphs == 1 else 's'}"
    yield Text(
        f"torch.compile: {made.launches:,} launches in the code that it generates for {graphs}, {made.seconds:.1f} s"
    )
    if made.breaks:
        yield columns(["torch.compile broke the graph at", "because"], [[b.source, b.reason] for b in made.breaks], 2)
    if made.refusals:
        rows = [[one.reason, ", ".join(one.lines[:2]), f"{one.count:,}"] for one in made.refusals[:TOP_LINES]]
        yield columns(["torch.compile did not fuse, because", "first at", "pairs"], rows, numbers_from=2)


def _loops(report: Report) -> Iterator[RenderableType]:
    """The loops' launches as figures and as a formula, then the result for each loop; equal loops appear once."""
    if not report.loops:
        return
    rows = [
        [one.source, *(f"{n:,}" for n in (one.trip_count, one.launches_per_step_before, one.launches_per_step_after))]
        for one in report.loops
    ]
    before = formula(report.before.launches, [(one.launches_per_step_before, one.trip_count) for one in report.loops])
    after = formula(report.after.launches, [(one.launches_per_step_after, one.trip_count) for one in report.loops])
    names = ", ".join(f"{name} = {n:,}" for n, name in trip_names([one.trip_count for one in report.loops]).items())
    yield Group(
        columns(["loops: launches a step", "steps", "before", "after"], rows),
        Text(f"launches = {before} -> {after}  with {names}"),
    )
    different = list(dict.fromkeys(report.loops))
    facts = [fact for one in different[:TOP_LOOPS] for fact in _facts(one)]
    if len(different) > TOP_LOOPS:
        facts.append([f"{len(different) - TOP_LOOPS} more (--json has all)", "", ""])
    yield columns(["inside the loops", "", ""], facts, numbers_from=3)


def _facts(loop: Repetition) -> Iterator[list[str]]:
    """The result for one loop, one fact for each row."""
    facts = [("runs as", _how(loop))]
    for rolled in dict.fromkeys(loop.rolled):
        if len(loop.rolled) > 1:
            inside = f", {rolled.launches:,} launches each" if rolled.launches else ""
            label = "program" if rolled.launches else "kernel"
            facts.append((label, f"{loop.rolled.count(rolled):,} x {rolled.trip_count:,} steps{inside}"))
        for label, values in (("carries", rolled.states), ("reads", rolled.reads), ("keeps", rolled.keeps)):
            if values:
                each = "" if label == "carries" else " a step"
                facts.append((label, f"{len(values)}: {', '.join(values)}{each}"))
    if loop.peeled:
        facts.append(("peeled", f"{loop.peeled:,} of {loop.trip_count:,} steps"))
    facts += [("outside" if loop.peeled else "hoisted", one) for one in loop.outside]
    facts += [("because", one) for one in loop.reasons]
    return ([loop.source if not n else "", label, text] for n, (label, text) in enumerate(facts))


def _how(loop: Repetition) -> str:
    """How a loop's steps run: as kernels, programs, or one after another."""
    kernels = sum(not rolled.launches for rolled in loop.rolled)
    programs = len(loop.rolled) - kernels
    said = ["one kernel for all steps" if kernels == 1 else f"{kernels:,} kernels for all steps"] if kernels else []
    if programs:
        what = "one program, step by step" if programs == 1 else f"{programs:,} programs, step by step"
        inside = f": {loop.rolled[0].launches:,} launches a step" if len(loop.rolled) == 1 else ""
        said.append(what + inside)
    return " and ".join(said) or "its steps, one after another"


def _rejected(report: Report) -> Iterator[RenderableType]:
    if not report.rejected:
        return
    most = sorted(report.rejected, key=lambda one: -one.count)
    rows = [
        [one.pass_name + (f" ({one.pattern})" if one.pattern else ""), one.reason, one.source, f"{one.count:,}"]
        for one in most[:TOP_REASONS]
    ]
    if len(most) > TOP_REASONS:
        others = most[TOP_REASONS:]
        rows.append([f"{len(others)} more (--json has all)", "", "", f"{sum(one.count for one in others):,}"])
    yield columns(["rejected", "because", "first at", "count"], rows, numbers_from=3)


def _next_step(report: Report) -> str:
    if ".py" in report.target:
        train = " --train" if report.backward else ""
        return f"fuse check {report.target}{train}  (runs it: values and observed launches)"
    return "fused = fuse.compile(model)"


def _separated(sections: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """The sections with a blank line between them."""
    for position, section in enumerate(sections):
        if position:
            yield Text()
        yield section
