"""The values and the order of a graph's numbers in captured calls.

rows, columns of x   captured (50, 3), (20, 5), (61, 9)     rows from 20 to 61, columns from 3 to 9, rows > columns
(37, 4)              as before
(20, 20)             unlike before: rows were always more than columns
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from fuse.devices import HOST
from fuse.kernel.region_text import Numbers

_LESS, _EQUAL, _MORE = 1, 2, 4


@dataclass(frozen=True, eq=False)
class NumberRanges:
    """Least and largest values of numbers, and the order of each two of them.

    Attributes:
        evaluate: computes the numbers from sizes.
        least, largest: their values, one for each number.
        first, second: pairs of numbers whose ranges overlap.
        seen: for each pair, the sum of ``_LESS``, ``_EQUAL`` and ``_MORE`` for the orders that it had.
    """

    evaluate: Callable[..., Numbers]
    least: Tensor
    largest: Tensor
    first: Tensor
    second: Tensor
    seen: Tensor

    def include(self, sizes: Sequence[int]) -> bool:
        """Whether the numbers for these sizes are in their ranges, in an order that they had.

        >>> ranges = number_ranges([(20, 50, 61), (3, 5, 9)], lambda rows, columns: (rows, columns))
        >>> ranges.include((37, 4)), ranges.include((99, 4)), ranges.include((20, 9))
        (True, False, True)
        >>> number_ranges([(4, 9), (3, 8)], lambda *sizes: sizes).include((5, 6))
        False
        """
        numbers = _tensor(self.evaluate(*sizes))
        if ((numbers < self.least) | (numbers > self.largest)).any():
            return False
        signs = (numbers[self.first] - numbers[self.second]).sign() + 1
        return bool((self.seen.bitwise_right_shift(signs) & 1).all())


def number_ranges(columns: Sequence[Numbers], evaluate: Callable[..., Numbers]) -> NumberRanges:
    """The ranges and orders of numbers with these values in captured calls."""
    pairs = list(_orders(columns))
    first, second, seen = (_tensor([pair[i] for pair in pairs]) for i in range(3))
    return NumberRanges(
        evaluate, _tensor(list(map(min, columns))), _tensor(list(map(max, columns))), first, second, seen
    )


def _tensor(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=HOST)


def _orders(columns: Sequence[Numbers]) -> Iterator[tuple[int, int, int]]:
    """Pairs of columns whose ranges overlap, with their orders."""
    for (one, a), (other, b) in combinations(enumerate(columns), 2):
        if max(a) >= min(b) and max(b) >= min(a):
            orders = {_LESS if m < n else _MORE if m > n else _EQUAL for m, n in zip(a, b, strict=True)}
            yield one, other, sum(orders)
