"""Run passes over a graph, one after the other, and keep the ledger.

    for each pass, in the declared order
        for the graph and each loop body in it
            for each verdict      offered and fuel left: number it, build it
                                  declined: count it by reason
        check the graph (structure, metadata, source lines)

The graph is changed in place. Without fuel, and for a declined candidate, it stays as it is. If a pass fails, the graph
is restored and all other passes run again, so that a fault costs only the rewrites of its own pass.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import GraphModule, Node

from fuse.devices import without_autocast
from fuse.errors import FaultWarning
from fuse.graph.fakes.fake_operators import out_of_inference
from fuse.graph.functional.short_graphs import StepsNeeded, is_short
from fuse.graph.garbage_collection import without_garbage_collection
from fuse.rewrite import launches, nested, registry, snapshot
from fuse.rewrite.ledger import Failed, Fired, Ledger, Rejections
from fuse.rewrite.recording import PassRecorder, recording
from fuse.rewrite.registry import PassInfo
from fuse.rewrite.verdict import Rejection, Rewrite


def run_passes(
    graph: GraphModule, passes: Sequence[str] | None = None, fuel: int | None = None, *, record: bool = False
) -> Ledger:
    """Rewrite ``graph`` in place by ``passes`` (names; by default all enabled ones), and return the ledger.

    The passes run in the declared order. After ``fuel`` rewrites, further offers are not built. A pass that raises or
    leaves an invalid graph is left out, with a warning and an entry in the ledger's ``failed``. With ``record``, the
    ledger's ``recording`` has every change of the graph.

    Raises:
        FuseError: a name is unknown.
        StepsNeeded: the steps that a short graph leaves out do not become a loop.

    >>> import torch, fuse
    >>> graph = fuse.capture(torch.nn.Identity(), (torch.zeros(3),))
    >>> run_passes(graph, passes=["dead_code"]).rewrites
    ()
    """
    chosen = registry.select(passes)
    before = snapshot.taken(graph)
    failed: list[Failed] = []
    while True:
        try:
            with without_garbage_collection(), out_of_inference(), without_autocast():
                builder = _run(graph, chosen, fuel, record)
        except _PassFailed as failure:
            failed.append(_described(failure))
            warnings.warn(str(failed[-1]), FaultWarning, stacklevel=2)
            chosen = [info for info in chosen if info is not failure.info]
            snapshot.put_back(before)
        else:
            return builder.ledger(chosen, failed)


def _run(graph: GraphModule, chosen: Sequence[PassInfo], fuel: int | None, record: bool) -> _LedgerBuilder:
    with recording(graph) if record else contextlib.nullcontext() as recorder:
        return _run_all(graph, chosen, _LedgerBuilder(fuel, recorder))


def _run_all(graph: GraphModule, chosen: Sequence[PassInfo], builder: _LedgerBuilder) -> _LedgerBuilder:
    for info in chosen:
        started = time.perf_counter()
        try:
            changed = [body for body, steps in list(nested.walk(graph)) if _run_pass(info, body, steps, builder)]
            for body in changed:
                _check(body)
        except Exception as error:  # any error of a pass, perhaps of a plugin
            if is_short(graph):
                raise StepsNeeded from error
            raise _PassFailed(info) from error
        if builder.recorder is not None:
            builder.recorder.settled(info.name)
        builder.seconds[info.name] = time.perf_counter() - started
    graph.delete_all_unused_submodules()
    for body, _ in nested.walk(graph):
        body.recompile()
    return builder


class _PassFailed(Exception):
    """A pass raised, or left an invalid graph; the cause is attached."""

    def __init__(self, info: PassInfo) -> None:
        super().__init__(info.name)
        self.info = info


def _described(failure: _PassFailed) -> Failed:
    error = failure.__cause__
    assert error is not None
    info, frames = failure.info, traceback.extract_tb(error.__traceback__)
    home = getattr(sys.modules.get(info.origin), "__file__", None)
    own = [frame for frame in frames if frame.filename == home]
    source = f"{Path((own or frames)[-1].filename).name}:{(own or frames)[-1].lineno}"
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Failed(info.name, info.origin, reason, source, "".join(traceback.format_exception(error)))


@dataclass
class _LedgerBuilder:
    """The ledger under construction."""

    fuel: int | None
    recorder: PassRecorder | None = None
    rewrites: list[Fired] = field(default_factory=list)
    rejections: dict[tuple[str, str | None, str], _Rejected] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def has_fuel(self) -> bool:
        return self.fuel is None or len(self.rewrites) < self.fuel

    def reject(self, info: PassInfo, verdict: Rejection) -> None:
        name, source = _name_and_source(verdict.nodes)
        if self.recorder is not None:
            self.recorder.declined(info.name, verdict.pattern, verdict.reason, source, verdict.nodes)
        rejected = self.rejections.setdefault((info.name, verdict.pattern, verdict.reason), _Rejected(name))
        rejected.count += 1
        if source:
            rejected.sources[source] = None

    def ledger(self, chosen: Iterable[PassInfo], failed: Iterable[Failed]) -> Ledger:
        names = tuple(info.name for info in chosen)
        rejected = (Rejections(*key, r.count, r.example, tuple(r.sources)) for key, r in self.rejections.items())
        recorded = None if self.recorder is None else self.recorder.recording()
        return Ledger(names, tuple(self.rewrites), tuple(rejected), self.seconds, tuple(failed), recorded)


@dataclass
class _Rejected:
    """Candidates declined for one reason: the name of the first one, their number, and their lines."""

    example: str
    count: int = 0
    sources: dict[str, None] = field(default_factory=dict)


def _run_pass(info: PassInfo, graph: GraphModule, steps: int, builder: _LedgerBuilder) -> bool:
    """Run one pass over one graph; returns whether the graph changed."""
    before = len(builder.rewrites)
    for verdict in info.function(graph):
        if isinstance(verdict, Rejection):
            builder.reject(info, verdict)
        elif builder.has_fuel():
            builder.rewrites.append(_build(info, graph, steps, verdict, len(builder.rewrites) + 1, builder.recorder))
    return len(builder.rewrites) > before


def _build(
    info: PassInfo, graph: GraphModule, steps: int, verdict: Rewrite, number: int, recorder: PassRecorder | None
) -> Fired:
    ids: tuple[int, ...] = ()
    if recorder is not None:
        recorder.settled(info.name)
        ids = recorder.ids(verdict.nodes)
    names = tuple(node.name for node in verdict.nodes)  # taken now: building may erase them
    _, source = _name_and_source(verdict.nodes)
    with launches.watch(graph) as change:
        verdict.build()
    if recorder is not None:
        recorder.rewritten(number, info.name, graph, ids)
    return Fired(number, info.name, verdict.pattern, names, source, steps * change.saved)


def _name_and_source(nodes: Sequence[Node]) -> tuple[str, str]:
    """The first node's name, and the first source line that any of the nodes has."""
    name = nodes[0].name if nodes else ""
    return name, next((source for node in nodes if (source := node.meta.get("source", ""))), "")


def _check(graph: GraphModule) -> None:
    """Raise unless the structure is valid, and every node has metadata and the user's line."""
    if not _is_sound(graph):
        graph.graph.lint()  # lint raises the reason
    for node in graph.graph.nodes:
        if node.op != "output" and not ("val" in node.meta and "source" in node.meta):
            raise ValueError(f"node {node.name} has no metadata; create nodes through fuse.rewrite.surgery")


def _is_sound(graph: GraphModule) -> bool:
    """The checks of ``torch.fx.Graph.lint`` for operators, in a fifth of the time; other nodes are left to ``lint``."""
    seen: set[Node] = set()
    names: set[str] = set()
    for node in graph.graph.nodes:
        if node.graph is not graph.graph or node.name in names or not seen.issuperset(node._input_nodes):
            return False
        if node.op == "call_function":
            if not callable(node.target):
                return False
        elif node.op not in ("placeholder", "output") or not isinstance(node.target, str):
            return False
        seen.add(node)
        names.add(node.name)
    return True
