"""Affine index arithmetic against the plain arithmetic of numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.index import ZERO, Affine, Index, NotAffine, Size, SplitNeeded, offset, reshape


def value_of(index: Affine, at: dict[str, int]) -> int:
    return index.constant + sum(coefficient * at[atom] for atom, coefficient in index.terms)


affines = st.builds(
    lambda terms, constant: sum((Affine.of(a) * c for a, c in terms.items()), Affine((), constant)),
    st.dictionaries(st.sampled_from("ijk"), st.integers(-9, 9), max_size=3),
    st.integers(-20, 20),
)
points = st.fixed_dictionaries({atom: st.integers(0, 50) for atom in "ijk"})


@given(affines, affines, st.integers(-5, 5), points)
def test_sums_and_multiples_are_those_of_the_values(a: Affine, b: Affine, factor: int, at: dict[str, int]) -> None:
    assert value_of(a + b, at) == value_of(a, at) + value_of(b, at)
    assert value_of(a * factor + 3, at) == value_of(a, at) * factor + 3
    assert value_of(a, at) == eval(str(a), {}, dict(at))


@given(affines, affines, affines, st.integers(-5, 5), points)
def test_a_size_is_a_factor_that_only_the_call_knows(
    a: Affine, b: Affine, c: Affine, factor: int, at: dict[str, int]
) -> None:
    total = (a + b.times(Size("s", 7)) + c.times(Size("s", 7))) * factor
    names = at | {"s": 7}
    expected = (value_of(a, at) + 7 * value_of(b, at) + 7 * value_of(c, at)) * factor
    assert eval(str(total), {}, names) == expected
    whole = eval(str(total.start()), {}, names) + sum(at[i] * eval(str(total.step(i)), {}, names) for i in "ijk")
    assert whole == expected
    assert eval(str(total.without("i")), {}, names) == eval(str(total), {}, names | {"i": 0})
    assert set(total.without("i").atoms()) == set(total.atoms()) - {"i"}


def test_sizes_of_one_name_are_equal_whatever_their_values() -> None:
    i = Affine.of("i")
    assert i.times(Size("s", 7)) == i.times(Size("s", 8))
    assert i.times(Size("s", 7)) != i.times(Size("r", 7))
    assert offset((i, i), (Size("s", 7), 1)) + offset((i, i), (Size("s", 7), 1)) * -1 == ZERO


@given(affines)
def test_equal_expressions_are_equal_objects(a: Affine) -> None:
    assert a + a * -1 == ZERO
    assert a + a == a * 2


def _reshaped(
    index: Index, shape: Sequence[int], target: Sequence[int], extents: Mapping[str, int]
) -> tuple[Index | None, SplitNeeded | None]:
    try:
        return reshape(index, shape, target, extents), None
    except SplitNeeded as need:
        return None, need
    except NotAffine:
        return None, None


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_a_reshape_finds_the_same_element_or_says_which_loop_to_split(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    divisor = data.draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
    target = (divisor, count // divisor)
    extents = {f"i{d}": extent for d, extent in enumerate(shape)}
    index = tuple(Affine.of(atom) for atom in extents)
    found, need = _reshaped(index, shape, target, extents)
    if need is not None:
        assert need.atom in extents
        assert extents[need.atom] % need.inner == 0
        assert 1 < need.inner < extents[need.atom]
    if found is None:
        return
    for position, point in enumerate(itertools.product(*(range(extent) for extent in shape))):
        at = dict(zip(extents, point, strict=True))
        assert tuple(value_of(i, at) for i in found) == divmod(position, target[1])


def test_an_extent_of_one_has_only_one_place() -> None:
    i, k = Affine.of("i"), Affine.of("k")
    assert reshape((i, k + -1), (4, 1), (4,), {"i": 4, "k": 2}) == (i,)


def test_dimensions_that_stay_may_be_read_outside() -> None:
    i, j = Affine.of("i"), Affine.of("j")
    assert reshape((i, j + -2), (2, 9), (2, 1, 9), {"i": 2, "j": 13}) == (i, ZERO, j + -2)
    assert reshape((i, ZERO, j + -2), (6, 1, 9), (2, 3, 9), {"i": 2, "j": 13}) == (ZERO, i, j + -2)


def test_what_is_left_for_the_outermost_dimension_may_be_read_outside() -> None:
    i, j, k = (Affine.of(atom) for atom in "ijk")
    assert reshape((i, j + -2), (4, 9), (36,), {"i": 4, "j": 13}) == (i * 9 + j + -2,)
    assert reshape((i, j + -2, k), (4, 9, 8), (36, 8), {"i": 4, "j": 13, "k": 8}) == (i * 9 + j + -2, k)


def test_a_reshape_across_common_factors_only_is_refused() -> None:
    with pytest.raises(NotAffine, match="fits no loop order"):
        reshape((Affine.of("i"), Affine.of("j")), (2, 3), (3, 2), {"i": 2, "j": 3})


def test_offsets_follow_strides() -> None:
    i, j = Affine.of("i"), Affine.of("j")
    assert str(offset((i, j + 2), (10, 3))) == "10 * i + 3 * j + 6"
    assert offset((i, j), (0, 1)) == j
    assert contiguous_strides((2, 1, 4)) == (4, 4, 1)
