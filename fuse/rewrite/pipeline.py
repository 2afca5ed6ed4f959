"""Run passes over a graph, one after the other, and keep the ledger.

    for each pass, in the declared order
        for the graph and each loop body in it
            for each verdict      offered and fuel left: number it, build it
                                  declined: count it by reason
        check what the pass left behind (structure, metadata, source lines)

The graph is changed in place. A refused or declined rewrite leaves it as it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from fuse.errors import FuseError
from fuse.rewrite import launches, nested, registry
from fuse.rewrite.ledger import Fired, Ledger, Rejections
from fuse.rewrite.registry import PassInfo
from fuse.rewrite.verdict import Declined, Rewrite


def run_passes(graph: GraphModule, passes: Sequence[str] | None = None, fuel: int | None = None) -> Ledger:
    """Rewrite ``graph`` in place by ``passes`` (names; by default all enabled ones) and say what happened.

    They run in the declared order, not in the order given. ``fuel`` stops after that many rewrites; later offers are
    left unbuilt. Raises ``FuseError`` for an unknown name, and, naming the pass, when a pass fails or leaves a broken
    graph.

    >>> import torch, fuse
    >>> graph = fuse.capture(torch.nn.Identity(), (torch.zeros(3),))
    >>> run_passes(graph, passes=["dead_code"]).rewrites
    ()
    """
    chosen = registry.select(passes)
    book = _Book(fuel)
    for info in chosen:
        started = time.perf_counter()
        changed = [body for body, steps in list(nested.walk(graph)) if _run_pass(info, body, steps, book)]
        for body in changed:
            _check(info, body)
        book.seconds[info.name] = time.perf_counter() - started
    graph.delete_all_unused_submodules()
    for body, _ in nested.walk(graph):
        body.recompile()
    return book.ledger(chosen)


@dataclass
class _Book:
    """The ledger while it is being written."""

    fuel: int | None
    rewrites: list[Fired] = field(default_factory=list)
    rejections: dict[tuple[str, str | None, str], _Rejected] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def has_fuel(self) -> bool:
        return self.fuel is None or len(self.rewrites) < self.fuel

    def reject(self, info: PassInfo, verdict: Declined) -> None:
        name, source = _place(verdict.nodes)
        rejected = self.rejections.setdefault((info.name, verdict.pattern, verdict.reason), _Rejected(name))
        rejected.count += 1
        if source:
            rejected.sources[source] = None

    def ledger(self, chosen: Iterable[PassInfo]) -> Ledger:
        names = tuple(info.name for info in chosen)
        rejected = (Rejections(*key, r.count, r.example, tuple(r.sources)) for key, r in self.rejections.items())
        return Ledger(names, tuple(self.rewrites), tuple(rejected), self.seconds)


@dataclass
class _Rejected:
    """Candidates declined for one reason: the first one's name, how many, and their lines."""

    example: str
    count: int = 0
    sources: dict[str, None] = field(default_factory=dict)


def _run_pass(info: PassInfo, graph: GraphModule, steps: int, book: _Book) -> bool:
    """Drive one pass over one graph; whether it changed anything."""
    before = len(book.rewrites)
    with _naming(info):
        for verdict in info.function(graph):
            if isinstance(verdict, Declined):
                book.reject(info, verdict)
            elif book.has_fuel():
                book.rewrites.append(_build(info, graph, steps, verdict, number=len(book.rewrites) + 1))
    return len(book.rewrites) > before


def _build(info: PassInfo, graph: GraphModule, steps: int, verdict: Rewrite, number: int) -> Fired:
    names = tuple(node.name for node in verdict.nodes)  # taken now: building may erase them
    _, source = _place(verdict.nodes)
    with launches.watch(graph) as change:
        verdict.build()
    return Fired(number, info.name, verdict.pattern, names, source, steps * change.saved)


def _place(nodes: Sequence[Node]) -> tuple[str, str]:
    """The first node's name, and the first source line that any of the nodes has."""
    name = nodes[0].name if nodes else ""
    return name, next((source for node in nodes if (source := node.meta.get("source", ""))), "")


def _check(info: PassInfo, graph: GraphModule) -> None:
    """The structure is sound, and every node knows its value's metadata and the user's line."""
    with _naming(info):
        graph.graph.lint()
        for node in graph.graph.nodes:
            if node.op != "output" and not ("val" in node.meta and "source" in node.meta):
                raise ValueError(f"node {node.name} has no metadata; create nodes through fuse.rewrite.surgery")


@contextmanager
def _naming(info: PassInfo) -> Iterator[None]:
    """Turn what a pass raises into one line that names the pass; the cause stays attached."""
    try:
        yield
    except FuseError:
        raise
    except Exception as error:
        cause = str(error).partition("\n")[0]
        raise FuseError(
            f"pass {info.name!r} of {info.origin} failed ({type(error).__name__}: {cause}); "
            f"leave it out with --ignore {info.name}"
        ) from error
