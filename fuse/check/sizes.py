"""Estimate the size of the terms that are summed into each element of a result: it bounds the effect of rounding.

    y = a - b        a and b near 1000, y near 0.001        size 1000: last places are those of the terms, not of y

The call runs a few times. Each run moves the arguments and every operator's result by some units of the last place, up
or down at random (stochastic arithmetic: Vignes, "A stochastic arithmetic for reliable scientific computation", 1993).
The size of an element is the distance that it moves, in such units, plus its magnitude. A gradient that is zero because
its terms cancel has the size of these terms. So has an element just below zero that ``relu`` cuts off, because rounding
may lift it above zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fuse import ops

RUNS = 8
"""With four runs, one element in a million moves a thirtieth as far as its neighbours: its limit is too tight."""

MIRRORED = 4
"""Runs repeated with opposite moves, so that one of the two takes an element across a kink."""

ALL, FEW = RUNS + MIRRORED, 2
"""Further runs only raise sizes: the first two show for most calls that errors are rounding, in a sixth of the time."""

UNITS = 8.0
"""Units of the last place of one move: half of the tolerance, so that runs reach kinks within the tolerance."""


class Jittered(TorchDispatchMode):
    """Moves all floats that operators compute by ``step`` of their value, up or down; ``-step``: the opposite way."""

    def __init__(self, step: float, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.step = step
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if ops.mutates(op):
            self.move(_written(op, args, kwargs))
        if not ops.is_view(op):  # a batch norm writes its statistics, and returns results besides
            given = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
            self.move(one for one in _tensors(result) if one.untyped_storage()._cdata not in given)
        return result

    def move(self, tensors: Iterable[Tensor]) -> None:
        """Move the elements of floating-point tensors in place, unseen by other modes (one may replay draws)."""
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel() and not _repeats(tensor):
                with _disable_current_modes(), torch.no_grad():
                    signs = torch.empty(tensor.shape, dtype=tensor.dtype).bernoulli_(0.5, generator=self.generator)
                    tensor.mul_(signs.mul_(2).sub_(1).mul_(self.step).add_(1).to(tensor.device))


def sizes(
    run: Callable[[Jittered], Sequence[Tensor | None]], exact: Sequence[Tensor | None], unit: float, runs: int = ALL
) -> list[Any]:
    """The sizes of the elements of ``exact``, a call's results in float64; None for a result without floats.

    ``run(mode)`` repeats the call within ``mode``, on arguments that ``mode.move`` has moved. After fewer ``runs`` than
    all, sizes are at most what they would be after all.

    >>> x = torch.tensor([1000.0, 1.0], dtype=torch.float64)
    >>> def run(mode):
    ...     given = x.clone()
    ...     mode.move([given])
    ...     with mode:
    ...         return [given.sum() - 1000.5]
    >>> (size,) = sizes(run, [x.sum() - 1000.5], 1e-7)
    >>> 500 < size < 4000
    tensor(True)
    """
    moved = [torch.zeros(one.shape, dtype=torch.float64) if is_real(one) else None for one in exact]  # type: ignore[union-attr]  # told by is_real
    step = unit * UNITS
    moves = [*((step, seed) for seed in range(RUNS)), *((-step, seed) for seed in range(MIRRORED))]
    for move, seed in moves[:runs]:
        for total, was, now in zip(moved, exact, run(Jittered(move, seed)), strict=True):
            if total is not None and was is not None and now is not None and now.shape == was.shape:
                distance = (now.detach().double() - was.detach().double()).abs().nan_to_num(0.0, 0.0, 0.0)
                total.add_(distance.square())
    return [
        None if total is None or was is None else total.div_(ALL).sqrt_().div_(step).add_(_magnitude(was))
        for total, was in zip(moved, exact, strict=True)
    ]


def _magnitude(tensor: Tensor) -> Tensor:
    return tensor.detach().double().abs().nan_to_num(0.0, 0.0, 0.0)


def is_real(value: Any) -> bool:
    """Whether a value is a tensor of a real floating-point dtype."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _repeats(tensor: Tensor) -> bool:
    """Whether the tensor is expanded, so that elements share memory."""
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, Tensor) and one.layout == torch.strided]


def _written(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that ``op`` writes to."""
    if torch.Tag.inplace_view in op.tags:
        return []
    arguments = op._schema.arguments
    given = {**dict(zip([one.name for one in arguments], args, strict=False)), **kwargs}
    names = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return [tensor for name in names for tensor in _tensors(given.get(name))]
