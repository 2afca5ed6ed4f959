"""The seam between the kernel language and what writes it down for a device.

    values  --schedule-->  IR          the same for all        (this folder)
    IR, products  --write-->  source   a target's own          (``fuse/kernel/cpu/``)

A target is a folder with a module ``target`` that defines ``TARGET``. Nothing outside of it knows its language.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from fuse.kernel.form import Form, Threads
from fuse.kernel.values import Program

TARGETS = {"cpu": "fuse.kernel.cpu.target"}
"""The module of each target, by the type of its device."""


@dataclass(frozen=True)
class Written:
    """The source of a kernel, what it takes in memory and threads, and the headers that it needs."""

    source: str
    workspace_bytes: int = 0
    parallel: bool = False
    headers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """What writes kernels for one kind of device.

    ``write`` is given a region as values, the kernel's name, whether threads share it out, and the form of its loops.
    It raises ``Unsupported`` or ``NotAffine``, with a reason, where there is no such kernel.
    """

    device: str
    write: Callable[[Program, str, Threads, Form], Written]


def target_of(device: str) -> Target:
    """What writes kernels for this kind of device.

    >>> target_of("cpu").device
    'cpu'
    """
    found: Target = importlib.import_module(TARGETS[device]).TARGET
    return found
