"""Sizes that are known in the call only: arithmetic, decisions, and what is noted of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuse.kernel.arithmetic.extents import (
    Conditions,
    Extent,
    NeedsNumber,
    alike,
    always_equal,
    estimate,
    is_multiple,
    is_one,
    larger,
    pinned,
    smaller,
    terms_of,
    unless_below,
    varies,
)
from fuse.kernel.cpu.cpp_types import literal

Formula = Callable[[int, int], int]
SIZES = st.integers(1, 40)


def formulas() -> st.SearchStrategy[Formula]:
    """Numbers computed from two sizes, as kernels compute theirs."""
    leaves = st.one_of(
        st.just(lambda a, b: a),
        st.just(lambda a, b: b),
        st.integers(-3, 70).map(lambda number: lambda a, b: number),
    )
    pairs = (
        lambda f, g: lambda a, b: f(a, b) + g(a, b),
        lambda f, g: lambda a, b: f(a, b) - g(a, b),
        lambda f, g: lambda a, b: f(a, b) * g(a, b),
        lambda f, g: lambda a, b: f(a, b) // (abs(g(a, b)) + 1),
        lambda f, g: lambda a, b: f(a, b) % (abs(g(a, b)) + 1),
        lambda f, g: lambda a, b: -(-f(a, b) // 16) * 16 if f(a, b) > g(a, b) else g(a, b) - 1,
        lambda f, g: lambda a, b: smaller(f(a, b), g(a, b)),
        lambda f, g: lambda a, b: larger(f(a, b), g(a, b)),
        lambda f, g: lambda a, b: unless_below(f(a, b), 20, 1, g(a, b)),
        lambda f, g: lambda a, b: pinned(f(a, b)) if f(a, b) == g(a, b) else f(a, b),
    )
    return st.recursive(
        leaves,
        lambda inner: st.builds(lambda pair, f, g: pair(f, g), st.sampled_from(pairs), inner, inner),
        max_leaves=6,
    )


@given(formulas(), SIZES, SIZES, SIZES, SIZES)
def test_a_number_computed_from_sizes_is_right_for_all_sizes_that_meet_the_conditions(
    formula: Formula, a: int, b: int, other_a: int, other_b: int
) -> None:
    conditions = Conditions()
    number = formula(conditions.size("a", a), conditions.size("b", b))
    assert int.__int__(number) == formula(a, b)
    if conditions.met()(other_a, other_b):
        assert conditions.value(number, (other_a, other_b)) == formula(other_a, other_b)


@given(formulas(), SIZES, SIZES)
def test_the_conditions_hold_for_the_sizes_that_they_were_noted_for(formula: Formula, a: int, b: int) -> None:
    conditions = Conditions()
    formula(conditions.size("a", a), conditions.size("b", b))
    assert conditions.met()(a, b)


def test_text_is_a_polynomial_in_the_sizes() -> None:
    conditions = Conditions()
    rows, columns = conditions.size("rows", 5), conditions.size("columns", 7)
    assert f"{rows * columns * 4 - 1}" == "(4 * columns * rows - 1)"
    assert str(rows // 2) == "fuse_size_quotient(rows, 2)"
    assert str(rows * 64 // 64) == "rows"
    assert rows - rows == 0
    assert not varies(rows - rows)


def test_what_follows_for_all_sizes_is_not_noted() -> None:
    conditions = Conditions()
    rows = conditions.size("rows", 5)
    assert rows * 64 > 63
    assert rows * 64 >= 64
    assert not rows - 1 < 0
    assert rows != 0
    assert rows * 3 % 3 == 0
    assert rows == conditions.size("rows", 5)
    assert list(conditions.noted) == ["rows >= 1"]


def test_costs_are_estimated_without_a_note() -> None:
    conditions = Conditions()
    rows = conditions.size("rows", 5, usual=8)
    assert estimate(rows * 2 + 1) == 17
    assert is_multiple(rows * 8, 4)
    assert not is_multiple(rows, 4)
    assert list(conditions.noted) == ["rows >= 1"]


def test_a_use_of_the_number_itself_pins_it() -> None:
    conditions = Conditions()
    rows = conditions.size("rows", 5)
    assert (rows / 2, float(rows), int(rows), f"{rows:03d}") == (2.5, 5.0, 5, "005")
    assert conditions.met()(5)
    assert not conditions.met()(6)


def test_sets_and_dictionaries_compare_extents() -> None:
    conditions = Conditions()
    rows, columns = conditions.size("rows", 5), conditions.size("columns", 5)
    assert len({(rows, 64), (columns, 64)}) == 1
    assert not conditions.met()(5, 6)


def test_bits_of_a_size_have_no_text() -> None:
    with pytest.raises(NeedsNumber):
        Conditions().size("rows", 5) >> 1


def test_a_number_without_sizes_is_a_plain_one() -> None:
    rows = Conditions().size("rows", 5)
    assert type(rows - rows + 3) is int
    assert type(rows * 1) is Extent


def test_a_size_is_taken_for_no_one_and_that_is_not_noted() -> None:
    conditions = Conditions()
    rows = conditions.size("rows", 1)
    assert not is_one(rows)
    assert not alike((1, 64), (rows, 64))
    assert not is_multiple(1, rows)
    assert not is_multiple(8, rows * 8)
    assert is_multiple(rows * 8, 8)
    assert not always_equal(rows * 64, 64)
    assert list(conditions.noted) == ["rows >= 1"]


def test_a_number_that_is_no_size_is_written_or_pinned() -> None:
    conditions = Conditions()
    mean = conditions.real("r", 0.25)
    assert literal(mean, torch.float32) == "float(r)"
    assert literal(mean, torch.float64) == "double(r)"
    assert conditions.noted == {}
    for use in (float, str, bool, int, lambda x: x + 1, lambda x: 1 / x, lambda x: x == 3, lambda x: x > 0, abs):
        conditions.noted.clear()
        use(mean)
        assert conditions.noted == {"r == 0.25": True}
    assert conditions.met()(0.25)
    assert not conditions.met()(0.5)


def test_a_minimum_of_minima_is_written_in_the_length_of_its_parts() -> None:
    conditions = Conditions()
    size = found = conditions.size("n", 9)
    for number in range(16):
        found = smaller(found, 2 * size + number)
    assert len(conditions.python(terms_of(found))) < 2_000
    assert conditions.value(found, (5,)) == 5
