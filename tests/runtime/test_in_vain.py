"""Calls that cannot be captured, of sizes and numbers that keep changing, are captured more and more rarely."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.runtime import known_variants
from fuse.runtime.variants.in_vain import LARGEST_ALIKE_OF_SIZES, LEAST_WAIT


class Odd(nn.Module):
    """A model that cannot be captured while ``odd``."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = True
        self.seen: deque[Tensor] = deque(maxlen=1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if self.odd:
            self.seen.append(x)
        return torch.tanh(x) * scale


SIZES: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "sizes": lambda i: (torch.randn(2 + i, 3),),
    "integers": lambda i: (torch.randn(2, 3), i),
    "numbers": lambda i: (torch.randn(2, 3), i / 7),
}


def made(calls: Callable[[], None]) -> int:
    """The number of captures during ``calls``."""
    with mock.patch.object(known_variants, "make", wraps=known_variants.make) as making:
        calls()
    return making.call_count


@pytest.mark.filterwarnings("ignore:Odd r")
@pytest.mark.parametrize("which", SIZES)
def test_captures_that_fail_at_each_size_become_rare(which: str) -> None:
    model = Odd()
    fused, of = fuse.compile(model), SIZES[which]

    def calls(numbers: range) -> None:
        for i in numbers:
            args = of(i)
            torch.testing.assert_close(fused(*args), torch.tanh(args[0]) * (args[1] if len(args) > 1 else 1))

    first = LARGEST_ALIKE_OF_SIZES
    assert made(lambda: calls(range(first))) == first
    assert made(lambda: calls(range(first, first + LEAST_WAIT))) == 0
    assert made(lambda: calls(range(first + LEAST_WAIT, 200))) <= 2
    model.odd = False
    with torch.no_grad():
        for i in range(200, 1200):
            fused(*of(i % 7 if which == "sizes" else i))
            assert fused.last_run is not None
            if not fused.last_run.fallbacks:
                return
    raise AssertionError("never captured again")


def test_sizes_that_fill_a_cache_once_are_captured() -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if len(x) not in self.made:
                self.made[len(x)] = torch.arange(float(len(x)))
            return torch.tanh(x) + self.made[len(x)]

    fused = fuse.compile(Filled())
    for size in (2, 3, 4, 5, 6, 7):
        for call in range(3):
            x = torch.randn(size)
            torch.testing.assert_close(fused(x), torch.tanh(x) + torch.arange(float(size)))
            assert fused.last_run is not None
            assert (fused.last_run.launches > 0) == (call > 0)
