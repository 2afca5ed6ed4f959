"""Count the launches of a real eager call, by the same table as the predicted count.

with CountingMode() as counting:
    model(x)
counting.launches, counting.by_kind
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fuse import ops


class CountingMode(TorchDispatchMode):
    """Counts the operators dispatched while it is active, below autograd: those sent to the device.

    Composite operators that reach it undecomposed (as in inference mode) are decomposed first, as autograd would do, so
    that the count does not depend on the mode.

    >>> import torch
    >>> with CountingMode() as counting:
    ...     _ = torch.ones(4).t().tanh()
    >>> counting.launches, dict(counting.by_kind)
    (2, {'movement': 1, 'pointwise': 1})
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.by_kind: Counter[ops.Kind] = Counter()
        self.unknown: set[str] = set()

    @property
    def launches(self) -> int:
        """All launches seen so far."""
        return self.by_kind.total()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            if ops.is_composite(func):
                with self:  # the kernel that autograd would call; `func.decompose` may prefer one in Python
                    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
            self._count(func)
        return func(*args, **kwargs)

    def _count(self, op: OpOverload) -> None:
        facts = ops.info(op)
        if facts is None:
            self.unknown.add(str(op))
            self.by_kind["other"] += 1
        elif facts.launches:
            self.by_kind[facts.kind] += facts.launches
