"""The other side of a branch on a size: its kernels are compiled with those of the first call whose sizes vary.

    x [99, 7, 8]     if T > 12: tanh       captured for these sizes
    x [11, 5, 8]     else: sigmoid         kernels for all sizes; with T = 18 it would be the other side, so that
    x [18, 6, 8]                           this made-up call is captured, and its kernels are compiled, too
    x [131, 8, 8]    tanh                  served by these kernels

``forward`` runs with symbolic sizes, and records what it compares (:mod:`fuse.runtime.size_uses.size_reads`). A side is
an order of two sizes (``T > 12``, not ``T == 12``, which is for one size only) or a remainder that is zero (whole
windows). The made-up call decides nothing: its kernels serve later calls by conditions of their own, as any kernel
does. If ``forward`` fails there, nothing is compiled for that side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fuse.errors import FaultWarning
from fuse.graph.strides import is_dense
from fuse.kernel.arithmetic.extents import LEAST_LOWERED, Conditions
from fuse.kernel.sizes.region_text import Numbers
from fuse.runtime.building.interrupts import awaited
from fuse.runtime.guards.call_guards import integers_of
from fuse.runtime.making import Maker, ModelCall
from fuse.runtime.programs.program import compiled_later
from fuse.runtime.programs.schedule import schedule
from fuse.runtime.size_uses.forward_numbers import UNKNOWN
from fuse.runtime.size_uses.size_reads import Unfollowed, size_conditions
from fuse.runtime.sizes.made_up_calls import call_at, graphs_of
from fuse.runtime.sizes.new_sizes import NewSizes
from fuse.runtime.sizes.varying import VaryingSize

MOST_SIDES = 2
"""Most other sides that are captured."""
MOST_COMPARISONS = 4
"""Most comparisons of a model with such sides: where there are more, steps are counted (``while t < T``)."""
LARGEST_FOLLOWED = 128
"""The largest size at which ``forward`` runs to find its comparisons."""
FURTHEST = 1024
"""The largest size that is tried."""
CHOSEN = 2, 5
"""Places of the two sizes that are taken, in the order of their distance: next to a border, other numbers are one."""


def compile_other_sides(maker: Maker, new_sizes: NewSizes, call: ModelCall, varying: Sequence[VaryingSize]) -> None:
    """Compile kernels for the other sides of ``call``, whose program was made; ``varying`` are its sizes that vary."""
    try:
        compiled = [one for calls in _made_up(maker, call, varying) for one in _begun(maker, new_sizes, calls)]
        for one in compiled:
            awaited(one)
    except FaultWarning:  # the user made warnings errors
        raise
    except Exception:  # of the user's code at made-up sizes, or a fault in fuse: such a call is compiled when it comes
        return


def _begun(maker: Maker, new_sizes: NewSizes, calls: Sequence[ModelCall]) -> list[Future[Any]]:
    """Begin to compile the kernels of the last of these calls. Those before it show which numbers follow from sizes."""
    compiled: list[Future[Any]] = []

    def begin(graph: GraphModule) -> None:
        if not graph.meta["signature"].learning:
            compiled.append(compiled_later(schedule(graph)))

    *before, last = calls
    for one in before:
        with new_sizes.planning():
            graphs_of(maker, one, each=schedule)
    with new_sizes.lowering(last):
        graphs_of(maker, last, each=begin)
    return compiled


def _made_up(maker: Maker, call: ModelCall, varying: Sequence[VaryingSize]) -> Iterator[list[ModelCall]]:
    """For each other side, calls that take it; one if an earlier call took it."""
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    several = len(set(map(id, tensors))) < len(tensors)
    if not varying or several or not all(is_dense(tensors[i]) for size in varying for (i, _), _ in size.places):
        return
    taken = {n for tensor in (*tensors, *maker.tensors()) for n in tensor.shape}
    now = tuple(size.now for size in varying)
    followed = dict(zip(varying, _followed(now, taken), strict=True))
    conditions = Conditions(of_text=False)
    formulas: dict[int, Any] = {}
    for number, (size, value) in enumerate(followed.items()):
        extent = conditions.size(f"n{number}", value)
        formulas.update((value + shift, extent + shift) for _, shift in size.places)
    at = call_at(call, tensors, followed)
    with torch.no_grad(), contextlib.suppress(Unfollowed):  # what was noted until then are comparisons, too
        size_conditions(maker.model, at.args, at.kwargs, formulas, integers_of(at.leaves), conditions, gradients=False)
    earlier = list(zip(*(size.earlier for size in varying), strict=True))
    for sizes in other_sides(conditions, now, earlier, taken):
        yield [call_at(call, tensors, dict(zip(varying, of, strict=True))) for of in sizes]


def _followed(now: Numbers, taken: set[int]) -> Numbers:
    """The sizes at which ``forward`` runs: those that it has now, or smaller ones, since a loop takes as many steps.

    >>> _followed((1024, 8, 1000), {128})
    (129, 8, 130)
    """
    return _moved(tuple(min(size, LARGEST_FOLLOWED) for size in now), (LARGEST_FOLLOWED,) * len(now), taken)


def other_sides(
    conditions: Conditions, now: Numbers, earlier: Sequence[Numbers], taken: set[int]
) -> Iterator[list[Numbers]]:
    """For each other side than sizes have ``now``, sizes that are on it: two choices, or one if ``earlier`` sizes are
    on it. Those that vary come first in the ``conditions``; ``taken`` are other numbers of the model.

    >>> conditions = Conditions()
    >>> steps, batch = conditions.size("n0", 11), conditions.size("n1", 5)
    >>> steps > 12, -steps % 64 == 0
    (False, False)
    >>> list(other_sides(conditions, (11, 5), [(99, 7)], {8}))
    [[(18, 6)], [(192, 6), (384, 7)]]
    """
    functions = {text: conditions.function(text) for text in _tests(conditions)}
    if len(functions) > MOST_COMPARISONS:
        return
    unknown = (LEAST_LOWERED,) * (len(conditions.sizes) - len(now))
    tests = {text: bool(function(*now, *unknown)) for text, function in functions.items()}

    def differs(text: str, at: Numbers) -> bool:
        return bool(functions[text](*at, *unknown)) is not tests[text]

    for text in list(tests)[:MOST_SIDES]:
        places = [
            (i, n) for i in range(len(now)) for n in range(LEAST_LOWERED, FURTHEST + 1) if n not in {*taken, *now}
        ]
        tried = [(*now[:i], n, *now[i + 1 :]) for i, n in places]
        found = [one for one in tried if differs(text, one)]
        found.sort(key=lambda one: (sum(differs(other, one) for other in tests), _distance(one, now)))
        if found:
            is_known = any(differs(text, one) for one in earlier)
            chosen = [found[min(place, len(found) - 1)] for place in CHOSEN[is_known:]]
            moved: list[Numbers] = []
            for one in chosen:
                moved.append(_moved(one, now, {*taken, *chain(*moved)}))
            yield moved


def _tests(conditions: Conditions) -> Iterator[str]:
    """The comparisons of known sizes that have two sides, as Python expressions."""
    for text in conditions.noted:
        if "(" in text and UNKNOWN not in text and "==" not in text and "!=" not in text:  # no bound of one size
            yield text
    for text, python in conditions.quotients.items():
        if text.startswith("fuse_size_remainder(") and UNKNOWN not in python:
            yield f"{python} == 0"


def _distance(one: Numbers, other: Numbers) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def _moved(one: Numbers, now: Numbers, taken: set[int]) -> Numbers:
    """Sizes of which those that are still as ``now`` are somewhat larger, and not ``taken``: all are known to vary."""
    found: list[int] = []
    for size, had in zip(one, now, strict=True):
        larger = (size + more for more in count(1) if size + more not in {*taken, *found})
        found.append(size if size != had else next(larger))
    return tuple(found)
