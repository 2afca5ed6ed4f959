"""A negative of a negative is the value itself, in the pattern and in the model."""

from __future__ import annotations

import pytest
import torch
from torch import randn

SPELLINGS = {
    "sum": lambda x, y: torch.tanh(x + y),
    "less the negative": lambda x, y: torch.tanh(x - (-y)),
    "less the negative, swapped": lambda x, y: torch.tanh(y - (-x)),
    "less a product with -1": lambda x, y: torch.tanh(x - y * -1),
    "rsub": lambda x, y: torch.tanh(torch.rsub(-y, x)),
    "alpha": lambda x, y: torch.tanh(torch.add(x, -y, alpha=-1)),
}


@pytest.mark.parametrize("model", SPELLINGS)
@pytest.mark.parametrize("pattern", SPELLINGS)
def test_spellings_of_a_sum_are_one(try_pattern, pattern, model):
    assert try_pattern(SPELLINGS[pattern], SPELLINGS[model], randn(3, 4), randn(3, 4)).matched


def test_the_values_may_be_computed_and_turned(try_pattern):
    def spread(x, y):
        return torch.exp(torch.cos(x) + torch.sin(y))

    assert try_pattern(spread, lambda x, y: torch.exp(torch.cos(x) - (-torch.sin(y))), randn(3), randn(3)).matched
    twice = try_pattern(
        spread, lambda x, y: torch.exp(torch.cos(x) - (-torch.sin(y))) * torch.sin(y), randn(3), randn(3)
    )
    assert twice.kinds == {"used outside": 1}
    assert try_pattern(lambda x, y: torch.exp(x - y), lambda x, y: torch.exp(x - (-y)), randn(3), randn(3)).matched


@pytest.mark.parametrize(
    "model",
    [
        lambda x, y: torch.tanh(x - y),
        lambda x, y: torch.tanh(x - (-y) * 2),
        lambda x, y: torch.tanh(x - (-y).bfloat16().float()),
        lambda x, y: torch.tanh(-x - y),
    ],
)
def test_what_is_no_sum_stays(try_pattern, model):
    assert not try_pattern(SPELLINGS["sum"], model, randn(3, 4), randn(3, 4)).matched


def test_a_negative_that_is_used_elsewhere_is_told(try_pattern):
    found = try_pattern(SPELLINGS["sum"], lambda x, y: (torch.tanh(x - (-y)), (-y).exp()), randn(3), randn(3))
    assert found.reason == "used outside: `neg` is used outside: `exp` reads it, too"
