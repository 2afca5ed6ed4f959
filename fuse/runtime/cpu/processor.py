"""The instruction sets of this processor, as text for the cache key.

Libraries are built with ``-march=native``. A library with AVX-512 must not be loaded on a machine without it, even if
both machines share a home directory.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

X86_MACHINES = frozenset({"x86_64", "amd64", "i386", "i686"})

_CPUINFO = Path("/proc/cpuinfo")
# Linux's names of the list of instruction-set extensions on x86, Arm and RISC-V.
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
    """The instruction-set extensions of the first core, sorted; the processor's name if the system lists none.

    >>> features() == features() != ""
    True
    """
    listed = _listed_features(_CPUINFO)
    return " ".join([machine(), *(listed or [platform.system(), platform.processor()])])


@functools.cache
def model() -> str:
    """The processor's name; processors with the same extensions may differ in speed.

    >>> model() == model()
    True
    """
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(named, "") or platform.processor()
    except OSError:
        return platform.processor()


def identity() -> str:
    """A text that is equal on machines that can share measurements."""
    return f"{features()} {model()} {os.cpu_count()}"


def _listed_features(cpuinfo: Path) -> list[str]:
    """The instruction-set extensions in a file like ``/proc/cpuinfo``; empty if there is no such file.

    Stops at the first core, because the system generates the file as it is read, slowly for hundreds of cores.
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
