"""Find a model's calls in a trace, with the user's lines and the launches after fuse's passes.

A trace of torch has the function that called an operator, not the line. Capture has the lines, and the operators in
eager's order. Where the same sequence of operators occurs in the trace, the lines are those of the capture.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fuse.cost import profiles
from fuse.cost.count import calls_of_dispatches, count_graph
from fuse.devices import device_of
from fuse.graph.capture import capture
from fuse.graph.loading.load import LoadedModel
from fuse.graph.signature import Dispatch
from fuse.report.tracing.trace_launches import Launch
from fuse.rewrite.pipeline import run_passes


@dataclass(frozen=True)
class Rewritten:
    """The effect of fuse's passes on a model whose calls are in the trace.

    ``calls`` is the number of calls found; ``before`` and ``after`` are launches of one call. If no call was found,
    ``obstacle`` says where the trace differs from the model.
    """

    target: str
    calls: int
    before: int
    after: int
    obstacle: str = ""


def matched(launches: Sequence[Launch], model: LoadedModel, target: str = "") -> tuple[Rewritten, tuple[Launch, ...]]:
    """The launches of ``model`` before and after the passes, and ``launches`` with the lines of its calls."""
    graph = capture(model.model, model.args, model.kwargs)
    expected = expected_launches(graph.meta["signature"].dispatches)
    names = [name for name, _ in expected]
    run_passes(graph)
    after = count_graph(graph, profiles.of_device(device_of(graph))).launches
    lined = list(launches)
    found = _occurrences(names, [one.name for one in launches])
    for start in found:
        for at, (_, source) in enumerate(expected, start):
            lined[at] = replace(lined[at], source=source)
    obstacle = "" if found else _obstacle(expected, launches)
    return Rewritten(target or model.name, len(found), len(names), after, obstacle), tuple(lined)


def expected_launches(dispatches: Sequence[Dispatch]) -> list[tuple[str, str]]:
    """Name and line of every launch of a call, as a trace has them."""
    calls = zip(dispatches, calls_of_dispatches(dispatches), strict=True)
    return [(str(dispatch.op._schema.name), dispatch.source) for dispatch, call in calls for _ in range(call.launches)]


def _occurrences(wanted: Sequence[str], names: Sequence[str]) -> list[int]:
    """The positions of ``wanted`` in ``names``, without overlap, by a search over bytes (eight for each name)."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    if not wanted or any(name not in numbers for name in wanted):
        return []
    text = array("q", (numbers[name] for name in names)).tobytes()
    sought = array("q", (numbers[name] for name in wanted)).tobytes()
    found, at = [], text.find(sought)
    while at >= 0:
        if at % 8 == 0:
            found.append(at // 8)
        at = text.find(sought, at + (len(sought) if at % 8 == 0 else 1))
    return found


def _obstacle(expected: Sequence[tuple[str, str]], launches: Sequence[Launch]) -> str:
    """The first difference between the model's call and the longest matching beginning in the trace."""
    names = [one.name for one in launches]
    if not expected:
        return "the model launches nothing"
    starts = [at for at, name in enumerate(names) if name == expected[0][0]][:100]
    if not starts:
        return f"{expected[0][0]} at {expected[0][1]}, its first launch, is not in the trace"
    best = max(_agreeing(expected, names, start) for start in starts)
    wanted, line = expected[best]
    return f"{best:,} of its {len(expected):,} launches are in the trace, and then not {wanted} at {line}"


def _agreeing(expected: Sequence[tuple[str, str]], names: Sequence[str], start: int) -> int:
    count = 0
    while count < len(expected) - 1 and start + count < len(names) and names[start + count] == expected[count][0]:
        count += 1
    return count
