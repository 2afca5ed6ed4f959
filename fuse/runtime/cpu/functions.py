"""The native functions of a program: compile its kernels and get their addresses.

kernels of a schedule  ->  not in this process yet  ->  translation units  ->  libraries  ->  {name: address}
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

from fuse.kernel.cpu.loop_kernel import HEADERS as LOOP_HEADERS
from fuse.kernel.cpu.prelude import prelude_of, text_of_headers
from fuse.kernel.kernel import Kernel
from fuse.runtime.cpu.compiler import build_many, built_by

FOR_A_LINE, FOR_A_LINE_BEHIND_HEADERS, FOR_HEADERS = 0.5, 1.0, 350.0
"""Rough compile times of GCC in milliseconds: for a line of a kernel without and with headers, and for the headers."""

LONGEST_UNIT = 1000
"""Lines of kernels that one compiler is given at most, give or take half a kernel: one to two seconds. Programs with a
kernel for each step then keep all processors busy, and stay far below the compiler's time limit however long they are.
A further unit costs a tenth of a second."""

_known: dict[object, int] = {}
"""Addresses of all kernels that this process has loaded."""


def addresses_of(kernels: Iterable[Kernel]) -> dict[str, int]:
    """Addresses of all kernels, by name. Kernels that compute the same (``Kernel.computes``) share one function, with
    those of earlier programs too."""
    maker = built_by()
    code: dict[str, object] = {}
    new: dict[object, Kernel] = {}
    for kernel in kernels:
        of = code[kernel.name] = (maker, _code(kernel))
        if of not in _known:
            new.setdefault(of, kernel)
    units = units_of(new.values())
    for unit, library in zip(units, build_many([_source(unit) for unit in units]), strict=True):
        _known.update((code[kernel.name], _function_address(library, kernel.name)) for kernel in unit)
    return {name: _known[of] for name, of in code.items()}


def _source(unit: Sequence[Kernel]) -> str:
    code = "\n".join([text_of_headers(unit[0].headers), *(kernel.source for kernel in unit)])
    return prelude_of(code) + code


def _code(kernel: Kernel) -> object:
    """A key that is equal for kernels that one function can serve; they must take the same arguments too."""
    if not kernel.computes:
        return kernel.name, kernel.source, kernel.headers
    return kernel.computes, kernel.headers, kernel.in_place, kernel.parallel, kernel.workspace_bytes


def units_of(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """The kernels by translation unit, the unit that takes longest first, so that no processor waits for it at the end.

    Each loop has its own unit, which is cached for all lengths. Other kernels with the same headers are one unit, or
    several of ``LONGEST_UNIT`` lines where no templates of headers would be compiled again in each.
    """
    units: dict[object, list[Kernel]] = {}
    for kernel in kernels:
        alone = kernel.headers[: len(LOOP_HEADERS)] == LOOP_HEADERS
        units.setdefault(kernel.name if alone else (kernel.headers, bool(kernel.sizes)), []).append(kernel)
    parts = [part for unit in units.values() for part in ([unit] if unit[0].headers else _parts(unit))]
    return sorted(parts, key=_milliseconds, reverse=True)


def _parts(unit: list[Kernel]) -> list[list[Kernel]]:
    """The kernels of a unit, in order, in parts of about equal length where they have more than ``LONGEST_UNIT``
    lines."""
    lines = sum(map(_lines, unit))
    if lines <= LONGEST_UNIT:
        return [unit]
    count = -(-lines // LONGEST_UNIT)
    parts: dict[int, list[Kernel]] = {}
    before = 0
    for kernel in unit:
        middle = before + _lines(kernel) / 2
        parts.setdefault(int(middle * count / lines), []).append(kernel)
        before += _lines(kernel)
    return list(parts.values())


def _lines(kernel: Kernel) -> int:
    return kernel.source.count("\n")


def _milliseconds(unit: Sequence[Kernel]) -> float:
    """Rough compile time of a unit in milliseconds."""
    lines = sum(map(_lines, unit))
    return lines * FOR_A_LINE_BEHIND_HEADERS + FOR_HEADERS if unit[0].headers else lines * FOR_A_LINE


def _function_address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
