"""The instruction sets of this processor, as text for the cache key.

Libraries are built with ``-march=native``: one that uses AVX-512 must never be loaded on a machine without it, even
when both machines share a home directory.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

X86_MACHINES = frozenset({"x86_64", "amd64", "i386", "i686"})

_CPUINFO = Path("/proc/cpuinfo")
# What Linux calls the list of instruction-set extensions on x86, Arm and RISC-V.
_FEATURE_FIELDS = frozenset({"flags", "features", "isa"})


def machine() -> str:
    """The instruction set's name in lower case.

    >>> machine() == machine().lower()
    True
    """
    return platform.machine().lower()


def is_x86() -> bool:
    """Whether x86 compiler options apply.

    >>> is_x86() == (machine() in X86_MACHINES)
    True
    """
    return machine() in X86_MACHINES


@functools.cache
def features() -> str:
    """The instruction-set extensions of the first core, sorted; the processor's name where the system lists none.

    >>> features() == features() != ""
    True
    """
    listed = _listed_features(_CPUINFO)
    return " ".join([machine(), *(listed or [platform.system(), platform.processor()])])


@functools.cache
def model() -> str:
    """The processor's name as the system tells it: two with the same extensions may be of different speed.

    >>> model() == model()
    True
    """
    return _told("model name") or platform.processor()


def identity() -> str:
    """Equal on machines for which one measurement holds."""
    return f"{features()} {model()} {os.cpu_count()}"


def _told(field: str) -> str:
    """The system's entry of this name for the first core; empty where there is none."""
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
    except OSError:
        return ""


def _listed_features(cpuinfo: Path) -> list[str]:
    """The extensions named in a file of ``/proc/cpuinfo``'s form; empty where there is none.

    Stops at the first core: the system computes the text as it is read, slowly on machines with hundreds of cores.
    """
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                field, _, value = line.partition(":")
                if field.strip().lower() in _FEATURE_FIELDS:
                    return sorted(set(value.split()))
    except OSError:
        pass
    return []
