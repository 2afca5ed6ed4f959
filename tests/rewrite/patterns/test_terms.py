"""How terms are written, and numbers beside tensors of each kind."""

from __future__ import annotations

import pytest
import torch

from fuse.rewrite.patterns.terms import TensorType, Terms

PLAIN = TensorType((2, 3), torch.float32, None)


def test_how_terms_are_written():
    terms = Terms()
    x, half = terms.leaf("x", PLAIN), terms.number(0.5, terms.leaf("x", PLAIN))
    made = terms.make("gelu", [x, half], PLAIN, [("approximate", "tanh"), ("bounds", None)])
    assert [str(one) for one in (x, half, made)] == ["x", "0.5", "gelu(x, 0.5, approximate=tanh)"]


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (torch.float32, 2, 2.0),
        (torch.float32, 2.0, 2.0),
        (torch.float32, 1j, 1j),
        (torch.int64, 2, 2),
        (torch.int64, 2.5, 2.5),
        (None, 2, 2),
    ],
)
def test_a_number_beside_a_tensor(dtype, value, expected):
    terms = Terms()
    number = terms.number(value, terms.leaf("x", TensorType((), dtype, None))).value
    assert (number, type(number)) == (expected, type(expected))
