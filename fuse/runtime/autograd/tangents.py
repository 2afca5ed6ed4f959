"""Tangents: gradients of a call's results, in the memory layout that a backward program reads.

    y.backward(dy)            dy as it is
    y.t().sum().backward()    dy copied
    y.sum().backward()        a broadcast number: copied once, and kept while the number is the same
    convolution_backward      dy as it is in any layout, if no other operator reads it

The gradient of a sum or a mean is the same number in most training steps. Its copy is kept if it is small and only
kernels read it, so that no caller receives its memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuse.graph.strides import extent
from fuse.runtime.programs.device import runtime_of
from fuse.runtime.programs.program import Program
from fuse.runtime.programs.reference import Reference
from fuse.runtime.programs.saved_memory import SavedMemory, can_be_used_again

MOST_KEPT = 2**22
"""Most bytes of a broadcast number's copy that is kept."""

_functorch: Any = torch._C._functorch


@dataclass(eq=False, slots=True)
class Tangent:
    """The gradient of one result.

    ``position`` is its position among the inputs of the backward program, ``layout`` a fake tensor of the layout there.
    ``memory`` allocates tensors of this layout. ``kept`` is the last broadcast number and its copy.
    """

    position: int
    layout: Tensor
    memory: Callable[[], Tensor]
    stride: tuple[int, ...] = field(init=False)
    number: Any = field(init=False)
    reader: Program | Reference | None = None
    keeps: bool = False
    any_layout: bool = False
    kept: tuple[bytes, Tensor] | None = None

    def __post_init__(self) -> None:
        self.stride = self.layout.stride()
        self.number = ctypes.c_char * self.layout.itemsize

    def laid_out(self, given: Tensor, program: Program | Reference) -> tuple[Tensor, int]:
        """``given`` in the layout that ``program`` reads, and the number of copies made (0 or 1)."""
        if given.is_neg() or given.is_conj() or given._is_zerotensor():  # its memory does not hold its numbers
            return self.memory().copy_(given), 1
        stride = given.stride()
        if stride == self.stride:
            return given, 0
        if program is not self.reader:
            self._read_by(program)
        if self.any_layout:
            return given, 0
        if any(stride) or not self.keeps:
            return self.memory().copy_(given), 1
        number = self.number.from_address(given.data_ptr()).raw
        kept = self.kept  # read once: another thread may exchange it
        if kept is not None and kept[0] == number:
            return kept[1], 0
        made = torch.empty_strided(self.layout.shape, self.stride, dtype=given.dtype, device=given.device).copy_(given)
        self.kept = number, made
        return made, 1

    def with_history(self, given: Tensor) -> Tensor:
        """``given`` in the layout that the graph was captured with, still differentiable."""
        if given.stride() == self.stride and not (given.is_neg() or given.is_conj() or given._is_zerotensor()):
            return given
        return torch.empty_strided(given.shape, self.stride, dtype=given.dtype, device=given.device).copy_(given)

    def _read_by(self, program: Program | Reference) -> None:
        """Note the needs of ``program``: whether copies of broadcast numbers are kept for its later runs, and whether
        it takes gradients of any layout."""
        small = 0 < extent(self.layout) <= MOST_KEPT
        self.keeps = small and isinstance(program, Program) and program.kernels_alone_read(self.position)
        self.any_layout = isinstance(program, Program) and program.takes_any_layout(self.position)
        self.reader = program


def memory_like(layout: Tensor) -> Callable[[], Tensor]:
    """A function that allocates tensors of the layout of ``layout``."""
    if can_be_used_again([layout]):
        memory = SavedMemory([layout])
        return lambda: memory.take()[0]
    return partial(runtime_of(layout.device.type).empty, tuple(layout.shape), layout.stride(), layout.dtype)


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor is a batch of gradients (``is_grads_batched``)."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor) or _functorch.is_legacy_batchedtensor(tensor))
