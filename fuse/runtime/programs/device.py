"""Runtimes: the interface between programs and the code that builds and starts kernels on a device.

    schedule   which kernel or library runs a region?     lower, prefer, product   \\
    program    addresses, tables, memory, one call        functions, tables, ...    >  fuse/runtime/cpu/
    footprint  memory for pointers                        scratch_bytes            /

The runtime of a device is a folder with a module ``device`` that defines ``RUNTIME``. No code outside imports the
folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.kernel.kernel import Declined, Kernel
from fuse.runtime.programs.libraries import LibraryProduct

if TYPE_CHECKING:
    from fuse.runtime.programs.steps import Place, Step

Lower = Callable[[GraphModule], Kernel | Declined]
Prefer = Callable[[Node, Callable[[Node], Kernel | Declined]], Kernel | str | None]
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


class NativeTables(Protocol):
    """Native steps in the format that a runtime's ``run`` executes; ``address`` is their address once frozen."""

    address: int

    def add(self, step: Step, addresses: Callable[[tuple[Place, ...]], Sequence[int]]) -> None:
        """Append a native step; ``addresses`` gives for each place the index of a base pointer and an offset in
        bytes."""

    def freeze(self) -> NativeTables:
        """These tables, complete: no step may be added any more."""

    def __len__(self) -> int:
        """The number of steps."""


@dataclass(frozen=True)
class Runtime:
    """The interface between programs and their device.

    Attributes:
        lower: the kernel of a region, or the reason why there is none.
        prefer: what runs an operator that is in no region: a kernel, a name of its library, or None for no preference.
            Its second argument lowers such an operator.
        product: the description of a node that the library of matrix products computes as a native step, or None.
        functions: builds kernels, and returns their addresses by name.
        tables: new tables, given the index of the workspace's base pointer and the addresses of the kernels.
        run: makes the function that runs steps, ``(address of the tables, first step, end, address of the bases)``. It
            returns kernels launched + (library calls << 32), or a negative number if a position is out of range.
        scratch_bytes: memory at the start of the workspace that this function uses.
        empty: ``torch.empty_strided`` on the device.
    """

    lower: Lower
    prefer: Prefer
    product: Callable[[Node], LibraryProduct | None]
    functions: Callable[[Iterable[Kernel]], dict[str, int]]
    tables: Callable[[int, dict[str, int]], NativeTables]
    run: Callable[[], Any]
    scratch_bytes: Callable[[Sequence[Step]], int]
    empty: Empty


def runtime_of(device: str) -> Runtime:
    """The runtime that builds and starts kernels on this kind of device.

    >>> runtime_of("cpu").empty((2, 3), (3, 1), torch.float32).shape
    torch.Size([2, 3])
    """
    found: Runtime = importlib.import_module(f"fuse.runtime.{device}.device").RUNTIME
    return found
