"""Time a model at several lengths, and fit launches and milliseconds as functions of the length.

    --scan T=16:64:x2     T = 16, 32, 64: sets the constant, loads the file again, and times it
    launches  eager       51  195  387  771     ->    3 + 12*T
              fused        2    2    2    2     ->    2 +  0*T

A fit minimises relative errors. With absolute ones, the longest length alone would decide, and fixed costs would
vanish.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fuse.errors import FuseError
from fuse.report.columns import columns
from fuse.report.timing.bench import BenchReport
from fuse.report.timing.machine import machine
from fuse.report.timing.plot import plot

MOST_VALUES = 64
_FORM = re.compile(r"(?P<name>[^\W\d]\w*)=(?P<first>\d+):(?P<last>\d+):(?P<geometric>x?)(?P<step>\d+)")


@dataclass(frozen=True)
class Sweep:
    """The values that one constant of a model file takes in turn."""

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """The line ``fixed + each * T``; ``misfit`` is its largest relative error."""

    fixed: float
    each: float
    misfit: float

    def to_dict(self) -> dict[str, float]:
        return {"fixed": self.fixed, "each": self.each, "misfit": self.misfit}


@dataclass(frozen=True)
class ScanReport:
    """The measurements at each value, and fits of observed ``launches`` and of ``milliseconds``, by contender."""

    scan: Sweep
    reports: tuple[BenchReport, ...]
    launches: Mapping[str, Fit]
    milliseconds: Mapping[str, Fit]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values; ``cases`` has the report of each value, as from ``fuse bench`` without a scan."""
        cases = zip(self.scan.values, self.reports, strict=True)
        return {
            "schema_version": 1,
            "target": self.reports[0].target,
            "scan": {"name": self.scan.name, "values": list(self.scan.values)},
            "cases": [{"value": value, **report.to_dict()} for value, report in cases],
            "fits": {
                "launches": {name: fit.to_dict() for name, fit in self.launches.items()},
                "milliseconds": {name: fit.to_dict() for name, fit in self.milliseconds.items()},
            },
        }


def parse_scan(text: str) -> Sweep:
    """Read ``NAME=FIRST:LAST:xFACTOR`` or ``NAME=FIRST:LAST:STEP``.

    Raises ``FuseError`` for another form, and for fewer than two or more than 64 values.

    >>> parse_scan("T=16:256:x4").values, parse_scan("T=10:30:10").values
    ((16, 64, 256), (10, 20, 30))
    """
    found = _FORM.fullmatch(text.replace(" ", ""))
    if found is None:
        raise FuseError(f"cannot read --scan {text!r}; write NAME=FIRST:LAST:xFACTOR, for example --scan T=16:256:x2")
    value, last, step = (int(found[part]) for part in ("first", "last", "step"))
    grows = value > 0 and step > 1 if found["geometric"] else step > 0
    values: list[int] = []
    while grows and value <= last and len(values) <= MOST_VALUES:
        values.append(value)
        value = value * step if found["geometric"] else value + step
    if not 2 <= len(values) <= MOST_VALUES:
        raise FuseError(f"--scan {text!r} must give 2 to {MOST_VALUES} values, for example --scan T=16:256:x2")
    return Sweep(found["name"], tuple(values))


def fit(lengths: Sequence[int], figures: Sequence[float]) -> Fit:
    """The line through positive ``figures`` with the least squares of relative errors.

    >>> fit([16, 64, 256], [195, 771, 3075])
    Fit(fixed=3.0, each=12.0, misfit=0.0)
    """
    weights = [1 / figure**2 for figure in figures]
    total = sum(weights)
    middle = sum(w * x for w, x in zip(weights, lengths, strict=True)) / total
    level = sum(w * y for w, y in zip(weights, figures, strict=True)) / total
    spread = sum(w * (x - middle) ** 2 for w, x in zip(weights, lengths, strict=True))
    pairs = zip(weights, lengths, figures, strict=True)
    # Twelve digits: fits of launches become whole numbers.
    each = round(sum(w * (x - middle) * (y - level) for w, x, y in pairs) / spread, 12)
    fixed = round(level - each * middle, 9)
    errors = [abs(fixed + each * x - y) / y for x, y in zip(lengths, figures, strict=True)]
    return Fit(fixed, each, round(max(errors), 9))


def scan(values: Sweep, measure: Callable[[int], BenchReport]) -> ScanReport:
    """Measure at each value in turn; ``measure`` loads the model with that value."""
    reports = tuple(measure(value) for value in values.values)
    milliseconds = {name: [report.timings[name].milliseconds.median for report in reports] for name in _names(reports)}
    launches = {
        "eager": [report.observed_before for report in reports],
        "fused": [report.observed_after for report in reports],
    }
    return ScanReport(
        values,
        reports,
        {name: fit(values.values, figures) for name, figures in launches.items()},
        {name: fit(values.values, figures) for name, figures in milliseconds.items()},
    )


def scan_table(report: ScanReport) -> RenderableType:
    """Figures by value, then the fits; launches are observed."""
    name, values, reports = report.scan.name, report.scan.values, report.reports
    names = _names(reports)
    rows = [
        [
            f"{value:,}",
            f"{one.observed_before:,}",
            f"{one.observed_after:,}",
            *(f"{one.timings[name].milliseconds.median:.3f}" for name in names),
            *(f"{one.timings[name].first_call_seconds:.2f}" for name in names if name != "eager"),
        ]
        for value, one in zip(values, reports, strict=True)
    ]
    titles = [
        name,
        "launches: eager",
        "fused",
        *(f"{'ms: ' if position == 0 else ''}{name}" for position, name in enumerate(names)),
        *(f"{'first call s: ' if position == 0 else ''}{name}" for position, name in enumerate(names[1:])),
    ]
    lines = [
        *([f"launches, {name}", _whole(f.fixed), _whole(f.each), _percent(f)] for name, f in report.launches.items()),
        *([f"ms, {name}", f"{f.fixed:.4f}", f"{f.each:.6f}", _percent(f)] for name, f in report.milliseconds.items()),
    ]
    fallbacks = dict.fromkeys(
        f"ran as eager: {one['op']} at {one['source']}: {one['reason']}" for r in reports for one in r.fallbacks
    )
    here, first = machine(), reports[0]
    what = "forward and backward" if first.train else "forward"
    return Group(
        Text(f"{first.target}, {what}, {name} from {values[0]:,} to {values[-1]:,}, measured", style="bold"),
        Text(),
        columns(titles, rows, numbers_from=0),
        Text(),
        columns([f"a + b*{name}", "a", "b", "off by at most"], lines),
        Text(),
        *(Text(line) for line in fallbacks),
        Text(f"{first.threads} threads of {here['cores']} cores, {here['processor']}; first calls with empty caches"),
    )


def scan_picture(report: ScanReport) -> str:
    """SVG of the milliseconds by value, both axes logarithmic."""
    names = _names(report.reports)
    series = {name: [one.timings[name].milliseconds.median for one in report.reports] for name in names}
    return plot(f"{report.reports[0].target}: milliseconds by {report.scan.name}", report.scan.values, series)


def _names(reports: Sequence[BenchReport]) -> list[str]:
    """The contenders: eager first, fused last."""
    timed = list(reports[0].timings)
    return sorted(timed, key=lambda name: (name == "fused", name != "eager"))


def _percent(fit: Fit) -> str:
    return f"{100 * fit.misfit:.1f} %"


def _whole(figure: float) -> str:
    return f"{figure:,.0f}" if figure == round(figure) else f"{figure:,.2f}"
