"""Polynomials in named sizes with integer coefficients, as tuples of (monomial, coefficient).

64 * rows + 3    ((), 3), (("rows",), 64)
"""

from __future__ import annotations

Monomial = tuple[str, ...]
"""Names of the factors, sorted; empty for the constant term."""
Terms = tuple[tuple[Monomial, int], ...]
"""A polynomial: sorted monomials with their non-zero coefficients."""


def sum_of(*polynomials: Terms) -> Terms:
    """The sum of polynomials.

    >>> sum_of(((("n",), 1), ((), 3)), ((("n",), 2), ((), -3)))
    ((('n',), 3),)
    """
    total: dict[Monomial, int] = {}
    for terms in polynomials:
        for monomial, coefficient in terms:
            total[monomial] = total.get(monomial, 0) + coefficient
    return tuple(sorted(item for item in total.items() if item[1]))


def product_of(*polynomials: Terms) -> Terms:
    """The product of polynomials.

    >>> product_of(((("n",), 1), ((), 3)), ((("n",), 2),))
    ((('n',), 6), (('n', 'n'), 2))
    """
    product: dict[Monomial, int] = {(): 1}
    for terms in polynomials:
        so_far, product = product, {}
        for one, a in so_far.items():
            for two, b in terms:
                monomial = tuple(sorted(one + two))
                product[monomial] = product.get(monomial, 0) + a * b
    return tuple(sorted(item for item in product.items() if item[1]))


def quotient_of(terms: Terms, divisor: Terms) -> Terms | None:
    """``terms / divisor`` if the divisor is one monomial that divides every monomial of ``terms``, else None.

    >>> quotient_of(((("m", "n"), 6), (("n",), 4)), ((("n",), 2),)), quotient_of(((("m",), 6),), ((("n",), 2),))
    ((((), 2), (('m',), 3)), None)
    """
    if len(divisor) != 1:
        return None
    ((factors, coefficient),) = divisor
    found: list[tuple[Monomial, int]] = []
    for monomial, c in terms:
        left = list(monomial)
        for factor in factors:
            if factor not in left:
                return None
            left.remove(factor)
        if c % coefficient:
            return None
        found.append((tuple(left), c // coefficient))
    return tuple(sorted(found))
