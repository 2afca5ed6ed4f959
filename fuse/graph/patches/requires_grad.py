"""``requires_grad_`` of tensors that the caller holds, in ``forward``.

    def forward(self, positions):                 compiled call:  positions.requires_grad_(), then the program
        positions.requires_grad_()                                of calls whose positions need gradients already
        energy = self.net(positions)

A graph cannot set this flag. If ``forward`` begins by setting the flag of an argument, the runtime sets it before the
call instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.errors import CaptureError
from fuse.graph.signature import Dispatch


class RequiresGradOfArguments(CaptureError):
    """``forward`` begins with ``requires_grad_`` of arguments: the leaves of the call at these ``positions``."""

    def __init__(self, positions: Sequence[int]) -> None:
        super().__init__(
            "forward sets requires_grad of arguments, which a graph cannot hold: give it tensors that have it"
        )
        self.positions = tuple(positions)


def switched(adopted: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The fake tensors of (real, fake) pairs whose ``requires_grad`` is no longer that of the real one."""
    return [
        fake for real, fake in adopted if fake is not real and fake.is_leaf and fake.requires_grad != real.requires_grad
    ]


def needed_at_first(fake: Tensor, dispatches: Sequence[Dispatch]) -> bool:
    """Whether the first operator that reads ``fake`` has a result that needs gradients."""
    for dispatch in dispatches:
        operands = pytree.tree_leaves((dispatch.args, dict(dispatch.kwargs)))
        if any(operand is fake for operand in operands):
            results = pytree.tree_leaves(dispatch.result)
            return any(isinstance(result, Tensor) and result.requires_grad for result in results)
    return False
