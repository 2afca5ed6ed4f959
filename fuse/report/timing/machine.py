"""The machine and the versions of a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

import fuse


def machine() -> dict[str, str | int]:
    """Name of the processor, cores that this process may use, operating system.

    >>> sorted(machine())
    ['cores', 'processor', 'system']
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"processor": _processor(), "cores": cores, "system": platform.platform()}


def versions() -> dict[str, str]:
    """Versions of fuse, torch and Python.

    >>> versions()["fuse"] == fuse.__version__
    True
    """
    return {"fuse": fuse.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _processor() -> str:
    """The processor's name, which Linux keeps in a file of its own."""
    path = Path("/proc/cpuinfo")
    names = [line for line in path.read_text().splitlines() if line.startswith("model name")] if path.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
