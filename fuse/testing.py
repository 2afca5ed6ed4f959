"""For tests of models and of passes: one call that asserts what fuses, and that results equal eager's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fuse.check.oracle import check
from fuse.report.report import Report
from fuse.report.show import show


def assert_fuses(
    model: nn.Module,
    *args: Any,
    launches: int | None = None,
    fired: Mapping[str, int] | None = None,
    rejected: Mapping[str, int] | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    **kwargs: Any,
) -> Report:
    """Assert launches and rewrites of ``model(*args, **kwargs)``, then run it fused and compare it with eager.

    Args:
        launches: the number of launches predicted after the passes.
        fired: the number of rewrites of each named pass; ``{}``: no rewrite of any pass saves a launch.
        rejected: the number of candidates that each named pass declines.
        atol, rtol: absolute and relative tolerance, as in ``fuse check``; by default those of the dtype.

    Values, dtypes, shapes, strides, mutations and aliases must equal eager's, and the observed launches the predicted
    ones. Returns the report, for further assertions.

    Raises:
        AssertionError: with the report, so that a failing test shows what fired and what was rejected.

    >>> import torch
    >>> report = assert_fuses(nn.Linear(8, 4), torch.ones(2, 8), launches=1, fired={})
    """
    report = show(model, args, kwargs)
    problems = [str(failed) for failed in report.ledger.failed]
    if launches is not None and report.after.launches != launches:
        problems.append(f"{report.after.launches} launches, not {launches}")
    counts = _fired(report)
    if fired == {} and (saving := {one.pass_name: one.count for one in report.fired if one.launches_saved > 0}):
        problems.append(f"rewrites that save launches fired: {saving}")
    problems += _differences("fired", counts, fired or {})
    problems += _differences("declined", _rejected(report), rejected or {})
    checked = check(model, args, kwargs, atol=atol, rtol=rtol)
    if not checked.passed:
        problems.append(f"fused differs from eager:\n{checked}")
    if problems:
        raise AssertionError("\n".join([*problems, "", str(report)]))
    return report


def _fired(report: Report) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in report.fired:
        counts[one.pass_name] = counts.get(one.pass_name, 0) + one.count
    return counts


def _rejected(report: Report) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in report.rejected:
        counts[one.pass_name] = counts.get(one.pass_name, 0) + one.count
    return counts


def _differences(verb: str, actual: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    return [
        f"{name} {verb} {actual.get(name, 0)} times, not {count}"
        for name, count in expected.items()
        if actual.get(name, 0) != count
    ]
