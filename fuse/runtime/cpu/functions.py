"""The native functions of a program: its kernels, compiled, and where they are in memory.

kernels of a schedule  ->  not in this process yet  ->  translation units  ->  libraries  ->  {name: address}
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

from fuse.kernel.cpu.loop_kernel import HEADERS as LOOP_HEADERS
from fuse.kernel.cpu.prelude import prelude, text_of_headers
from fuse.kernel.lower import Kernel
from fuse.runtime.cpu.compiler import build_many, built_by

FOR_A_LINE, FOR_A_LINE_BEHIND_HEADERS, FOR_HEADERS = 0.5, 1.0, 350.0
"""Milliseconds that GCC takes, roughly: for a line of a kernel, for one of a kernel that needs headers, and for what
these headers hold, once a unit."""

_known: dict[object, int] = {}
"""Addresses of the kernels of all programs of this process."""


def addresses_of(kernels: Iterable[Kernel]) -> dict[str, int]:
    """Addresses of all kernels. Of those that compute the same from memory laid out alike, in this program and in those
    before it, the first is compiled."""
    maker = built_by()
    code: dict[str, object] = {}
    new: dict[object, Kernel] = {}
    for kernel in kernels:
        of = code[kernel.name] = (maker, _code(kernel))
        if of not in _known:
            new.setdefault(of, kernel)
    units = units_of(new.values())
    sources = ["\n".join([prelude(), text_of_headers(unit[0].headers), *(k.source for k in unit)]) for unit in units]
    for unit, library in zip(units, build_many(sources), strict=True):
        _known.update((code[kernel.name], _function_address(library, kernel.name)) for kernel in unit)
    return {name: _known[of] for name, of in code.items()}


def _code(kernel: Kernel) -> object:
    """Equal for kernels that one function can be: what they are given in a call must be the same, too."""
    if not kernel.computes:
        return kernel.name, kernel.source, kernel.headers
    return kernel.computes, kernel.headers, kernel.in_place, kernel.parallel, kernel.workspace_bytes


def units_of(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """The kernels by translation unit. Each loop is one of its own: it serves other lengths, for which other kernels
    may be others. So are kernels that need the same headers. The unit that takes longest comes first: begun last, it
    would keep one processor busy while the others wait."""
    units: dict[object, list[Kernel]] = {}
    for kernel in kernels:
        alone = kernel.headers == LOOP_HEADERS
        units.setdefault(kernel.name if alone else (kernel.headers, bool(kernel.sizes)), []).append(kernel)
    return sorted(units.values(), key=_milliseconds, reverse=True)


def _milliseconds(unit: Sequence[Kernel]) -> float:
    """Rough compile time of a unit, to compare units."""
    lines = sum(kernel.source.count("\n") for kernel in unit)
    return lines * FOR_A_LINE_BEHIND_HEADERS + FOR_HEADERS if unit[0].headers else lines * FOR_A_LINE


def _function_address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
