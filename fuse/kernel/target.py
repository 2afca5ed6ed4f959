"""Targets: the interface between the kernel IR and the code generator of a device.

    values  --schedule-->  IR                 the same for all        (this folder)
    IR, products, loops  --write-->  source   a target's own          (``fuse/kernel/cpu/``)

A target is a folder with a module ``target`` that defines ``TARGET``. Only this folder, and the folder of
``fuse/runtime/`` that builds and starts its kernels (:mod:`fuse.runtime.programs.device`), depend on its language.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from fuse.devices import DEVICES
from fuse.graph.loop import Loop
from fuse.graph.loop_with_ends import LoopWithEnds
from fuse.kernel.config import Config
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.packing import Packing
from fuse.kernel.values import Computation

TARGETS = {device: f"fuse.kernel.{device}.target" for device in DEVICES}
"""The module of each target, by the type of its device."""


@dataclass(frozen=True)
class Written:
    """The source of a kernel, its workspace in bytes, whether it uses threads, and the headers that it needs.

    ``schedule`` is a sentence that says how the kernel runs, where the IR does not show it.
    """

    source: str
    workspace_bytes: int = 0
    parallel: bool = False
    headers: tuple[str, ...] = ()
    schedule: str = ""


LoopKernels = dict[Hashable, Kernel | Declined]
"""Kernels of loops, by a key that is equal for loops that one kernel serves."""


@dataclass(frozen=True)
class Target:
    """Code generator for one kind of device.

    Attributes:
        device: type of the device, like ``"cpu"``.
        packing: layout of the right operand of its products.
        write: writes the kernel of a region, given its values, the kernel's name, and the config. Raises
            ``Unsupported`` or ``NotAffine`` with a reason for the user.
        write_loop, write_with_ends, write_end: what :mod:`fuse.kernel.loops.lower_loops` calls. They return a kernel,
            or the reason why there is none; a target without loop kernels declines.
        with_sizes: makes a source read sizes from its arguments, given the source, the names of the sizes, the number
            of arguments before them, and the names of those that are floats. None for a target without kernels for
            sizes that vary.
    """

    device: str
    packing: Packing
    write: Callable[[Computation, str, Config], Written]
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
