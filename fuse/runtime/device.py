"""The seam between programs and what builds and starts their kernels on a device.

    schedule   which kernel or library runs a region?     lower, prefer, product   \\
    program    addresses, tables, memory, one call        functions, tables, ...    >  fuse/runtime/cpu/
    footprint  memory for pointers                        scratch_bytes            /

The runtime of a device is a folder with a module ``device`` that defines ``RUNTIME``. Nothing outside imports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.kernel.lower import Declined, Kernel
from fuse.runtime.libraries import LibraryProduct

if TYPE_CHECKING:
    from fuse.runtime.steps import Place, Step

Lower = Callable[[GraphModule], Kernel | Declined]
Prefer = Callable[[Node, Callable[[Node], Kernel | Declined]], Kernel | str | None]
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


class NativeTables(Protocol):
    """Native steps in the form that a runtime's ``run`` walks; ``address`` is where they are once they are frozen."""

    address: int

    def add(self, step: Step, address: Callable[[Place], tuple[int, int]]) -> None:
        """Append a native step; ``address`` gives base and offset of a place."""

    def freeze(self) -> NativeTables:
        """The same, complete."""

    def __len__(self) -> int:
        """The number of steps."""


@dataclass(frozen=True)
class Runtime:
    """The interface between programs and their device.

    ``lower`` turns a region into a kernel, or says why it cannot; it is asked once for equal regions of one operator.
    ``prefer`` says what runs an operator that is in no region: a kernel, a name for its library, or None where it does
    not know; it is given what lowers such an operator. ``product`` describes
    a node that the library of matrix products computes as a native step, or is None.

    ``functions`` builds kernels and gives their addresses by name. ``tables`` is given the number of the workspace's
    base and these addresses. ``run`` makes the function that walks tables: address, first and last step, address of the
    bases; it returns kernels launched + (library calls << 32), or a negative number where a position is out of range.
    ``scratch_bytes`` are what the function needs for itself. ``empty`` is ``torch.empty_strided`` on the device.
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
