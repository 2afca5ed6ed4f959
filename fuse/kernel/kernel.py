"""A generated kernel, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fuse.kernel.sizes.region_text import Numbers


@dataclass(frozen=True)
class Served:
    """A call that a kernel for varying sizes serves.

    ``sizes`` are the sizes of its family (:class:`fuse.kernel.sizes.sized.SizeFamily`) in this call. ``at`` gives the
    kernel for a call with other sizes; None if the kernel does not serve them.
    """

    sizes: Numbers
    at: Callable[[Numbers], Kernel | None]


@dataclass(frozen=True)
class Kernel:
    """One generated kernel.

    Attributes:
        name: of its function.
        source: defines ``extern "C" int name(char *const *args)``. ``args`` are pointers to the inputs in the order of
            the placeholders, to the outputs, to the workspace if there is one, and to the sizes if there are any. The
            pointer to the sizes also comes before these.
        in_place: (input, output) positions that may share memory, because the kernel reads each element of the input
            just before it writes the same element of the output.
        parallel: whether the kernel uses several threads.
        workspace_bytes: memory that the kernel uses during a call.
        sizes: numbers by name, passed in each call as ``int64_t``. They are not in the source, so that calls that
            differ only in sizes share a kernel.
        headers: files that the source includes after the prelude.
        schedule: a sentence that says how the kernel runs, where the IR does not show it.
        computes: a hash that is equal for kernels that differ only in names and the user's lines, of which one is
            compiled; empty if unknown.
        served: the call that it serves, if it serves calls of other sizes too.
    """

    name: str
    source: str
    in_place: frozenset[tuple[int, int]]
    parallel: bool
    workspace_bytes: int = 0
    sizes: tuple[tuple[str, Any], ...] = ()
    headers: tuple[str, ...] = ()
    schedule: str = ""
    computes: str = ""
    served: Served | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Declined:
    """Why a region cannot be lowered."""

    reason: str
