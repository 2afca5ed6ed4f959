"""Values as functions of a length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuse.runtime.laws import Fixed, NoLaw, law_of

LENGTHS = (11, 18, 37)


@given(st.integers(-5, 50), st.integers(-99, 99), st.integers(1, 2000))
def test_numbers_that_grow_evenly_are_found_again(factor: int, shift: int, length: int) -> None:
    law = law_of(LENGTHS, [factor * t + shift for t in LENGTHS])
    assert law(length) == factor * length + shift


@dataclass(frozen=True)
class Place:
    name: str
    offset: int
    parts: tuple[Any, ...]


def place(length: int) -> Place:
    return Place("h", 4 * length, ([length - 1, 2.5], {"rows": length, "kept": None}, torch.float32, True))


def test_values_may_be_nested() -> None:
    law = law_of(LENGTHS, [place(length) for length in LENGTHS])
    assert law(1000) == place(1000)
    assert not isinstance(law, Fixed)
    assert isinstance(law_of(LENGTHS, [Place("h", 4, ())] * 3), Fixed)


def test_tensors_come_out_as_layouts() -> None:
    law = law_of(LENGTHS, [torch.zeros(3, 2 * t, dtype=torch.int64).t() for t in LENGTHS])
    made = law(50)
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((100, 3), (1, 100), torch.int64, "meta")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda t: t - t % 2, "does not follow"),
        (lambda t: t // 4, "does not follow"),
        (lambda t: t * t, "does not follow"),
        (lambda t: min(t, 30), "does not follow"),
        (lambda t: 1 / t, "becomes"),
        (lambda t: t if t < 30 else float(t), "becomes"),
        (lambda t: t > 30, "False becomes True"),
        (lambda t: [0] * t, "11 parts become 37"),
        (lambda t: torch.zeros(t, dtype=torch.int64 if t > 30 else torch.int32), "another kind"),
        (lambda t: object(), "a object becomes a object"),
    ],
)
def test_what_is_no_function_of_the_length_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(NoLaw, match=reason):
        law_of(LENGTHS, [value(length) for length in LENGTHS])


def test_there_is_no_value_where_a_number_would_not_be_whole() -> None:
    law = law_of((12, 16, 20), [6, 8, 10])
    assert law(40) == 20
    with pytest.raises(NoLaw, match="length 41"):
        law(41)
