"""The values and the order of a graph's numbers in captured calls.

rows, columns of x   captured (50, 3), (20, 5), (61, 9)     rows from 20 to 61, columns from 3 to 9, rows > columns
(37, 4)              as before
(20, 20)             unlike before: rows were always more than columns
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from fuse.kernel.sizes.region_text import Numbers

_LESS, _EQUAL, _MORE = 1, 2, 4


@dataclass(frozen=True, eq=False)
class NumberRanges:
    """Least and largest values of numbers, and the order of each two of them.

    Attributes:
        evaluate: computes the numbers from sizes.
        bounds: the least and the largest value of each number.
        orders: pairs of numbers whose ranges overlap, and the sum of ``_LESS``, ``_EQUAL`` and ``_MORE`` for the orders
            that they had; without pairs that were in both orders.
    """

    evaluate: Callable[..., Numbers]
    bounds: tuple[tuple[int, int], ...]
    orders: tuple[tuple[int, int, int], ...]

    def include(self, sizes: Sequence[int]) -> bool:
        """Whether the numbers for these sizes are in their ranges, in an order that they had.

        >>> ranges = number_ranges([(20, 50, 61), (3, 5, 9)], lambda rows, columns: (rows, columns))
        >>> ranges.include((37, 4)), ranges.include((99, 4)), ranges.include((20, 9))
        (True, False, True)
        >>> number_ranges([(4, 9), (3, 8)], lambda *sizes: sizes).include((5, 6))
        False
        """
        numbers = self.evaluate(*sizes)
        inside = all(least <= n <= largest for n, (least, largest) in zip(numbers, self.bounds, strict=True))
        return inside and self._are_ordered(numbers)

    def include_orders(self, sizes: Sequence[int]) -> bool:
        """Whether the numbers for these sizes are in an order that they had, in their ranges or not."""
        return self._are_ordered(self.evaluate(*sizes))

    def _are_ordered(self, numbers: Numbers) -> bool:
        pairs = ((numbers[one], numbers[other], seen) for one, other, seen in self.orders)
        return all(seen & (_LESS if m < n else _MORE if m > n else _EQUAL) for m, n, seen in pairs)


def number_ranges(columns: Sequence[Numbers], evaluate: Callable[..., Numbers]) -> NumberRanges:
    """The ranges and orders of numbers with these values in captured calls."""
    return NumberRanges(evaluate, tuple((min(column), max(column)) for column in columns), tuple(_orders(columns)))


def _orders(columns: Sequence[Numbers]) -> Iterator[tuple[int, int, int]]:
    """Pairs of columns whose ranges overlap, with their orders, unless they were in both.

    Such numbers may be equal, too: nothing has depended on which is larger, and code for different numbers is right for
    equal ones.
    """
    for (one, a), (other, b) in combinations(enumerate(columns), 2):
        if max(a) >= min(b) and max(b) >= min(a):
            orders = {_LESS if m < n else _MORE if m > n else _EQUAL for m, n in zip(a, b, strict=True)}
            if not orders >= {_LESS, _MORE}:
                yield one, other, sum(orders)
