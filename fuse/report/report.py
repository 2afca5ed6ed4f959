"""Reports of ``show`` as data: counts before and after, the ledger of the passes, and what was asked for besides.

``fuse/report/show.py`` makes a report; tables, pictures and pages are made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fuse.cost.count import Count
from fuse.cost.memory import StepMemory
from fuse.graph.numbers.learned import ReadLine
from fuse.notebook import preformatted
from fuse.report.casts import CastLine
from fuse.report.loops import Repetition
from fuse.report.pictures.sketch import Sketch
from fuse.rewrite.ledger import Firings, Ledger, Rejections
from fuse.runtime.programs.steps import Fallback

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class LineLaunches:
    """The launches of one user line."""

    source: str
    before: int
    after: int


@dataclass(frozen=True)
class Crossing:
    """A value that the host stage hands to the device stage. ``bytes``: the size of its tensors; ``learned``: it is no
    tensor, so that a program serves this value only."""

    name: str
    what: str
    bytes: int
    learned: bool


@dataclass(frozen=True)
class HostStage:
    """Host work of a call. ``lines``: its first and last line; ``launches``: eager's launches on the host. ``before``
    and ``after`` count the device stage alone, which ``fuse.pipeline`` runs while workers do host work."""

    lines: tuple[str, str]
    launches: int
    crosses: tuple[Crossing, ...]
    before: Count
    after: Count

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Side:
    """One call of eager or of fuse, in microseconds, by the profiler's clock.

    ``busy`` is the time in launches, ``span`` the time from the first launch to the end of the last. ``rows`` are (id,
    microseconds) of nodes. ``obstacle`` says why launches could not be matched with the report.
    """

    launches: int
    busy: float
    span: float
    lines: Mapping[str, float]
    rows: Sequence[tuple[int, float]]
    obstacle: str = ""


@dataclass(frozen=True)
class Measured:
    """Measurements of eager (``before``) and fused (``after``), with the number of calls and threads.

    ``libraries``: the peak bytes that eager's libraries held for themselves, if observed.
    """

    calls: int
    threads: int
    before: Side
    after: Side
    libraries: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Totals; the record has lines and rows."""
        sides = {name: getattr(self, name) for name in ("before", "after")}
        return {
            "calls": self.calls,
            "threads": self.threads,
            "libraries": self.libraries,
            **{
                name: {"launches": side.launches, "busy": side.busy, "span": side.span, "obstacle": side.obstacle}
                for name, side in sides.items()
            },
        }


@dataclass(frozen=True)
class Break:
    """Where Dynamo ended a graph and ran Python, and why."""

    reason: str
    source: str


@dataclass(frozen=True)
class CompiledKernel:
    """A generated kernel or a library's: the user's lines and the ATen operators that it computes."""

    name: str
    launches: int
    lines: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """Why Inductor did not fuse ``count`` pairs of nodes; ``lines`` are the user's lines of the first pair."""

    reason: str
    count: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class TorchCompiled:
    """The result of ``torch.compile`` for one call. ``lines`` has the launches of each user line.

    A kernel with operators of several lines counts for the first of them. ``obstacle`` is the error if compiling
    failed.
    """

    launches: int
    graphs: int
    breaks: tuple[Break, ...]
    kernels: tuple[CompiledKernel, ...]
    refusals: tuple[Refusal, ...]
    seconds: float
    lines: Mapping[str, int] = field(default_factory=dict)
    obstacle: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Report:
    """Result of ``show``. All counts are predicted from the graph for the device profile ``device``.

    ``lines`` are the user's lines, the one with most launches first. ``graph`` is the captured graph after the passes,
    and ``ledger`` their full record; ``seconds`` has the time of ``capture`` and ``passes``. In training, ``backward``
    is the report of the backward pass, which is captured with the forward pass; None if nothing needs gradients.
    ``optimizer`` has the launches of a step of torch's optimizers for the parameters that get gradients, by optimizer
    and implementation (``loop``, ``foreach``, ``fused``); the passes do not change them. ``step_memory`` has the peak
    bytes of the whole step, before and after, and the bytes saved from the forward to the backward pass.
    ``reads`` are the values that ``forward`` reads, by line, and the values for which the graph is valid. ``fallbacks``
    say why the call runs eager, if it does: then only eager's launches are counted.
    ``casts`` are the lines that change dtypes, the one that moves most bytes first.
    ``held`` splits the peak memory after the passes by its holder, in bytes.
    ``record`` has every node, rewrite, candidate and kernel, if asked for (``docs/report.md``). If asked for,
    ``measured`` has the time of each launch of a call, and ``compiled`` the result of ``torch.compile``.
    """

    target: str
    device: str
    before: Count
    after: Count
    loops: tuple[Repetition, ...]
    lines: tuple[LineLaunches, ...]
    unknown_ops: tuple[str, ...]
    seconds: Mapping[str, float]
    ledger: Ledger = field(repr=False)
    before_sketch: Sketch = field(repr=False)
    graph: GraphModule = field(repr=False, compare=False)
    backward: Report | None = None
    optimizer: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    step_memory: StepMemory | None = None
    reads: tuple[ReadLine, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    casts: tuple[CastLine, ...] = ()
    host: HostStage | None = None
    record: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    held: Mapping[str, int] = field(default_factory=dict)
    measured: Measured | None = None
    compiled: TorchCompiled | None = None

    @property
    def launches_after(self) -> int:
        """All launches after the passes, including the backward pass."""
        return self.after.launches + (self.backward.launches_after if self.backward else 0)

    @property
    def fired(self) -> tuple[Firings, ...]:
        """The rewrites made, grouped by pass and pattern."""
        return self.ledger.fired

    @property
    def rejected(self) -> tuple[Rejections, ...]:
        """The candidates declined, grouped by pass, pattern and reason."""
        return self.ledger.rejected

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON (``schema_version`` 2, see ``docs/report.md``)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "device": self.device,
            "torch": torch.__version__,
            "passes": list(self.ledger.passes),
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "loops": [loop.to_dict() for loop in self.loops],
            "fired": [
                {
                    "pass": one.pass_name,
                    "pattern": one.pattern,
                    "count": one.count,
                    "launches_saved": one.launches_saved,
                }
                for one in self.fired
            ],
            "rejected": [
                {"pass": one.pass_name, "pattern": one.pattern, "reason": one.reason, "count": one.count}
                for one in self.rejected
            ],
            "failed": [
                {"pass": one.pass_name, "origin": one.origin, "source": one.source, "reason": one.reason}
                for one in self.ledger.failed
            ],
            "held": dict(self.held),
            "unknown_ops": list(self.unknown_ops),
            "reads": [asdict(one) for one in self.reads],
            "fallbacks": [asdict(one) for one in self.fallbacks],
            "seconds": dict(self.seconds),
            **({"casts": [asdict(line) for line in self.casts]} if self.casts else {}),
            **({"host": self.host.to_dict()} if self.host else {}),
            **({"backward": self.backward.to_dict()} if self.backward else {}),
            **({"step_memory": asdict(self.step_memory)} if self.step_memory else {}),
            **({"optimizer": {name: dict(ways) for name, ways in self.optimizer.items()}} if self.optimizer else {}),
            **({"measured": self.measured.to_dict()} if self.measured else {}),
            **({"against": {"compile": self.compiled.to_dict()}} if self.compiled else {}),
            **({"record": self.record} if self.record is not None else {}),
        }

    def _repr_html_(self) -> str:
        return preformatted(self)

    def __str__(self) -> str:
        from fuse.report.columns import as_text
        from fuse.report.table import report_table

        return as_text(report_table(self))

    def draw(self, path: str | Path) -> tuple[Path, ...]:
        """Draw the graphs before and after side by side into ``path`` (.dot, .svg or .html).

        Returns the written files. Raises ``FuseError`` for another suffix and for a file that cannot be written.
        """
        from fuse.report.pictures.draw import draw

        return draw(self, Path(path)).written
