"""Sums over steps become one product, one reduction or one stack."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

PASSES = ["view_chains", "no_ops", "sum_over_steps"]


class Sum(nn.Module):
    """The sum of a function of each step."""

    def __init__(self, term: Callable[[Tensor, Tensor, int], Tensor], steps: int = 5) -> None:
        super().__init__()
        self.term = term
        self.steps = steps

    def forward(self, g: Tensor, h: Tensor) -> Tensor:
        total = self.term(g, h, 0)
        for k in range(1, self.steps):
            total = total + self.term(g, h, k)
        return total


def product(g: Tensor, h: Tensor, k: int) -> Tensor:
    return g[k].t() @ h[k]


def rows(g: Tensor, h: Tensor, k: int) -> Tensor:
    return g[k].sum(0, keepdim=True).view(-1)


def part(g: Tensor, h: Tensor, k: int) -> Tensor:
    return torch.ops.aten.select_backward(g[k], [5, 3, 4], 0, (2 * k) % 5)


def test_products_become_one(rewritten: Callable[..., object]) -> None:
    result = rewritten(Sum(product), torch.randn(5, 3, 4), torch.randn(5, 3, 2), passes=PASSES, exact=False)
    assert (result.count("mm"), result.count("add")) == (1, 0)
    assert result.fired["sum_over_steps"] == 1


def test_sums_of_rows_become_one(rewritten: Callable[..., object]) -> None:
    result = rewritten(Sum(rows), torch.randn(5, 3, 4), torch.randn(5), passes=PASSES, exact=False)
    assert (result.count("sum"), result.count("add")) == (1, 0)


def test_parts_put_into_zeros_become_a_stack(rewritten: Callable[..., object]) -> None:
    result = rewritten(Sum(part), torch.randn(5, 3, 4), torch.randn(5), passes=PASSES)
    assert (result.count("stack"), result.count("select_backward"), result.count("add")) == (1, 0, 0)


def test_what_else_is_added_stays(rewritten: Callable[..., object]) -> None:
    def term(g: Tensor, h: Tensor, k: int) -> Tensor:
        return product(g, h, k) + torch.exp(g[k, :2, :2]) if k == 3 else product(g, h, k)

    result = rewritten(Sum(term), torch.randn(5, 3, 2), torch.randn(5, 3, 2), passes=PASSES, exact=False)
    assert (result.count("mm"), result.count("add")) == (1, 1)


def too_few(g: Tensor, h: Tensor, k: int) -> Tensor:
    return product(g, h, k) if k < 3 else torch.exp(h[k]).sum() + g[0].t() @ h[0].exp() * 2


def not_transposed(g: Tensor, h: Tensor, k: int) -> Tensor:
    return g[k] @ h[k].t()


def scaled(g: Tensor, h: Tensor, k: int) -> Tensor:
    return product(g, h, k) * 2


def other_rows(g: Tensor, h: Tensor, k: int) -> Tensor:
    return g[k].sum(1, keepdim=True).view(-1)


@pytest.mark.parametrize("term", [too_few, not_transposed, scaled, other_rows])
def test_near_misses_stay(term: Callable[..., Tensor], rewritten: Callable[..., object]) -> None:
    result = rewritten(Sum(term), torch.randn(5, 3, 4), torch.randn(5, 3, 4), passes=PASSES)
    assert "sum_over_steps" not in result.fired


def test_three_terms_stay(rewritten: Callable[..., object]) -> None:
    result = rewritten(Sum(product, 3), torch.randn(5, 3, 4), torch.randn(5, 3, 2), passes=PASSES)
    assert "sum_over_steps" not in result.fired


def test_a_part_that_is_missing_is_zeros(rewritten: Callable[..., object]) -> None:
    result = rewritten(Sum(part, 4), torch.randn(5, 3, 4), torch.randn(5), passes=PASSES)
    assert (result.count("stack"), result.count("select_backward"), result.count("full")) == (1, 0, 1)


def wide(g: Tensor, h: Tensor, k: int) -> Tensor:
    return torch.ops.aten.select_backward(g[k], [9, 3, 4], 0, k)


def twice(g: Tensor, h: Tensor, k: int) -> Tensor:
    return torch.ops.aten.select_backward(g[k], [5, 3, 4], 0, k % 4)


@pytest.mark.parametrize(
    ("term", "steps", "reason"),
    [(wide, 4, "most positions are zero"), (twice, 5, "two terms have the same position")],
)
def test_parts_that_are_no_stack_are_declined(
    term: Callable[..., Tensor], steps: int, reason: str, rewritten: Callable[..., object]
) -> None:
    result = rewritten(Sum(term, steps), torch.randn(5, 3, 4), torch.randn(5), passes=PASSES)
    assert reason in result.reasons
    assert result.count("select_backward") == steps


def test_a_sum_that_is_read_in_between_is_kept(rewritten: Callable[..., object]) -> None:
    class Read(nn.Module):
        def forward(self, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            half = Sum(product, 4)(g, h)
            return half, half + g[4].t() @ h[4]

    result = rewritten(Read(), torch.randn(5, 3, 4), torch.randn(5, 3, 2), passes=PASSES, exact=False)
    assert (result.count("mm"), result.count("add")) == (2, 1)
