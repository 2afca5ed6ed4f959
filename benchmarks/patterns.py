"""How long it takes to look for patterns in graphs of 2,000 to 20,000 nodes: ten of them, and all that fuse brings.

    a tenth of the nodes     the ten fusions of benchmarks.fusions, n times, among operators that are none of theirs
    every node               the ten fusions alone: each node lies in a match, or nearly
    an LSTM loop             no match; thousands of candidates, and the reason of each
    the library's            every structure that a pattern of fuse is for, n times, and an LSTM loop of as many nodes;
                             all patterns are looked for, beside the seconds that capture takes

Seconds are of this process on the processor; matching uses one thread. They must grow as the graph does, and with the
candidates. Patterns are traced before, as they are once in a process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

import fuse
from benchmarks.capture import BATCH, FEATURES, OPERATORS_PER_STEP, Loop
from benchmarks.common import save
from benchmarks.comparison import as_pattern
from benchmarks.more_fusions import FUSIONS
from fuse.graph.function import Function
from fuse.passes.match_patterns import prepare
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.matching import match
from fuse.rewrite.patterns.registry import registered
from fuse.rewrite.registry import of_stages
from tests.passes.patterns.published import PUBLISHED

NODES = (2_000, 5_000, 10_000, 20_000)
REPEATS = 3
OTHERS = 9
"""Nodes of other operators for each of a fusion, where those are to be a tenth."""


def fusions(times: int, others: int = 0) -> GraphModule:
    """The ten fusions ``times`` times, each set followed by ``others`` operators that no pattern has."""

    def several(arguments: list[tuple[Tensor, ...]]) -> list[Any]:
        results: list[Any] = []
        for number in range(times):
            for fusion, (first, *rest) in zip(FUSIONS, arguments, strict=True):
                results.append(fusion.pattern(first + number, *rest))
            other = arguments[0][0] - number
            for _ in range(others):
                other = torch.cos(other)
            results.append(other)
        return results

    return _cleaned(fuse.capture(Function(several), ([fusion.arguments() for fusion in FUSIONS],)))


def loop(nodes: int) -> GraphModule:
    """An LSTM loop, unrolled as capture has it."""
    steps = nodes // OPERATORS_PER_STEP
    return _cleaned(fuse.capture(Loop(steps), (torch.zeros(BATCH, steps, FEATURES),)))


def structures(times: int) -> tuple[Function, tuple[Any, ...]]:
    """All structures that the patterns of fuse are for, ``times`` times, and what they are given."""

    def several(arguments: list[list[Tensor]]) -> list[Any]:
        results: list[Any] = []
        for number in range(times):
            for one, given in zip(PUBLISHED.values(), arguments, strict=True):
                results.append(one.function(*[t + number if t.is_floating_point() else t for t in given]))
        return results

    return Function(several), ([list(one.arguments) for one in PUBLISHED.values()],)


def library_case(what: str, model: Any, arguments: tuple[Any, ...], most: int | None = None) -> dict[str, Any]:
    """How long the patterns of fuse, all or the first ``most``, take in the graph of ``model``, beside its capture."""
    own = [one for one in registered() if one.origin.startswith("fuse.passes.patterns.")][:most]
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        with torch.no_grad():
            graph = fuse.capture(model, arguments)
        seconds.append(time.process_time() - started)
    return {**case(what, _cleaned(graph), own), "capture_seconds": min(seconds)}


def _cleaned(graph: GraphModule) -> GraphModule:
    fuse.run_passes(graph, of_stages("clean"))
    return graph


def case(what: str, graph: GraphModule, patterns: Sequence[Pattern] = ()) -> dict[str, Any]:
    """How long all candidates of ``patterns``, else of the ten, take in one graph."""
    patterns = patterns or [as_pattern(fusion) for fusion in FUSIONS]
    seconds = []
    match(SMALL, patterns, prepare)
    for _ in range(REPEATS):
        started = time.process_time()
        outcomes = match(graph, patterns, prepare)
        seconds.append(time.process_time() - started)
    return {
        "what": what,
        "nodes": len(graph.graph.nodes),
        "patterns": len(patterns),
        "candidates": len(outcomes),
        "matched": sum(one.kind == "matched" for one in outcomes),
        "seconds": min(seconds),
    }


SMALL = fusions(1)
SET = len(fusions(2).graph.nodes) - len(SMALL.graph.nodes)
"""Nodes of the ten fusions together."""

if __name__ == "__main__":
    cases = []
    for nodes in NODES:
        cases.append(case("fusions in a tenth of the nodes", fusions(nodes // (SET * (OTHERS + 1)), SET * OTHERS)))
        cases.append(case("fusions in every node", fusions(nodes // SET)))
        cases.append(case("an LSTM loop", loop(nodes)))
    for times, nodes in ((16, 10_000), (32, 20_000)):
        cases.append(library_case("the library's structures", *structures(times)))
        cases.append(library_case("the same, sixty of them", *structures(times), most=60))
        steps = nodes // OPERATORS_PER_STEP
        given = torch.zeros(BATCH, steps, FEATURES)
        cases.append(library_case("an LSTM loop, the library's patterns", Loop(steps), (given,)))
    for one in cases:
        print(*(f"{value:.3f}" if isinstance(value, float) else value for value in one.values()), sep="\t")
    save("patterns", cases)
