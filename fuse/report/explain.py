"""Explain why a pattern did or did not fire in a model: draw the nearest candidate on the graph.

model -> capture -> the passes that run before patterns -> match -> the best candidate that did not fire

relu               relu         net.py:43
└ add              sub          net.py:42  `sub` where the pattern has `add`
  ├ convolution    convolution  net.py:41
  │ ├ x            input
  │ └ weight       conv_weight
  └ skip           y
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from torch import nn
from torch._ops import OpOverload
from torch.fx import Node

from fuse import ops
from fuse.graph.capture import capture
from fuse.notebook import preformatted
from fuse.passes.match_patterns import graphs_to_match, match_patterns, prepare, prepare_untried, why_broken
from fuse.report.columns import columns
from fuse.rewrite import registry
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.differences import called
from fuse.rewrite.patterns.index import GraphIndex
from fuse.rewrite.patterns.matching import Outcome, all_forms, match
from fuse.rewrite.patterns.registry import refusal, registered
from fuse.rewrite.pipeline import run_passes

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class DrawingRow:
    """One row of a drawing: the pattern's node, the graph's node, the user's line, and the difference."""

    wanted: str
    found: str
    source: str
    note: str


@dataclass(frozen=True)
class Explanation:
    """Verdicts on every candidate of ``pattern`` in one model.

    ``missing`` are operators that every form of the pattern has and the graph lacks. ``refusal`` is the reason why the
    pattern is not used in any model, or None; the verdicts on candidates ignore it.
    """

    target: str
    pattern: Pattern
    outcomes: tuple[Outcome, ...] = field(repr=False)
    missing: tuple[str, ...]
    refusal: str | None = None

    @property
    def fired(self) -> int:
        """How many candidates the pattern rewrites, unless it is refused."""
        return sum(one.kind == "matched" for one in self.outcomes)

    @property
    def best(self) -> Outcome | None:
        """The candidate that came nearest without firing, or None."""
        return max((one for one in self.outcomes if one.kind != "matched"), key=lambda one: one.progress, default=None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        best = self.best
        return {
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "pattern": self.pattern.name,
            "source": self.pattern.source,
            "candidates": len(self.outcomes),
            "fired": self.fired,
            "rejected": dict(Counter(one.kind for one in self.outcomes if one.kind != "matched")),
            "missing": list(self.missing),
            "refusal": self.refusal,
            "best": None if best is None else _best_values(best),
        }

    def _repr_html_(self) -> str:
        return preformatted(self)

    def __str__(self) -> str:
        from fuse.report.columns import as_text

        return as_text(explanation_table(self))


def explain(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    pattern: Pattern,
    *,
    passes: Sequence[str] | None = None,
    target: str | None = None,
) -> Explanation:
    """The verdict on every candidate of ``pattern`` in ``model(*args, **kwargs)``; the model is not run.

    First run those of ``passes`` (by default all enabled ones) that come before patterns. The other installed patterns
    take their matches, as in ``show``.

    Raises:
        FuseError: the model cannot be captured, or the pattern cannot be run.
    """
    graph = capture(model, args, kwargs)
    run_passes(graph, registry.earlier_than(match_patterns.__name__, passes))
    others = [one for one in registered() if one.enabled and one.name != pattern.name]
    patterns = [one for one in others if why_broken(one) is None]
    refused = refusal(pattern)
    made = prepare_untried if refused else prepare
    outcomes: list[Outcome] = []
    missing: set[str] | None = None
    for body, becomes in graphs_to_match(graph):
        becomes = made if becomes is prepare else becomes
        outcomes += [one for one in match(body, [*patterns, pattern], becomes, near=True) if one.pattern is pattern]
        absent = _missing(pattern, GraphIndex(body))
        missing = absent if missing is None else missing & absent
    name = target or type(model).__name__
    return Explanation(name, pattern, tuple(outcomes), tuple(sorted(missing or ())), refused)


def _missing(pattern: Pattern, index: GraphIndex) -> set[str]:
    """The operators that all forms of ``pattern`` have and the graph lacks."""
    absent = [
        {called(step.origin) for step in form.steps if not index.count(step.name)} for form in all_forms(pattern, index)
    ]
    return set.intersection(*absent) if absent else set()


def _best_values(best: Outcome) -> dict[str, Any]:
    return {
        "verdict": best.kind,
        "reason": best.reason,
        "matched": best.matched,
        "total": best.total,
        "node": None if best.node is None else best.node.name,
        "source": place(best),
        "change": best.change or None,
        "differences": [one.reason for one in best.differences],
        "drawing": [[row.wanted, row.found, row.source, row.note] for row in drawing(best)],
    }


def place(outcome: Outcome) -> str:
    """The user's line of the node that the reason is about."""
    nodes = [node for node in (outcome.node, outcome.candidate) if node is not None]
    return next((source for node in nodes if (source := node.meta.get("source", ""))), "")


# ---- drawing -------------------------------------------------------------------------------------------------------


def drawing(outcome: Outcome) -> list[DrawingRow]:
    """The pattern as a tree, its results first, each operator beside the graph's node that it matches."""
    notes = {one.wanted: one.reason for one in reversed(outcome.differences) if one.wanted is not None}
    if not notes and outcome.node is not None:
        places = outcome.drawing.nodes if outcome.drawing else {}
        notes = {wanted: outcome.reason for wanted, found in places.items() if found is outcome.node}
    rows: list[DrawingRow] = []
    seen: set[Node] = set()
    for root in outcome.drawing.roots if outcome.drawing else ():
        rows += _tree(_seen_through(root), outcome, notes, seen, "", "")
    return rows


def _tree(
    node: Node, outcome: Outcome, notes: Mapping[Node, str], seen: set[Node], branch: str, below: str
) -> Iterator[DrawingRow]:
    assert outcome.drawing is not None
    is_input = node.op == "placeholder"
    found = outcome.drawing.inputs.get(node.meta["input"]) if is_input else outcome.drawing.nodes.get(node)
    if found is None and node in notes:
        found = next((one.node for one in outcome.differences if one.wanted is node), None)
    again = node in seen and node.op == "call_function"
    seen.add(node)
    name = node.meta["input"][0] if is_input else called(node)
    source = "" if found is None else found.meta.get("source", "")
    note = "as above" if again else notes.get(node, "")
    yield DrawingRow(branch + name, "" if found is None else found.name, source, note)
    if again:
        return
    operands = list(dict.fromkeys(map(_seen_through, node.all_input_nodes)))
    for operand in operands:
        last = operand is operands[-1]
        yield from _tree(
            operand, outcome, notes, seen, below + ("└ " if last else "├ "), below + ("  " if last else "│ ")
        )


def _seen_through(node: Node) -> Node:
    """The node behind views, copies and parts, which drawings leave out."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and not _computes(node):
        node = node.all_input_nodes[0]
    return node


def _computes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and ops.kind(node.target) not in ("view", "movement")


# ---- text ----------------------------------------------------------------------------------------------------------


def explanation_table(explanation: Explanation) -> RenderableType:
    """The explanation as the command prints it."""
    return Group(*_sections(explanation))


def _sections(explanation: Explanation) -> Iterator[RenderableType]:
    pattern, best = explanation.pattern, explanation.best
    about = f": {pattern.summary}" if pattern.summary else ""
    yield Text(f"{pattern.name} ({pattern.source}){about}", style="bold")
    if explanation.refusal:
        yield Text(f"{explanation.refusal}; it is not used, and what follows is what would become of it")
    yield Text(f"in {explanation.target}: {_count(explanation)}")
    if explanation.missing:
        yield Text(f"the graph has no {_listed(explanation.missing)}")
    if best is None:
        return
    yield Text()
    yield Text(f"nearest: {best.matched} of {best.total} nodes; {best.reason}; {place(best)}")
    yield Text()
    rows = [[row.wanted, row.found, row.source, row.note] for row in drawing(best)]
    yield columns(["pattern", "graph", "line", "where they differ"], rows, numbers_from=4)
    yield Text()
    yield Text(f"verdict: {best.kind}")
    if best.change:
        yield Text(f"smallest change that would match: {best.change}")
    for other in best.differences[1:]:
        yield Text(f"and then: {other.reason}" + (f"; {other.change}" if other.change else ""))


def _count(explanation: Explanation) -> str:
    total = len(explanation.outcomes)
    if not total:
        return "no candidate"
    others = Counter(one.kind for one in explanation.outcomes if one.kind != "matched")
    parts = [f"{explanation.fired} fired", *(f"{count} {kind}" for kind, count in others.most_common())]
    return f"{total} {'candidate' if total == 1 else 'candidates'}: {', '.join(parts)}"


def _listed(names: Sequence[str]) -> str:
    return " and no ".join(f"`{name}`" for name in names)
