"""The steps of a program, and the memory they work on.

    graph  --schedule-->  buffers + steps  --plan-->  addresses  --program-->  tables for the native runner

A step is one launch (or a Python call that launches what it launches); a place is a byte of a buffer. Views take no
step: they are other places and strides in the buffer of their base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fuse.graph.loop import LoopSpec
from fuse.kernel.lower import Kernel
from fuse.ops import Kind
from fuse.runtime.device import Runtime
from fuse.runtime.libraries import LibraryProduct

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, strides and dtype of a tensor."""


@dataclass(frozen=True)
class Allocation:
    """The memory behind one value that is not a view.

    ``origin``: ``input`` (the caller's tensor), ``made`` (the planner finds room: in the workspace, or in a fresh
    tensor when the caller receives it), ``called`` (the tensor an ATen call returned). ``value`` is the fake tensor
    that lies there; its size in bytes, gaps between strides included, is ``size``.
    """

    origin: Literal["input", "made", "called"]
    value: Tensor
    size: int


@dataclass(frozen=True)
class BufferView:
    """What a Python call takes of buffer number ``buffer`` as a tensor of its own, ``value``."""

    buffer: int
    value: Tensor


@dataclass(frozen=True)
class Place:
    """``offset`` bytes behind the first element of buffer number ``buffer``."""

    buffer: int
    offset: int


@dataclass(frozen=True)
class Ref:
    """A tensor that a Python call takes or gives: the whole of buffer ``index``, or, if ``view``, view number
    ``index``."""

    index: int
    view: bool = False


@dataclass(frozen=True)
class KernelStep:
    """One generated kernel. ``shareable`` are its (input, output) positions that may be one place in memory.

    ``kind`` is what a profile calls it, ``source`` the user's line.
    """

    kernel: Kernel
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    shareable: tuple[tuple[int, int], ...]
    kind: Kind = "region"
    source: str = ""


@dataclass(frozen=True)
class ProductStep:
    """One library product; ``reads`` are left, right and, if any, bias."""

    product: LibraryProduct
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    source: str = ""


@dataclass(frozen=True)
class CopyStep:
    """Elements of ``item`` bytes copied from one layout (strides in elements) to another."""

    reads: tuple[Place]
    writes: tuple[Place]
    item: int
    size: tuple[int, ...]
    source_stride: tuple[int, ...]
    target_stride: tuple[int, ...]
    source: str = ""


@dataclass(frozen=True)
class CallStep:
    """A Python call: an ATen operator, a region run op by op, or (``launches`` 0) a view that such a call needs as a
    tensor.

    ``results`` pairs a position in the returned tuple (None: the returned tensor itself) with where to keep it. The
    layouts predicted for results are those of their buffers; an operator must keep to them, a module's results are
    copied into them. ``source`` is the user's line. ``passing`` are the bytes of results that nobody reads, and of what
    the operator is known to allocate inside itself.
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

    ``args`` are the loop's operands, ``results`` pairs positions among the loop's results with where to keep them;
    ``layouts`` are size, stride and dtype of all of these.
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
    """What a profile calls a step: its kind, its name, and the user's line.

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
    """What ran as eager would instead of fused: the operator or region, the user's line, and why."""

    op: str
    source: str
    reason: str


@dataclass(frozen=True)
class ProgramResult:
    """What the caller receives for one graph output: the whole of a buffer, in the layout of ``value``."""

    buffer: int
    value: Tensor


@dataclass(frozen=True)
class Schedule:
    """A graph as steps in order.

    The first buffers are the graph's placeholders. ``results`` follows the graph's output tuple; None where no output
    of the model names the value. Those of the body of a loop may be placeholders, and one buffer may be there twice.
    After ``confirmed`` steps results are confirmed, where anything was learned of values: before inputs are written.
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
    """The kernels that a schedule calls, in order, those in the bodies of its loops included."""
    for step in plan.steps:
        if isinstance(step, KernelStep):
            yield step.kernel
        elif isinstance(step, LoopStep):
            yield from kernels_of(step.body)


@dataclass(frozen=True)
class Launches:
    """Launches observed in one call: counted where each is made, never read from the plan."""

    kernels: int = 0
    libraries: int = 0
    aten: int = 0

    @classmethod
    def unpack(cls, counted: Launches | int) -> Launches:
        """From what :meth:`Program.run` returns.

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
