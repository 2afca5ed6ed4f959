"""Lower loops: ask the target of their device for a kernel that runs all steps.

loop(h0, xs, w)        ->  one kernel for all steps
before, loop, after    ->  one kernel, where a loop and its ends are one node
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.fx import GraphModule

from fuse.graph.loop import Loop
from fuse.graph.loop_with_ends import LoopWithEnds
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.lower import target_for, tensors_of
from fuse.kernel.target import LoopKernels


def lower_loop(
    loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor], made: LoopKernels | None = None
) -> Kernel | Declined:
    """The kernel that runs all steps of ``loop``, or the reason why there is none.

    Args:
        loop: its body is a captured graph of one step.
        operands: the tensors that ``loop`` is called with; only shapes, strides, dtypes and devices are read.
        results: tensors like those that the caller allocates: last states, then collected outputs.
        made: kernels of other loops, by what they compute. One that computes the same serves this loop too, as for the
            layers and directions of one network; otherwise the new kernel is added.

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
    target = target_for(tensors_of(whole.body))
    return target if isinstance(target, Declined) else target.write_with_ends(whole, made)


def lower_end(region: GraphModule) -> Kernel | Declined:
    """The kernel of a region before or after a loop: for one thread, with some strides as arguments.

    Strides of an input from its first gap in memory on are passed in each call, because they grow with the number of
    steps where the batch dimension comes before time.
    """
    target = target_for(tensors_of(region))
    return target if isinstance(target, Declined) else target.write_end(region)
