"""Let two runs of a model in different dtypes draw the same random numbers.

    run in float32, recorded     bernoulli_ -> m0    randn_like -> n1
    run in float64, replayed     bernoulli_ <- m0    randn_like <- n1

For another dtype, a generator gives other numbers: without replay, dropout in float64 would drop other elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fuse import ops
from fuse.errors import FuseError

DRAWS = frozenset(
    (
        "bernoulli", "bernoulli_", "exponential_", "multinomial", "normal_", "rand", "rand_like", "randint",
        "randint_like", "randn", "randn_like", "random_", "randperm", "uniform_",
    )
)  # fmt: skip
"""Random operators whose draws hold in any dtype: they depend on shapes and numbers, or pick from a few values."""


class RecordedDraws(TorchDispatchMode):
    """Records the draws of random operators, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.found: list[tuple[str, Tensor | None]] = []

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        if ops.is_random(op):
            drawn = _name(op) in DRAWS and isinstance(result, Tensor)
            self.found.append((_name(op), result.detach().clone() if drawn else None))
        return result


class Replayed(TorchDispatchMode):
    """Gives random operators their recorded draws."""

    def __init__(self, recorded: RecordedDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.left = iter(recorded.found)

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        if ops.is_random(op):
            name, drawn = next(self.left, ("", None))
            if drawn is None or name != _name(op) or drawn.shape != result.shape:
                raise FuseError(f"{op} draws other numbers than in eager mode")
            with torch.no_grad():
                result.copy_(drawn)
        return result


def _name(op: OpOverload) -> str:
    return str(op._schema.name.split("::")[1])
