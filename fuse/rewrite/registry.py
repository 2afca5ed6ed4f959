"""The passes that are installed, and the order in which they run.

    @register_pass(stage="loops", after="roll_whole_loops")
    def merge_sibling_gemms(graph): ...

Passes run stage by stage. Within a stage, each pass declares which passes it runs after and before; otherwise the order
of registration holds. fuse's own passes are in ``fuse.passes``, and are loaded like a plugin; others are found through
the entry-point group ``fuse.passes``.
"""

from __future__ import annotations

import heapq
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import Literal, get_args

from torch.fx import GraphModule

from fuse.errors import FuseError
from fuse.rewrite.installed import BrokenPlugin, Installed
from fuse.rewrite.verdict import Verdict

PassFunction = Callable[[GraphModule], Iterator[Verdict]]

Stage = Literal["clean", "loops", "match", "fuse", "finish"]
"""The graph after each stage: clean has loops and is plain; loops has merged products and the other loops; match has
the fusions of patterns; fuse has regions, each one launch; finish has regions joined to loops or merged side by side.
"""

STAGES: tuple[Stage, ...] = get_args(Stage)
"""All stages, in the order in which they run."""


@dataclass(frozen=True)
class PassInfo:
    """One registered pass. ``origin``: the module that defines it. ``enabled``: it runs without being selected.
    ``behind_others``: passes of other packages in its stage run earlier."""

    name: str
    function: PassFunction
    origin: str
    summary: str
    stage: Stage
    after: tuple[str, ...]
    before: tuple[str, ...]
    before_gradients: bool
    enabled: bool
    behind_others: bool = False


_installed: Installed[PassInfo] = Installed(
    "pass",
    "fuse.passes",
    "'fuse passes' lists them",
    own=lambda: importlib.import_module("fuse.passes"),
    fits=lambda: ordered(_installed.by_name.values()),
)


def register_pass(
    *,
    stage: Stage = "match",
    after: str | Iterable[str] = (),
    before: str | Iterable[str] = (),
    before_gradients: bool | None = None,
    enabled: bool = True,
    behind_others: bool = False,
) -> Callable[[PassFunction], PassFunction]:
    """Register a generator of verdicts as the pass of its own name.

    The pass runs with the others of its ``stage``: on whole graphs, on bodies of loops, forward and backward. ``after``
    and ``before`` name passes that must run earlier and later. ``before_gradients``: in training, the pass also runs on
    the recorded call, before gradients are taken loop by loop; autograd then differentiates its result. The default is
    True for the stages clean and loops. The first line of the docstring (of the function, otherwise of the module) is
    the summary that ``fuse passes`` prints. A pass with ``enabled=False`` runs only when it is selected. Passes of
    other packages run earlier than one that is ``behind_others`` in their stage, unless their ``after`` says otherwise.

    Raises:
        FuseError: the name is taken, or there is no such stage.

    >>> from fuse.rewrite.verdict import declined
    >>> @register_pass(enabled=False)
    ... def notice_outputs(graph):
    ...     "Decline every output."
    ...     yield declined(graph.graph.output_node(), "outputs stay")
    >>> find("notice_outputs").summary
    'Decline every output.'
    >>> unregister("notice_outputs")
    """

    def register(function: PassFunction) -> PassFunction:
        name = function.__name__
        if name in _installed.by_name:
            origin = _installed.by_name[name].origin
            raise FuseError(
                f"pass {name!r} is registered twice, by {origin} and by {function.__module__}; "
                "'import passes' from the repository's root loads a second copy: import fuse.passes instead"
            )
        if stage not in STAGES:
            raise FuseError(f"pass {name!r} names the stage {stage!r}; there are {', '.join(STAGES)}")
        differentiated = stage in ("clean", "loops") if before_gradients is None else before_gradients
        _installed.by_name[name] = PassInfo(
            name=name,
            function=function,
            origin=function.__module__,
            summary=_summary(function),
            stage=stage,
            after=_names(after),
            before=_names(before),
            before_gradients=differentiated,
            enabled=enabled,
            behind_others=behind_others,
        )
        return function

    return register


def unregister(name: str) -> None:
    """Remove the pass ``name``, such as one of a test or a notebook cell."""
    del _installed.by_name[name]


def registered() -> list[PassInfo]:
    """Every installed pass, in the order in which they run.

    >>> [info.name for info in registered()].index("dead_code") >= 0
    True
    """
    _installed.broken()
    return list(_in_order(tuple(_installed.by_name.values())))


@cache
def _in_order(passes: tuple[PassInfo, ...]) -> tuple[PassInfo, ...]:
    """Every graph asks for the order, which takes a fifth of a millisecond to find."""
    return tuple(ordered(passes))


def broken_plugins() -> tuple[BrokenPlugin, ...]:
    """The plugins that failed to load, or whose declared order contradicts other passes."""
    return _installed.broken()


def find(name: str) -> PassInfo:
    """The pass called ``name``; ``FuseError`` with a suggestion if there is none."""
    return _installed.find(name)


def select(
    select: Sequence[str] | None = None, ignore: Sequence[str] = (), extend_select: Sequence[str] = ()
) -> list[PassInfo]:
    """The passes to run, in order: ``select`` (by default all enabled ones), plus ``extend_select``, minus ``ignore``.

    >>> [info.name for info in select(["no_ops", "dead_code"], ignore=["no_ops"])]
    ['dead_code']
    """
    chosen = {info.name for info in registered() if info.enabled} if select is None else {find(n).name for n in select}
    chosen |= {find(name).name for name in extend_select}
    chosen -= {find(name).name for name in ignore}
    return [info for info in registered() if info.name in chosen]


def of_stages(*stages: Stage) -> list[str]:
    """The names of the enabled passes of ``stages``, in the order in which they run.

    >>> of_stages("match")
    ['match_patterns', 'fuse_attention']
    """
    return [info.name for info in registered() if info.enabled and info.stage in stages]


def earlier_than(name: str, passes: Sequence[str] | None = None) -> list[str]:
    """The passes among ``passes`` (names; by default all enabled ones) that run before the pass ``name``, in order.

    >>> earlier_than("no_ops", ["no_ops", "dead_code", "fuse_pointwise"])
    ['dead_code']
    """
    order = [info.name for info in registered()]
    return [info.name for info in select(passes) if order.index(info.name) < order.index(name)]


def ordered(passes: Iterable[PassInfo]) -> list[PassInfo]:
    """``passes`` sorted by stage and by their declarations; otherwise in the given order.

    Raises:
        FuseError: a declaration names no pass, or declarations contradict each other.
    """
    infos = list(passes)
    by_name = {info.name: info for info in infos}
    rank = {info.name: (STAGES.index(info.stage), index, index) for index, info in enumerate(infos)}
    behind = {info.stage: rank[info.name] for info in reversed(infos) if info.behind_others}
    for info in infos:
        if info.stage in behind and not info.origin.startswith("fuse."):
            stage, index, _ = behind[info.stage]
            rank[info.name] = stage, index - 1, len(infos) + rank[info.name][1]  # just before, in their own order
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(by_name, ()))
    for info in infos:
        for other in (*info.after, *info.before):
            if other not in by_name:
                hint = _installed.suggestion(other)
                raise FuseError(f"pass {info.name!r} of {info.origin} names {other!r}, which is not a pass{hint}")
        for first, second in (*((one, info.name) for one in info.after), *((info.name, one) for one in info.before)):
            if rank[first][0] > rank[second][0]:
                stages = f"{first!r} is of stage {by_name[first].stage!r}, {second!r} of {by_name[second].stage!r}"
                raise FuseError(f"pass {info.name!r} of {info.origin} contradicts the stages: {stages}; change stage=")
            sorter.add(second, first)
    try:
        sorter.prepare()
    except CycleError as error:
        stuck = ", ".join(sorted(set(error.args[1])))
        raise FuseError(
            f"passes {stuck} declare an order that contradicts itself; change their after= or before="
        ) from None
    result: list[PassInfo] = []
    ready: list[tuple[tuple[int, int, int], str]] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (rank[name], name))
        _, first = heapq.heappop(ready)
        result.append(by_name[first])
        sorter.done(first)
    return result


def _summary(function: PassFunction) -> str:
    text = function.__doc__ or importlib.import_module(function.__module__).__doc__ or ""
    return text.strip().partition("\n")[0]


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
