"""``assert_fuses`` accepts what is true and rejects each claim that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuse.testing import assert_fuses


class Twice(nn.Module):
    """The same matrix product twice: one of them is enough."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.mm(x, x) - torch.mm(x, x) * scale


def test_true_claims_pass_and_the_report_is_returned() -> None:
    report = assert_fuses(Twice(), torch.randn(4, 4), scale=2.0, fired={"common_subexpressions": 1})
    assert report.before.launches == 4
    assert report.after.launches == 1


@pytest.mark.parametrize(
    ("claims", "problem"),
    [
        ({"launches": 40}, "launches, not 40"),
        ({"fired": {"common_subexpressions": 3}}, "common_subexpressions fired 1 times, not 3"),
        ({"fired": {}}, "rewrites that save launches fired"),
        ({"rejected": {"common_subexpressions": 9}}, "common_subexpressions declined"),
    ],
)
def test_a_false_claim_fails_and_shows_the_report(claims: dict[str, Any], problem: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_fuses(Twice(), torch.randn(4, 4), **claims)
    assert problem in str(caught.value)
    assert "launches by line" in str(caught.value)


def test_a_model_that_nothing_fuses_has_fired_nothing() -> None:
    assert_fuses(nn.Tanh(), torch.randn(4), launches=1, fired={})
