"""The verbs of the command ``fuse``: each calls the function that Python users call, and returns the exit status.

The verbs import torch themselves, when they run, so that ``fuse --help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import fuse
from fuse import config
from fuse.errors import FuseError
from fuse.flags import (
    Console,
    Request,
    budget_options,
    fuel_option,
    json_text,
    names,
    output_verb,
    path_option,
    target_verb,
    tolerance_options,
    train_option,
)

if TYPE_CHECKING:
    from fuse.graph.loading.load import LoadedModel
    from fuse.report.listing import Language
    from fuse.report.report import Report
    from fuse.rewrite.installed import BrokenPlugin

GOOD, FAILED = 0, 1

TRUST = "The file of TARGET is ordinary Python and runs with your rights: open only files that you trust."


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=TRUST)
@click.version_option(fuse.__version__, prog_name="fuse")
@click.pass_context
def commands(context: click.Context) -> None:
    """See, fuse and count the small kernels of a PyTorch model.

    TARGET is path/to/model.py or path/to/model.py:Name. [tool.fuse] in the nearest pyproject.toml may set defaults of
    flags, as in max-launches = 200 or ignore = ["NAME"].
    """
    settings = config.defaults(Path.cwd())
    context.default_map = dict.fromkeys(commands.commands, settings)


@commands.command(epilog=TRUST)
@target_verb(
    click.option("--device", default="cpu", show_default=True, metavar="PROFILE", help="Device to predict for."),
    train_option,
    fuel_option,
    *budget_options,
    path_option("--graph", metavar="OUT", help="Draw the graphs before and after into this .svg, .dot or .html file."),
    path_option(
        "--html", metavar="OUT", help="Write a page here that walks through every rewrite, the graph and the kernels."
    ),
    click.option(
        "--kernels",
        is_flag=False,
        flag_value="source",
        type=click.Choice(["source", "ir"]),
        help="Print the generated kernels instead of the report: their source, or with --kernels=ir their loops.",
    ),
    click.option(
        "--measure", is_flag=True, help="Run the model, eager and fused: microseconds of each line and kernel."
    ),
    click.option(
        "--against",
        callback=names,
        metavar="compile",
        help="Run torch.compile, too: its launches, its kernels, and the pairs that it did not fuse, with reasons.",
    ),
)
def show(
    request: Request,
    to: Console,
    device: str,
    graph: Path | None,
    html: Path | None,
    kernels: Language | None,
    measure: bool,
    against: tuple[str, ...] | None,
) -> int:
    """Count kernel launches before and after the passes.

    Counts are predictions: the model is not run, and its weights are not allocated, unless it reads values, cannot be
    captured, or --measure or --against is given.
    """
    if kernels and to.as_json:
        raise FuseError("--kernels prints text, not JSON; leave one of the two flags out")
    if graph is not None:
        from fuse.report.pictures.draw import check_suffix

        check_suffix(graph)
    from fuse.report.show import show as make_report
    from fuse.report.table import report_table

    passes = request.passes()

    def made(loaded: LoadedModel) -> Report:
        compiling = ", and torch.compile, which takes long for loops" if against else ""
        with to.stage(f"capturing and running the passes{compiling}"):
            return make_report(
                loaded.model,
                loaded.args,
                loaded.kwargs,
                passes=passes,
                device=device,
                train=request.train,
                fuel=request.fuel,
                target=request.target,
                record=to.as_json or html is not None,
                measure=measure,
                against=against or (),
            )

    if measure or against:
        loaded = request.load(to, real=True)
        report = made(loaded)
    else:
        report = request.with_model(to, made)
    if measure and report.measured is not None:
        from fuse.report.timing.heap import held_by_libraries

        with to.stage("observing what eager's libraries hold"):
            libraries = held_by_libraries(request.target, request.inputs, request.settings, loaded)
        report = replace(report, measured=replace(report.measured, libraries=libraries))
    if graph is not None:
        from fuse.report.pictures.draw import draw

        with to.stage("drawing"):
            drawing = draw(report, graph)
        to.say(f"wrote {', '.join(str(path) for path in drawing.written)}")
        if drawing.hint is not None:
            to.say(drawing.hint)
    if html is not None:
        from fuse.report.viewing import view

        view(report.to_dict(), html)
        to.say(f"wrote {html}; open it in a browser")
    if kernels:
        from fuse.report.listing import listing

        to.write(listing(report.graph, kernels))
    else:
        to.emit(report.to_dict(), lambda: report_table(report))
    return GOOD if request.within_budget(report.launches_after) else FAILED


@commands.command(epilog=TRUST)
@target_verb(train_option, fuel_option, *budget_options, *tolerance_options)
def check(request: Request, to: Console, atol: float | None, rtol: float | None) -> int:
    """Run eager and fused and compare them.

    Values are compared with a float64 reference; dtypes, shapes, strides, mutations, aliases and launches with eager's.
    """
    from rich.text import Text

    from fuse.check.oracle import check as compare

    loaded, passes = request.load(to, real=True), request.passes()
    with to.stage("running eager, fused and the float64 reference"):
        report = compare(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            train=request.train,
            seed=request.seed,
            atol=atol,
            rtol=rtol,
            passes=passes,
            fuel=request.fuel,
        )
    values = {**report.to_dict(), "target": request.target}
    to.emit(values, lambda: Text(str(report), no_wrap=True, overflow="ignore"))
    within = request.within_budget(report.launches_after)
    return GOOD if report.passed and within else FAILED


@commands.command(epilog=TRUST)
@target_verb(
    train_option,
    *budget_options,
    *tolerance_options,
    click.option(
        "--against",
        default="eager",
        show_default=True,
        callback=names,
        metavar="PEERS",
        help="Any of compile, eager, tuned (the object of this name in the file).",
    ),
    click.option(
        "--seconds", type=click.FloatRange(min=0.01), default=3.0, show_default=True, help="Time to spend on each peer."
    ),
    click.option(
        "--scan",
        "scanned",
        metavar="NAME=16:256:x2",
        help="Set this constant to each value in turn; fit launches and time as a + b*NAME.",
    ),
    path_option("--graph", metavar="OUT.svg", help="With --scan: plot the times."),
    path_option("--profile", metavar="OUT.json[.gz]", help="Write a Chrome trace of one more call of each."),
)
def bench(
    request: Request,
    to: Console,
    atol: float | None,
    rtol: float | None,
    against: tuple[str, ...],
    seconds: float,
    scanned: str | None,
    graph: Path | None,
    profile: Path | None,
) -> int:
    """Time eager, fused and other peers, interleaved in one process."""
    if graph is not None and (scanned is None or graph.suffix != ".svg"):
        raise FuseError(f"--graph {graph} plots the times of a --scan into an .svg file")
    if profile is not None and scanned is not None:
        raise FuseError("--profile writes the trace of one bench, not of a --scan; leave one of the two flags out")
    from fuse.report.timing.bench import BenchReport, bench_table
    from fuse.report.timing.bench import bench as measure
    from fuse.report.timing.scan import parse_scan, scan, scan_picture, scan_table

    passes = request.passes()

    def measured(request: Request, peers: tuple[str, ...], what: str = "") -> BenchReport:
        loaded = request.load(to, real=True, tuned="tuned" in peers)
        with to.stage(f"timing fused and {', '.join(peers)}{what}"):
            return measure(
                loaded.model,
                loaded.args,
                loaded.kwargs,
                against=peers,
                tuned=loaded.tuned,
                passes=passes,
                train=request.train,
                seconds=seconds,
                atol=atol,
                rtol=rtol,
                target=request.target,
                profile=profile,
            )

    if scanned is None:
        reports: tuple[BenchReport, ...] = (measured(request, against),)
        if profile is not None:
            to.say(f"wrote {profile}; next: fuse trace {profile} --model {request.target}")
        to.emit(reports[0].to_dict(), lambda: bench_table(reports[0]))
    else:
        values, peers = parse_scan(scanned), tuple(dict.fromkeys(["eager", *against]))
        report = scan(values, lambda n: measured(request.setting(values.name, n), peers, f" at {values.name} = {n:,}"))
        reports = report.reports
        if graph is not None:
            from fuse.report.files import write

            write(graph, scan_picture(report))
            to.say(f"wrote {graph}")
        to.emit(report.to_dict(), lambda: scan_table(report))
    disagreements = [reason for one in reports for reason in one.disagreements]
    for reason in disagreements:
        click.echo(f"fuse: failed: {reason}", err=True)
    within = request.within_budget(max(one.launches_after for one in reports))
    return GOOD if within and not disagreements else FAILED


@commands.command()
@output_verb(
    click.argument("before", type=click.Path(path_type=Path)),
    click.argument("after", type=click.Path(path_type=Path)),
    path_option("--html", metavar="OUT", help="Write a page here with both graphs side by side, aligned by line."),
)
def diff(to: Console, before: Path, after: Path, html: Path | None) -> int:
    """Compare two reports that `fuse show --json -o FILE` saved."""
    from fuse.report.diff import compare, diff_table, read

    old, new = read(before), read(after)
    if html is not None:
        from fuse.report.aligned import diff_page

        diff_page(old, new, (str(before), str(after)), html)
        to.say(f"wrote {html}; open it in a browser")
    changes = compare(old, new)
    to.emit(changes, lambda: diff_table(changes, str(before), str(after)))
    return GOOD


@commands.command()
@output_verb(click.argument("name", required=False))
def example(to: Console, name: str | None) -> int:
    """Print an example model, or list them all.

    `fuse example lstm_loop -o lstm_loop.py` writes one, for the other verbs to read and for you to change.
    """
    from fuse import examples

    if name is not None:
        source = examples.source(name)
        to.write(json_text({"name": name, "source": source}) if to.as_json else source.removesuffix("\n"))
        if to.output is not None:
            to.say(f"wrote {to.output}; next: fuse show {to.output}")
        return GOOD
    from fuse.report.columns import columns

    known = examples.summaries()
    to.emit(
        {"examples": [{"name": one, "summary": summary} for one, summary in known.items()]},
        lambda: columns(["example", "is"], [list(row) for row in known.items()], numbers_from=2),
    )
    return GOOD


@commands.command()
@output_verb(
    click.argument("trace", type=click.Path(path_type=Path)),
    click.option(
        "--model", metavar="TARGET", help="Find this model's calls in the trace; say what fuse makes of them."
    ),
    click.option("--input", "inputs", multiple=True, metavar="NAME=f32[64,16]", help="Replace an input of the model."),
    click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a constant of its file first."),
    path_option("--against", metavar="OTHER.json", help="Compare with another trace."),
    path_option("--html", metavar="OUT", help="Write a page here that shows every launch, with its time and line."),
)
def trace(
    to: Console,
    trace: Path,
    model: str | None,
    inputs: tuple[str, ...],
    settings: tuple[str, ...],
    against: Path | None,
    html: Path | None,
) -> int:
    """Count the launches of a real run, from a Chrome trace of torch.profiler.

    TRACE is what export_chrome_trace wrote, .json or .json.gz, of anyone's run on a processor or a GPU; fuse bench
    --profile writes one, too. With --model the file of TARGET is run like that of fuse show.
    """
    from fuse.report.tracing.trace_report import compare
    from fuse.report.tracing.trace_report import trace as read
    from fuse.report.tracing.trace_table import comparison_table, trace_table

    if model is None and (inputs or settings):
        raise FuseError("--input and --set change the model that --model names; name it, or leave them out")
    loaded = None
    if model is not None:
        from fuse.graph.loading.load import load

        loaded = load(model, inputs, settings)
    with to.stage(f"reading {trace}"):
        report = read(trace, loaded, model or "")
        other = read(against, loaded, model or "") if against is not None else None
    if html is not None:
        from fuse.report.tracing.trace_page import trace_page

        trace_page(report, html, other)
        to.say(f"wrote {html}; open it in a browser")
    if other is not None:
        changes = compare(report, other)
        to.emit(changes, lambda: comparison_table(changes))
    else:
        to.emit(report.to_dict(), lambda: trace_table(report))
    return GOOD


@commands.command()
@output_verb()
def passes(to: Console) -> int:
    """List the installed passes, in the order in which they run."""
    from fuse.report.columns import columns
    from fuse.rewrite.registry import broken_plugins, registered

    shown = ("name", "stage", "origin", "enabled", "summary")
    installed: list[dict[str, Any]] = [{one: getattr(info, one) for one in shown} for info in registered()]
    broken = broken_told(broken_plugins(), to)
    rows = [
        [
            "" if before and one["stage"] == before["stage"] else one["stage"],
            one["name"],
            "fuse" if one["origin"].startswith("fuse.passes.") else one["origin"],
            one["summary"] if one["enabled"] else f"{one['summary']} (only when selected)",
        ]
        for before, one in zip([None, *installed], installed, strict=False)
    ]
    head = ["stage", "pass", "from", "does"]
    to.emit({"passes": installed, "broken": broken}, lambda: columns(head, rows, numbers_from=4))
    return GOOD


@commands.command(epilog=TRUST)
@target_verb(
    train_option,
    *tolerance_options,
    path_option("--repro", metavar="OUT.py", help="Write a model file here that shows the fault by itself."),
)
def bisect(request: Request, to: Console, atol: float | None, rtol: float | None, repro: Path | None) -> int:
    """Find the first rewrite that breaks `fuse check`.

    Rewrites are numbered; bisection checks the model with the first half of them, and so on. The repro has the
    operators of that rewrite alone, if they still fail, else the whole graph, with random inputs.
    """
    from rich.text import Text

    from fuse.check.bisecting import bisect as find
    from fuse.report.files import write

    loaded, passes = request.load(to, real=True), request.passes()
    with to.stage("checking with fewer and fewer rewrites"):
        found = find(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            train=request.train,
            seed=request.seed,
            atol=atol,
            rtol=rtol,
            passes=passes,
            on_check=lambda fuel: to.say(f"checking with --fuel {fuel}"),
        )
    if repro is not None and found.repro is not None:
        write(repro, found.repro)
        to.say(f"wrote {repro}; it fails like this: fuse check {repro}")
    elif repro is not None and found.culprit is not None:
        to.say(f"no repro fails by itself; use fuse check {request.target} --fuel {found.culprit.number}")
    to.emit({**found.to_dict(), "target": request.target}, lambda: Text(str(found), no_wrap=True, overflow="ignore"))
    return GOOD if found.passed else FAILED


@commands.command(epilog=TRUST)
@target_verb(
    click.option(
        "--dtype",
        type=click.Choice(["bf16", "f16", "autocast"]),
        default="bf16",
        show_default=True,
        help="What to run the model in; autocast: by torch's rules, bfloat16.",
    ),
    click.option(
        "--target",
        "goal",
        default="sqnr>=40",
        show_default=True,
        help="Target of the result: sqnr>=DB, cosine>=C, relative<=R or max_abs<=A.",
    ),
    path_option("--csv", metavar="OUT.csv", help="Write every operator's errors into this file."),
    path_option("--html", metavar="OUT.html", help="Write them into a page."),
)
def precision(request: Request, to: Console, dtype: str, goal: str, csv: Path | None, html: Path | None) -> int:
    """Find where a narrow dtype loses accuracy, operator by operator.

    Each operator is measured against float64 twice: with what came before it in the narrow dtype (propagated), and
    by itself (isolated). The report names the first operator whose isolated error is more than its dtype explains, the
    first whose propagated error misses the target, and the smallest set found to keep in float32.
    """
    from fuse.check.precision.verdict import precision as measure
    from fuse.report.files import write
    from fuse.report.precision import precision_csv, precision_page, precision_table

    loaded, passes = request.load(to, real=True), request.passes()
    with to.stage(f"running it in float64 and {dtype}, and looking for what to keep in float32"):
        report = measure(
            loaded.model, loaded.args, loaded.kwargs, dtype=dtype, target=goal, passes=passes, seed=request.seed
        )
    if csv is not None:
        write(csv, precision_csv(report))
        to.say(f"wrote {csv}")
    if html is not None:
        write(html, precision_page(report, request.target))
        to.say(f"wrote {html}")
    to.emit({**report.to_dict(), "target": request.target}, lambda: precision_table(report, request.target))
    return GOOD if report.passed else FAILED


def broken_told(plugins: Sequence[BrokenPlugin], to: Console) -> list[dict[str, str]]:
    """Plugins that do not load, as JSON values; a warning names each."""
    for plugin in plugins:
        to.say(f"warning: plugin {plugin.name} of {plugin.origin} does not load: {plugin.error}")
    return [asdict(plugin) for plugin in plugins]
