"""Errors of a narrow dtype as text, as CSV and as a page.

The CSV's columns have the names of the accuracy comparison of CANN 8 (Index, OpType, GroundTruth, DataType, Shape,
OverFlow, CosineSimilarity, MaxAbsoluteError, RelativeEuclideanDistance: "Parameters in a Complete Model Comparison
Result", hiascend.com, 2024). Further columns are named in the same style. Names that begin with ``Isolated`` are errors
of the operator alone.
"""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from fuse.check.precision.chains import Chain, Operator
from fuse.check.precision.errors import Errors
from fuse.check.precision.keep import Recommendation
from fuse.check.precision.verdict import PrecisionReport, crossing
from fuse.report.columns import columns, scaled

TOP_LINES = 12

_MEASURES = ("CosineSimilarity", "MaxAbsoluteError", "RelativeEuclideanDistance", "SQNR", "MaxUlps")

COLUMNS = (
    *("Graph", "Index", "OpType", "GroundTruth", "DataType", "Shape", "OverFlow"),
    *_MEASURES,
    *(f"Isolated{name}" for name in _MEASURES),
    *("IsolatedAllowed", "Beyond", "Smallest", "Largest", "Overflows", "Underflows", "NaNs", "Source", "Note"),
)


def precision_table(report: PrecisionReport, target: str) -> RenderableType:
    """Results, verdicts, the worst lines, and the operators to keep in float32."""
    return Group(*_sections(report, target))


def precision_csv(report: PrecisionReport) -> str:
    """CSV with one line for each operator of both graphs."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_rows(report))
    return file.getvalue()


def precision_page(report: PrecisionReport, target: str) -> str:
    """One self-contained page: the verdicts, and a table of all operators that marks those with too large errors."""
    from fuse.report.columns import as_text

    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    beyond = COLUMNS.index("Beyond")
    body = "\n".join(
        f"<tr{' class=beyond' if row[beyond] == 'YES' else ''}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in _rows(report)
    )
    text = html.escape(as_text(precision_table(report, target)))
    title = html.escape(f"{target} in {report.dtype}")
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n<style>{_STYLE}</style>\n'
        f"<h1>{title}</h1>\n<pre>{text}</pre>\n"
        f"<div><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div></html>\n"
    )


_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
div { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .15em .6em; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd }
th { position: sticky; top: 0; background: #f4f4f4 } .beyond { background: #fbe3e0 }
"""


def _sections(report: PrecisionReport, target: str) -> Iterator[RenderableType]:
    yield Text(f"{target} in {report.dtype}, against float64; target {report.target}", style="bold")
    results = [(name, chain.result) for name, chain in (("eager", report.eager), ("fused", report.fused))]
    yield columns(["result", *_HEADS], [[name, *_measures(found)] for name, found in results])
    yield Text()
    for name, chain in (("eager", report.eager), ("fused", report.fused)):
        yield from _verdicts(name, chain, report)
    yield Text()
    yield from _lines(report.eager)
    yield Text()
    yield from _kept(report)


_HEADS = ("SQNR dB", "cosine", "max abs", "max ulps")


def _measures(found: Errors) -> list[str]:
    return [_decibels(found), f"{found.cosine:.6f}", f"{found.max_abs:.3g}", f"{found.max_ulps:.3g}"]


def _decibels(found: Errors | None) -> str:
    return "" if found is None else "exact" if found.sqnr == math.inf else f"{found.sqnr:.1f}"


def _verdicts(name: str, chain: Chain, report: PrecisionReport) -> Iterator[Text]:
    if first := chain.first_beyond:
        others = sum(one.beyond for one in chain.operators) - 1
        more = f", and {others:,} more" if others else ""
        assert first.isolated is not None
        yield Text(
            f"{name}: the first operator that by itself errs by more than its dtype explains is {_named(first)}: "
            f"relative error {first.isolated.relative:.2e}, {first.allowed:.2e} allowed{more}"
        )
    else:
        said = "no operator by itself errs by more than its dtype explains"
        yield Text(f"{name}: {said if name == 'eager' else 'no kernel errs by more than its operators explain'}")
    if crossed := crossing(chain, report.target):
        yield Text(
            f"{name}: the propagated error misses {report.target} first at {_named(crossed)}: "
            f"SQNR {_decibels(crossed.propagated)}, cosine {crossed.propagated.cosine:.6f}"
        )
    else:
        yield Text(f"{name}: the propagated error meets {report.target} at every operator")


def _named(one: Operator) -> str:
    said = f", {one.note} to {one.dtype}" if one.note.startswith("cast") else f", {one.dtype}"
    return f"{one.op} ({one.name}{said}) at {one.source or 'an input'}"


def _lines(chain: Chain) -> Iterator[RenderableType]:
    """The lines with the largest propagated errors, in program order."""
    lines: dict[str, list[Operator]] = {}
    for one in chain.operators:
        if one.source and "float" in one.dtype:
            lines.setdefault(one.source, []).append(one)
    worst = sorted(lines, key=lambda line: min(one.propagated.sqnr for one in lines[line]))[:TOP_LINES]
    rows = []
    for line in lines:
        if line in worst:
            found = lines[line]
            alone = [one.isolated for one in found if one.isolated]
            rows.append(
                [
                    line,
                    f"{len(found):,}",
                    _decibels(min((one.propagated for one in found), key=lambda one: one.sqnr)),
                    _decibels(min(alone, key=lambda one: one.sqnr, default=None)),
                    *(f"{sum(getattr(one.range, what) for one in found):,}" for what in _LOSSES),
                    f"{max(one.range.largest for one in found):.3g}",
                ]
            )
    if rows:
        heads = ["eager, worst lines", "operators", "propagated dB", "alone dB", *_LOSSES, "largest"]
        yield columns(heads, rows)


_LOSSES = ("overflows", "underflows", "nans")


def _kept(report: PrecisionReport) -> Iterator[Text]:
    found = report.recommended
    if found is None or found.precision is None:
        yield Text(f"what to keep in float32: {report.reason or (found.reason if found else '')}")
        return
    if not found.precision.keep:
        yield Text(f"what to keep in float32: nothing; {_of_kernels(found.confirmed)}")
    else:
        yield Text(f"what to keep in float32: {len(found.precision.keep)} operators, found in {found.trials} runs")
        before, after = _decibels(found.before), _decibels(found.after)
        yield Text(f"  eager's SQNR {before} dB without and {after} dB with these; {_of_kernels(found.confirmed)}")
        yield Text(f"  costs: {_price(found)}")
    yield Text(f"next: {found.code}")


def _of_kernels(confirmed: Errors | None) -> str:
    """The error of a run of the compiled program; the first table has that of the rewritten graph."""
    rounding = "which round less often than the operators of the tables above, run one by one"
    return f"the kernels, {rounding}, reach {_decibels(confirmed)} dB"


def _price(found: Recommendation) -> str:
    before, after = found.plain, found.kept
    assert before is not None
    assert after is not None
    return (
        f"launches {before.launches:,} -> {after.launches:,}, bytes {scaled(before.bytes, 'B')} -> "
        f"{scaled(after.bytes, 'B')}, {before.milliseconds:.3g} -> {after.milliseconds:.3g} ms"
    )


def _rows(report: PrecisionReport) -> Iterator[list[str]]:
    for name, chain in (("eager", report.eager), ("fused", report.fused)):
        for index, one in enumerate(chain.operators):
            yield [
                *(name, str(index), one.op, one.name, one.dtype, str(list(one.shape))),
                "YES" if one.range.overflows or one.range.nans else "NO",
                *_cells(one.propagated),
                *(_cells(one.isolated) if one.isolated else [""] * len(_MEASURES)),
                *(f"{one.allowed:.6g}", "YES" if one.beyond else "NO"),
                *(f"{one.range.smallest:.6g}", f"{one.range.largest:.6g}"),
                *(str(getattr(one.range, what)) for what in _LOSSES),
                *(one.source, one.note),
            ]


def _cells(found: Errors) -> list[str]:
    figures = (found.cosine, found.max_abs, found.relative, found.sqnr, found.max_ulps)
    return [f"{figure:.6g}" for figure in figures]
