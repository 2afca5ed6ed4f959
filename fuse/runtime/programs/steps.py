"""The steps of a program, and the buffers that they read and write.

    graph  --schedule-->  buffers + steps  --plan-->  addresses  --program-->  tables for the native runner

A step is one launch, or a Python call with any number of launches. A place is a byte offset in a buffer. Views are no
steps: they are other places and strides in the buffer of their base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fuse.graph.loop import LoopSpec
from fuse.kernel.kernel import Kernel
from fuse.ops import Kind
from fuse.runtime.programs.device import Runtime
from fuse.runtime.programs.libraries import LibraryProduct

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, strides and dtype of a tensor."""


@dataclass(frozen=True)
class Allocation:
    """The memory behind one value that is not a view.

    ``origin``: ``input`` (the caller's tensor), ``made`` (allocated in the workspace, or as a new tensor that the
    caller receives), ``called`` (the tensor that a Python call returned). ``value`` is a fake tensor of this layout.
    ``size`` is its size in bytes, gaps between strides included.
    """

    origin: Literal["input", "made", "called"]
    value: Tensor
    size: int


@dataclass(frozen=True)
class BufferView:
    """A view ``value`` (a fake tensor) of buffer ``buffer``, which a Python call takes."""

    buffer: int
    value: Tensor


@dataclass(frozen=True)
class Place:
    """The byte ``offset`` of buffer ``buffer``, counted from its first element."""

    buffer: int
    offset: int


@dataclass(frozen=True)
class Ref:
    """A tensor that a Python call takes or returns: the whole buffer ``index``, or with ``view``, view ``index``."""

    index: int
    view: bool = False


@dataclass(frozen=True)
class KernelStep:
    """A launch of a generated kernel.

    ``shareable`` are (input, output) positions that may share memory. ``kind`` is the name of its kind in a profile,
    ``source`` the user's line.
    """

    kernel: Kernel
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    shareable: tuple[tuple[int, int], ...]
    kind: Kind = "region"
    source: str = ""


@dataclass(frozen=True)
class ProductStep:
    """A launch of a library product; ``reads`` are the left operand, the right operand, and the bias if there is
    one."""

    product: LibraryProduct
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    source: str = ""


@dataclass(frozen=True)
class CopyStep:
    """A copy of elements of ``item`` bytes from one layout (strides in elements) to another."""

    reads: tuple[Place]
    writes: tuple[Place]
    item: int
    size: tuple[int, ...]
    source_stride: tuple[int, ...]
    target_stride: tuple[int, ...]
    source: str = ""


@dataclass(frozen=True)
class CallStep:
    """A Python call: an ATen operator, a region run op by op, or (with ``launches`` 0) a view for such a call.

    ``results`` are pairs of a position in the returned tuple (None for the returned tensor itself) and the reference
    that it is bound to. Results have the layouts of their buffers: an operator must return them, and a module's results
    are copied to them. ``source`` is the user's line. ``passing`` is the number of bytes of results that nobody reads
    and of memory that the operator is known to allocate.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int | None, Ref], ...]
    launches: int
    source: str = ""
    passing: int = 0


@dataclass(frozen=True)
class LoopStep:
    """All steps of a loop whose body is a program of its own.

    ``args`` are the loop's operands. ``results`` are pairs of a position among the loop's results and the reference
    that it is bound to. ``layouts`` are the layouts of all of the loop's results.
    """

    body: Schedule
    spec: LoopSpec
    args: tuple[Ref, ...]
    results: tuple[tuple[int | None, Ref], ...]
    layouts: tuple[Layout, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    source: str = ""


PythonStep = CallStep | LoopStep
Step = KernelStep | ProductStep | CopyStep | PythonStep


def title(step: Step) -> str:
    """The name of a step in a profile: its kind, its name, and the user's line.

    >>> title(CopyStep((Place(0, 0),), (Place(1, 0),), 4, (2,), (1,), (1,), "model.py:4"))
    'fuse::movement copy at model.py:4'
    """
    if isinstance(step, KernelStep):
        named = f"{step.kind} {step.kernel.name}"
    elif isinstance(step, ProductStep):
        named = "gemm product"
    elif isinstance(step, CopyStep):
        named = "movement copy"
    else:
        function = step.function if isinstance(step, CallStep) else "loop"
        named = f"call {str(getattr(function, '__name__', function)).split()[0]}"
    return f"fuse::{named}" + (f" at {step.source}" if step.source else "")


@dataclass(frozen=True)
class Fallback:
    """An operator, region or call that runs eager instead of fused, with the user's line and the reason."""

    op: str
    source: str
    reason: str


@dataclass(frozen=True)
class ProgramResult:
    """A graph output that the caller receives: a whole buffer, in the layout of ``value``."""

    buffer: int
    value: Tensor


@dataclass(frozen=True)
class Schedule:
    """A graph as steps in order.

    The first buffers are the graph's placeholders. ``results`` follows the graph's output tuple; None for a value that
    is no result of the model. In the body of a loop, results may be placeholders, and may name one buffer twice. If
    Python read values, they are confirmed after ``confirmed`` steps, before inputs are written.
    """

    buffers: tuple[Allocation, ...]
    views: tuple[BufferView, ...]
    steps: tuple[Step, ...]
    results: tuple[ProgramResult | None, ...]
    fallbacks: tuple[Fallback, ...]
    regions: int
    runtime: Runtime
    confirmed: int | None = None


def kernels_of(plan: Schedule) -> Iterator[Kernel]:
    """The kernels of a schedule in order, those in the bodies of its loops included."""
    for step in plan.steps:
        if isinstance(step, KernelStep):
            yield step.kernel
        elif isinstance(step, LoopStep):
            yield from kernels_of(step.body)


@dataclass(frozen=True)
class Launches:
    """Observed launches of one call, counted where each launch is made, not derived from the schedule."""

    kernels: int = 0
    libraries: int = 0
    aten: int = 0

    @classmethod
    def unpack(cls, counted: Launches | int) -> Launches:
        """The launches from the value that :meth:`Program.run` returns.

        >>> Launches.unpack(3 + (2 << 32))
        Launches(kernels=3, libraries=2, aten=0)
        """
        if isinstance(counted, Launches):
            return counted
        return cls(counted & 0xFFFFFFFF, counted >> 32)

    @property
    def total(self) -> int:
        """All launches."""
        return self.kernels + self.libraries + self.aten
