"""The seam between the kernel language and what writes it down for a device.

    values  --schedule-->  IR                 the same for all        (this folder)
    IR, products, loops  --write-->  source   a target's own          (``fuse/kernel/cpu/``)

A target is a folder with a module ``target`` that defines ``TARGET``. Nothing outside of it knows its language, but for
the folder of ``fuse/runtime/`` that builds and starts its kernels (:mod:`fuse.runtime.device`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.fx import GraphModule

from fuse.devices import DEVICES
from fuse.graph.loop import Loop
from fuse.graph.loop_ends import LoopWithEnds
from fuse.kernel.config import Config, Threads
from fuse.kernel.packing import Packing
from fuse.kernel.values import Computation

if TYPE_CHECKING:
    from fuse.kernel.lower import Declined, Kernel

TARGETS = {device: f"fuse.kernel.{device}.target" for device in DEVICES}
"""The module of each target, by the type of its device."""


@dataclass(frozen=True)
class Written:
    """The source of a kernel, what it takes in memory and threads, and the headers that it needs.

    ``schedule`` says in words how the kernel runs, where that is not in its loops as the IR has them.
    """

    source: str
    workspace_bytes: int = 0
    parallel: bool = False
    headers: tuple[str, ...] = ()
    schedule: str = ""


LoopKernels = dict[Hashable, "Kernel | Declined"]
"""Kernels of loops by their structure: what tells loops apart that one kernel cannot serve."""


@dataclass(frozen=True)
class Target:
    """Writer of kernels for one kind of device.

    ``write`` is given a region as values, the kernel's name, whether threads share it out, and the config of its loops.
    It raises ``Unsupported`` or ``NotAffine``, with a reason, where there is no such kernel. ``write_loop``,
    ``write_with_ends`` and ``write_end`` are what :mod:`fuse.kernel.lower_loops` asks; they return reasons. A target
    without loop kernels declines. ``packing`` says how its products read their right operand. ``with_sizes`` is given a
    kernel's source, the names of its sizes, behind how many arguments they come, and those that are floats, and returns
    the source that finds them there; None for a target without kernels for sizes that vary.
    """

    device: str
    packing: Packing
    write: Callable[[Computation, str, Threads, Config], Written]
    write_loop: Callable[[Loop, Sequence[Tensor], Sequence[Tensor], LoopKernels | None], Kernel | Declined]
    write_with_ends: Callable[[LoopWithEnds, LoopKernels | None], Kernel | Declined]
    write_end: Callable[[GraphModule], Kernel | Declined]
    with_sizes: Callable[[str, Sequence[str], int, Sequence[str]], str] | None = None


def target_of(device: str) -> Target:
    """The target for this kind of device.

    >>> target_of("cpu").device
    'cpu'
    """
    found: Target = importlib.import_module(TARGETS[device]).TARGET
    return found
