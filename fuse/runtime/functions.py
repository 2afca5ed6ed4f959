"""The native functions of a program: its kernels, compiled, and where they are in memory.

kernels of a schedule  ->  translation units  ->  libraries  ->  {name: address}
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

from fuse.kernel.cpu.loop_kernel import HEADERS as LOOP_HEADERS
from fuse.kernel.cpu.prelude import prelude, text_of_headers
from fuse.kernel.lower import Kernel
from fuse.runtime.compiler import build_many
from fuse.runtime.steps import KernelStep, LoopStep, Schedule


def kernels_of(plan: Schedule) -> Iterator[Kernel]:
    """The kernels that a schedule calls, in order, those in the bodies of its loops included."""
    for step in plan.steps:
        if isinstance(step, KernelStep):
            yield step.kernel
        elif isinstance(step, LoopStep):
            yield from kernels_of(step.body)


def addresses_of(kernels: Iterable[Kernel]) -> dict[str, int]:
    """Addresses of all kernels. Each loop is a translation unit of its own: it serves other lengths, for which other
    kernels may be others. So are kernels that need the same headers."""
    units: dict[object, list[Kernel]] = {}
    for kernel in kernels:
        alone = kernel.headers == LOOP_HEADERS
        units.setdefault(kernel.name if alone else (kernel.headers, bool(kernel.sizes)), []).append(kernel)
    sources = [
        "\n".join([prelude(), text_of_headers(unit[0].headers), *(k.source for k in unit)]) for unit in units.values()
    ]
    libraries = build_many(sources)
    return {
        k.name: _function_address(lib, k.name)
        for unit, lib in zip(units.values(), libraries, strict=True)
        for k in unit
    }


def _function_address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
