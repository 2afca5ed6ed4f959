"""Lower loops: ask the target of their device for a kernel that runs all steps.

loop(h0, xs, w)        ->  one kernel for all steps
before, loop, after    ->  one kernel, where a loop and its ends are one node
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.fx import GraphModule

from fuse.graph.loop import Loop
from fuse.graph.loop_ends import LoopWithEnds
from fuse.kernel.lower import Declined, Kernel, target_for, tensors_of
from fuse.kernel.target import LoopKernels


def lower_loop(
    loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor], made: LoopKernels | None = None
) -> Kernel | Declined:
    """The kernel that runs all steps of ``loop``, or the reason why there is none.

    Args:
        loop: its body is a captured graph of one step.
        operands: as ``loop`` is called; only shapes, strides, dtypes and devices are read.
        results: as the caller allocates them: last states, then what is collected, with their strides.
        made: the kernels of other loops, of which one serves this loop too if it computes the same; the new one is
            added. (Layers and directions of one network differ in names and lines only.)

    Returns:
        A kernel whose arguments are pointers to the operands, the results, ``workspace_bytes`` of memory, and its
        ``sizes``. Its source is the same for any trip count.

    >>> import torch
    >>> from fuse.graph.capture import capture
    >>> from fuse.graph.loop import LoopSpec
    >>> class Step(torch.nn.Module):
    ...     def forward(self, h, w):
    ...         return torch.tanh(h @ w)
    >>> h, w = torch.zeros(2, 16), torch.zeros(16, 16)
    >>> loop = Loop(capture(Step(), (h, w)), LoopSpec(trip_count=9, carries=1, step_inputs=(), collected=0))
    >>> kernel = lower_loop(loop, [h, w], [h])
    >>> kernel.parallel, kernel.source.count("fuse_tanh")
    (False, 1)
    >>> kernel.sizes
    (('steps', 9),)
    """
    target = target_for((*operands, *results))
    return target if isinstance(target, Declined) else target.write_loop(loop, operands, results, made)


def lower_with_ends(whole: LoopWithEnds, made: LoopKernels | None = None) -> Kernel | Declined:
    """The kernel of a loop and its ends, or the reason why there is none.

    Only shapes, strides, dtypes and devices of its values are read; ``made`` and the result are as for
    :func:`lower_loop`.
    """
    target = target_for(tensors_of(whole.whole))
    return target if isinstance(target, Declined) else target.write_with_ends(whole, made)


def lower_end(region: GraphModule) -> Kernel | Declined:
    """The kernel of a region in front of a loop or behind it: like that of any region, but for one thread.

    Strides beyond the first gap of an input are told in the call: with the batch in front of time, they grow with the
    number of steps.
    """
    target = target_for(tensors_of(region))
    return target if isinstance(target, Declined) else target.write_end(region)
