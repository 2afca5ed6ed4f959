"""Polynomials in named sizes: their sums, products and quotients have the values that these have."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fuse.kernel.arithmetic.polynomials import Terms, product_of, quotient_of, sum_of

SIZES = {"a": 3, "b": 7}
MONOMIALS = st.lists(st.sampled_from(sorted(SIZES)), max_size=3).map(lambda names: tuple(sorted(names)))
COEFFICIENTS = st.integers(-9, 9).filter(bool)
POLYNOMIALS = st.dictionaries(MONOMIALS, COEFFICIENTS, max_size=4).map(lambda terms: tuple(sorted(terms.items())))


def value(terms: Terms) -> int:
    return sum(c * math.prod(SIZES[name] for name in monomial) for monomial, c in terms)


def is_normal(terms: Terms) -> bool:
    return (
        list(terms) == sorted(terms)
        and max(Counter(m for m, _ in terms).values(), default=1) == 1
        and all(c for _, c in terms)
    )


@given(st.lists(POLYNOMIALS, max_size=3))
def test_sums_and_products(polynomials: list[Terms]) -> None:
    total, product = sum_of(*polynomials), product_of(*polynomials)
    assert value(total) == sum(map(value, polynomials))
    assert is_normal(total)
    assert value(product) == math.prod(map(value, polynomials))
    assert is_normal(product)


@given(POLYNOMIALS, MONOMIALS, COEFFICIENTS)
def test_a_product_divided_by_its_factor_is_the_other(terms: Terms, factors: tuple[str, ...], coefficient: int) -> None:
    divisor = ((factors, coefficient),)
    assert quotient_of(product_of(terms, divisor), divisor) == terms


@given(POLYNOMIALS, POLYNOMIALS)
def test_a_quotient_times_the_divisor_is_what_was_divided(terms: Terms, divisor: Terms) -> None:
    quotient = quotient_of(terms, divisor)
    assert quotient is None or product_of(quotient, divisor) == terms
