"""Sizes with other remainders: made-up calls, before the first kernels for all sizes are made.

    x [73, 77]     padded by (1, 1) after a pool      captured for these sizes
    x [29, 57]     padded by (1, 1)                   with these two calls alone, a kernel would always pad by one
    x [34, 70]     made up: padded by (0, 0)          the widths of the padding vary

Where a model divides sizes, halves and paddings depend on whether a size is even. Made-up calls in which sizes have the
opposite of their last five bits show which numbers vary. They are planned, and nothing is compiled for them; their
graphs count among those of their kind of calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.fx import GraphModule

from fuse.errors import FaultWarning
from fuse.graph.strides import is_dense
from fuse.kernel.independent_sizes import divided_sizes
from fuse.runtime.generalising.kinds_of_calls import KindOfCalls
from fuse.runtime.making import Maker, ModelCall
from fuse.runtime.programs.refusals import without_kernels
from fuse.runtime.programs.schedule import schedule
from fuse.runtime.sizes.made_up_calls import call_at
from fuse.runtime.sizes.new_sizes import NewSizes
from fuse.runtime.sizes.reaching import captured_without_data
from fuse.runtime.sizes.varying import VaryingSize

BITS = 31
"""The bits of a size that are another in a made-up call: five halves one after another."""
FURTHEST = 512
"""The largest size of a call for which others are made up."""


def plan_other_remainders(
    maker: Maker, new_sizes: NewSizes, call: ModelCall, kind: KindOfCalls | None, varying: Sequence[VaryingSize]
) -> None:
    """Plan calls like ``call`` with other remainders if its ``kind`` divides sizes; ``varying`` are its sizes that
    vary."""
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    dense = all(is_dense(tensors[i]) for size in varying for (i, _), _ in size.places)
    if kind is None or not varying or not dense or len(set(map(id, tensors))) < len(tensors):
        return
    if max(size.now for size in varying) > FURTHEST or not any(map(divides, kind.graphs())):
        return

    def each(graph: GraphModule) -> None:
        if without_kernels(graph) is None:
            schedule(graph)

    new_sizes.keep_what_varies()
    try:
        for sizes in other_remainders(varying):
            with new_sizes.planning():
                other = call_at(call, tensors, dict(zip(varying, sizes, strict=True)))
                captured = captured_without_data(maker, other, kind, kind.learning(), each)
            if captured is not None:
                kind.add(captured, ())
    except FaultWarning:  # the user made warnings errors
        raise
    except Exception:  # of the user's code at made-up sizes, or a fault in fuse: kernels are made from what was called
        return


def divides(graph: GraphModule) -> bool:
    """Whether operators of a graph, its regions included, divide sizes."""
    return any(isinstance(part, GraphModule) and divided_sizes(part) for part in graph.modules())


def other_remainders(varying: Sequence[VaryingSize]) -> list[list[int]]:
    """Two choices of sizes. In one, the last bits of each size are the opposite of what they are; in the other, those
    of the size less one, since some operators round up. No size is another one of a call.

    >>> other_remainders([VaryingSize(29, (73,), ()), VaryingSize(57, (77,), ())])
    [[34, 70], [36, 72]]
    """
    apart = {n for size in varying for n in (size.now, *size.earlier)}
    found: list[list[int]] = []
    for less in (0, 1):
        found.append([])
        for size in varying:
            made = ((size.now - less) ^ BITS) + BITS + 1 + less
            while made in apart or made - size.now in {
                new - old.now for new, old in zip(found[-1], varying, strict=False)
            }:
                made += BITS + 1
            found[-1].append(made)
            apart.add(made)
    return found
