"""Numbers of a graph that are quotients or remainders of a size: windows of a length, and the padding to whole ones.

    length   52  68  102  30
    windows   7   9   13   4       (length + s) // 8, with s from 4 to 9
                                   at 100: 13, whatever s is
                                   at 105: 13 or 14, not known yet

A few values do not tell a quotient: several divisors and shifts may give them. All of these are kept, and a size is
served only if they agree on it. A further captured call leaves fewer of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

LARGEST_DIVISOR = 1024
"""The largest divisor that is tried."""
MOST_CHOICES = 256
"""Most formulas that may give one number: with more, further calls are captured."""


def quotients_through(column: Sequence[int], sizes: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Python expressions in named sizes that may give a number, from their values in several calls.

    Of shifts, only the least and the largest are given: all numbers are between theirs. Empty if there are too many
    formulas, or none.

    >>> quotients_through((7, 9, 13, 4), {"n0": (52, 68, 102, 30)})
    ('(1*((n0+4)//8))', '(1*((n0+9)//8))')
    >>> quotients_through((4, 4, 2), {"n0": (20, 52, 50), "n1": (5, 5, 8)})
    ('((0+1*n0)%8)', '((0+1*n0)%16)', '((16+1*n0)%32)', '((4+1*n1)%5)')
    >>> quotients_through((5, 9, 2), {"n0": (52, 68, 102)})
    ()
    """
    if min(column) < 0:
        return ()
    found = [text for name, of in sizes.items() for text in (*_quotients(column, name, of), *_rests(column, name, of))]
    return tuple(found) if len(found) <= MOST_CHOICES else ()


def _quotients(column: Sequence[int], name: str, sizes: Sequence[int]) -> Iterator[str]:
    """Quotients, and multiples of quotients."""
    common = math.gcd(*column)
    for factor in range(1, min(common, LARGEST_DIVISOR) + 1):
        if common % factor:
            continue
        for divisor in range(2, min(max(sizes), LARGEST_DIVISOR) + 1):
            starts = [divisor * (number // factor) - size for number, size in zip(column, sizes, strict=True)]
            if max(starts) < min(starts) + divisor:
                for shift in sorted({max(starts), min(starts) + divisor - 1}):
                    yield f"({factor}*(({name}+{shift})//{divisor}))"


def _rests(column: Sequence[int], name: str, sizes: Sequence[int]) -> Iterator[str]:
    """Remainders of a size, and of a constant less a size."""
    for sign in (1, -1):
        apart = [number - sign * size for number, size in zip(column, sizes, strict=True)]
        common = math.gcd(*(one - apart[0] for one in apart))
        for divisor in range(max(column) + 1, min(common, LARGEST_DIVISOR) + 1):
            if common % divisor == 0:
                shift = apart[0] % divisor
                yield f"(({shift}+{sign}*{name})%{divisor})"
