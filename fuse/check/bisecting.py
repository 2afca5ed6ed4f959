"""Find the first rewrite that breaks a model, and write a small file that reproduces it.

check --fuel 0     passes          rewrites 1..5 are made: right
check --fuel 9     differs         rewrites 1..6 are made: wrong      ->     rewrite 6 is at fault
check --fuel 4     passes
...                                repro: the operators of rewrite 6 alone, if they still fail; else the whole graph
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from fuse.check.oracle import CheckReport, check
from fuse.check.repro import source_of
from fuse.errors import CaptureError
from fuse.graph.capture import capture
from fuse.notebook import preformatted
from fuse.rewrite import regions
from fuse.rewrite.ledger import Fired
from fuse.rewrite.pipeline import run_passes

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Bisection:
    """The result. ``culprit`` is None if the model is right, or wrong without any rewrite (``problem``).

    ``repro`` is the source of a model file that fails by itself, or None if none was found; ``whole`` says that the
    file holds the whole model's graph.
    """

    rewrites: int
    checks: int
    problem: str
    culprit: Fired | None
    repro: str | None
    whole: bool = False

    @property
    def passed(self) -> bool:
        return not self.problem

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "passed": self.passed,
            "rewrites": self.rewrites,
            "checks": self.checks,
            "problem": self.problem or None,
            "culprit": None if self.culprit is None else asdict(self.culprit),
            "repro": {None: None, True: "graph", False: "rewrite"}[self.whole if self.repro else None],
        }

    def _repr_html_(self) -> str:
        return preformatted(self)

    def __str__(self) -> str:
        if self.passed:
            return f"all {self.rewrites} rewrites are right"
        one = self.culprit
        if one is None:
            return f"differs without any rewrite, so that no rewrite is the cause: {self.problem}"
        name = f"{one.pass_name} ({one.pattern})" if one.pattern else one.pass_name
        lines = [
            f"rewrite {one.number} of {self.rewrites} breaks it: {name} at {one.source or '?'}",
            f"  nodes    {', '.join(one.nodes)}",
            f"  problem  {self.problem}",
            f"right with --fuel {one.number - 1}, wrong with --fuel {one.number} ({self.checks} checks)",
        ]
        return "\n".join(lines)


def bisect(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = False,
    seed: int = 0,
    atol: float | None = None,
    rtol: float | None = None,
    passes: Sequence[str] | None = None,
    on_check: Callable[[int], object] = lambda fuel: None,
) -> Bisection:
    """Find the first rewrite with which ``check`` fails, by bisection; ``on_check`` gets the fuel of each check.

    Raises:
        FuseError: the call cannot be captured or copied.

    >>> print(bisect(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(2, 4),)))
    all 0 rewrites are right
    """
    fuels: list[int] = []

    def checked(fuel: int) -> CheckReport:
        fuels.append(fuel)
        on_check(fuel)
        return check(model, args, kwargs, train=train, seed=seed, atol=atol, rtol=rtol, passes=passes, fuel=fuel)

    good, bad = 0, len(run_passes(capture(model, tuple(args), kwargs), passes).rewrites)
    total, report = bad, checked(bad)
    if report.passed:
        return Bisection(total, len(fuels), "", None, None)
    if total and not (first := checked(0)).passed:
        report, total = first, 0
    if not total:
        return Bisection(bad, len(fuels), _problem(report), None, None)
    while bad - good > 1:
        middle = (good + bad) // 2
        if (tried := checked(middle)).passed:
            good = middle
        else:
            bad, report = middle, tried
    graph = capture(model, tuple(args), kwargs)
    culprit = run_passes(graph, passes, fuel=bad).rewrites[-1]
    repro, whole = _repro(model, args, kwargs, passes, culprit, _problem(report))
    return Bisection(total, len(fuels), _problem(report), culprit, repro, whole)


def _problem(report: CheckReport) -> str:
    return report.problems[0] if report.problems else ""


def _repro(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    passes: Sequence[str] | None,
    culprit: Fired,
    problem: str,
) -> tuple[str | None, bool]:
    """The source of a model file that fails: with the rewrite's operators alone, or else with the whole graph."""
    before = capture(model, tuple(args), kwargs)
    run_passes(before, passes, fuel=culprit.number - 1)
    nodes = [node for node in before.graph.nodes if node.name in culprit.nodes and node.op != "placeholder"]
    about = f"rewrite {culprit.number}, {culprit.pass_name} at {culprit.source}: {problem}"
    if nodes:
        body, inputs, _ = regions.build_body(nodes)
        if (text := source_of(body, [node.meta["val"] for node in inputs], about)) and _fails(text, passes):
            return text, False
    whole = capture(model, tuple(args), kwargs)
    values = [node.meta["val"] for node in whole.graph.find_nodes(op="placeholder")]
    text = source_of(whole, values, about)
    return (text, True) if text and _fails(text, passes) else (None, False)


def _fails(text: str, passes: Sequence[str] | None) -> bool:
    """Whether the model of a repro fails, too."""
    names: dict[str, Any] = {}
    exec(compile(text, "repro.py", "exec"), names)
    try:
        torch.manual_seed(0)
        return not check(names["Model"](), names["get_inputs"](), passes=passes).passed
    except (CaptureError, RuntimeError, NotImplementedError):  # a file that does not run shows nothing
        return False
