"""List every rewrite tried on the operators of given lines, and the nearest patterns.

net.py:42: mul, sigmoid
fuse_pointwise    fired     2            every pass that rewrote one of them, and every pass and pattern that declined,
swish             declined  1  ...       with its reason, in the order of the passes

The passes run as in ``fuse show``; the model is not run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from torch import nn
from torch.fx import GraphModule

from fuse.errors import FuseError
from fuse.graph.capture import capture
from fuse.passes.match_patterns import graphs_to_match, match_patterns, why_broken
from fuse.report.columns import columns
from fuse.report.explain import place
from fuse.rewrite import registry
from fuse.rewrite.patterns.differences import called
from fuse.rewrite.patterns.matching import Outcome, Prepare, match
from fuse.rewrite.patterns.registry import registered
from fuse.rewrite.pipeline import run_passes

SCHEMA_VERSION = 1
_LINES = re.compile(r"(?P<file>.*\.py):(?P<first>\d+)(?:-(?P<last>\d+))?")


@dataclass(frozen=True)
class Lines:
    """Some lines of a file, as reports name them."""

    file: str
    first: int
    last: int

    def __contains__(self, source: object) -> bool:
        file, _, line = str(source).rpartition(":")
        return file == self.file and line.isdigit() and self.first <= int(line) <= self.last

    def __str__(self) -> str:
        return f"{self.file}:{self.first}" + (f"-{self.last}" if self.last != self.first else "")


def lines_of(text: str) -> Lines | None:
    """The lines that ``path/to/file.py:LINE[-LINE]`` names; None where it names none.

    >>> str(lines_of("models/net.py:40-42")), lines_of("net.py:Swish")
    ('net.py:40-42', None)
    """
    found = _LINES.fullmatch(text)
    if found is None:
        return None
    return Lines(Path(found["file"]).name, int(found["first"]), int(found["last"] or found["first"]))


@dataclass(frozen=True)
class Tried:
    """The verdict of one pass or pattern on operators of the lines: ``fired``, or the reason for declining."""

    pass_name: str
    pattern: str | None
    fired: bool
    reason: str
    count: int


@dataclass(frozen=True)
class LineExplanation:
    """Every rewrite tried on the operators of some lines."""

    target: str
    lines: Lines
    operators: tuple[str, ...]
    tried: tuple[Tried, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "lines": str(self.lines),
            "operators": list(self.operators),
            "tried": [asdict(one) for one in self.tried],
        }


def explain_lines(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    lines: Lines,
    *,
    passes: Sequence[str] | None = None,
    target: str | None = None,
) -> LineExplanation:
    """List the rewrites tried on the operators of ``lines`` in ``model(*args, **kwargs)``.

    Raises:
        FuseError: the model cannot be captured, or has no operator on these lines.
    """
    graph = capture(model, args, kwargs)
    name = target or type(model).__name__
    there = [node for node in graph.graph.nodes if node.op == "call_function" and node.meta.get("source") in lines]
    if not there:
        has = sorted({node.meta.get("source") or "" for node in graph.graph.nodes} - {""})
        raise FuseError(f"{name} has no operator on {lines}; it has some on {', '.join(has[:8]) or 'no line'}")
    operators = tuple(called(node) for node in there)
    recording = run_passes(graph, passes, record=True)
    record = recording.recording
    assert record is not None
    sources = {made.id: made.row.source for delta in (record.start, *record.deltas) for made in delta.made}
    touched = {delta.number for delta in record.deltas if any(sources.get(node, "") in lines for node in delta.nodes)}
    count: Counter[tuple[str, str | None, bool, str]] = Counter()
    for fired in recording.rewrites:
        if fired.number in touched or fired.source in lines:
            count[fired.pass_name, fired.pattern, True, ""] += 1
    for one in record.declined:
        on_lines = one.source in lines or any(sources.get(node, "") in lines for node in one.nodes)
        if on_lines and one.pass_name != match_patterns.__name__:
            count[one.pass_name, one.pattern, False, one.reason] += 1
    if match_patterns.__name__ in recording.passes:
        own = [one for one in registered() if one.enabled and why_broken(one) is None]
        bodies = _bodies(model, args, kwargs, passes)
        for outcome in (one for body, becomes in bodies for one in match(body, own, becomes, near=True)):
            nodes = [node for node in (outcome.node, outcome.candidate) if node is not None]
            if outcome.kind != "matched" and any(node.meta.get("source") in lines for node in nodes):
                reason = f"{outcome.kind}: {outcome.reason}"
                count[match_patterns.__name__, outcome.pattern.name, False, reason] += 1
    order = {info.name: position for position, info in enumerate(registry.registered())}
    tried = [Tried(*key, number) for key, number in count.items()]
    tried.sort(key=lambda one: (order.get(one.pass_name, len(order)), not one.fired))
    return LineExplanation(name, lines, operators, tuple(tried))


def _bodies(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, passes: Sequence[str] | None
) -> list[tuple[GraphModule, Prepare]]:
    """The graphs that patterns are matched in: the model's and those of its loops, after the earlier passes."""
    graph = capture(model, args, kwargs)
    run_passes(graph, registry.earlier_than(match_patterns.__name__, passes))
    return graphs_to_match(graph)


def lines_table(explanation: LineExplanation) -> RenderableType:
    """The explanation as the command prints it."""
    counted = Counter(explanation.operators)
    said = ", ".join(f"{count} {name}" if count > 1 else name for name, count in counted.items())
    title = Text(f"{explanation.lines} in {explanation.target}: {said}", style="bold")
    if not explanation.tried:
        return Group(title, Text("no pass and no pattern looked at these operators"))
    rows = [
        [one.pattern or one.pass_name, "fired" if one.fired else "declined", str(one.count), one.reason]
        for one in explanation.tried
    ]
    return Group(title, Text(), columns(["pass or pattern", "", "times", "reason"], rows, numbers_from=4))


# ---- which patterns came close -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Close:
    """How close one pattern came: ``matched`` of ``total`` operators, and the reason why not all."""

    pattern: str
    enabled: bool
    fired: int
    matched: int
    total: int
    verdict: str
    reason: str
    source: str


def nearest_patterns(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    *,
    passes: Sequence[str] | None = None,
) -> list[Close]:
    """How close every installed pattern came in ``model(*args, **kwargs)``, the closest first; disabled ones, too.

    Raises:
        FuseError: the model cannot be captured.
    """
    bodies = _bodies(model, args, kwargs, passes)
    found = []
    for pattern in registered():
        outcomes: list[Outcome] = []
        try:
            for body, becomes in bodies:
                outcomes += match(body, [pattern], becomes, near=True)
        except FuseError as error:
            found.append(Close(pattern.name, pattern.enabled, 0, 0, 1, "refused", str(error), pattern.source))
            continue
        fired = sum(one.kind == "matched" for one in outcomes)
        if best := max(outcomes, key=lambda one: one.progress, default=None):
            total = max(best.total, 1)
            found.append(
                Close(pattern.name, pattern.enabled, fired, best.matched, total, best.kind, best.reason, place(best))
            )
    return sorted(found, key=lambda one: (not one.fired, -one.matched / one.total, -one.matched))


def nearest_table(target: str, close: Sequence[Close]) -> RenderableType:
    """The patterns that came closest, as the command prints them."""
    title = Text(f"patterns that come closest in {target}", style="bold")
    if not close:
        return Group(title, Text("no installed pattern contains any of its operators"))
    rows = [
        [
            one.pattern if one.enabled else f"{one.pattern} (off)",
            f"{one.matched} of {one.total}",
            f"{one.fired} fired" if one.fired else f"{one.verdict}: {one.reason}",
            one.source,
        ]
        for one in close
    ]
    table = columns(["pattern", "operators", "verdict", "line"], rows, numbers_from=4)
    return Group(title, Text(), table, Text(), Text(f"next: fuse explain {target} {close[0].pattern}"))


def values_of(target: str, close: Sequence[Close]) -> dict[str, Any]:
    """For JSON."""
    return {"schema_version": SCHEMA_VERSION, "target": target, "patterns": [asdict(one) for one in close]}
