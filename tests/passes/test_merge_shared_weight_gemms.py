from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from fuse.check.oracle import check

PASSES = ["common_subexpressions", "view_chains", "merge_shared_weight_gemms"]


class Projections(nn.Module):
    """One projection for each part of the input, as the input side of a recurrent loop."""

    def __init__(self, parts: Callable[[Tensor], Iterable[Tensor]], bias: bool = True) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(6, 5, bias)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [torch.tanh(self.linear(part)) for part in self.parts(x)]


class Recurrence(nn.Module):
    """The whole loop: input projections are independent, products with the state are not."""

    def __init__(self) -> None:
        super().__init__()
        self.from_input = nn.Linear(6, 5)
        self.from_state = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 5)
        for t in range(x.shape[1]):
            h = torch.tanh(self.from_input(x[:, t]) + self.from_state(h))
        return h


class ReturnedProjections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.linear(part) for part in x]


class FlattenedProjections(nn.Module):
    """Each projection is viewed flat, which takes contiguous rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [torch.tanh(self.linear(x[:, t]).view(-1)) for t in range(x.shape[1])]


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x[0])) + torch.tanh(self.second(x[1]))


class OneNeedsTheOther(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x[0] + self.linear(x[1])))


WITHOUT_A_COPY = {
    "steps first": lambda x: [x[t] for t in range(4)],
    "batch first": lambda x: [x[:, t] for t in range(4)],
    "unbound": lambda x: x.unbind(1),
    "backwards": lambda x: [x[:, t] for t in reversed(range(4))],
    "all but the first": lambda x: [x[t] for t in range(1, 4)],
    "every other": lambda x: [x[t, :1] for t in range(0, 4, 2)],
    "split": lambda x: [part.squeeze(0) for part in x.split(1)],
    "slices of rows": lambda x: [x.view(16, 6)[i : i + 2] for i in range(0, 16, 2)],
    "single rows": lambda x: [x[t, :1] for t in range(4)],
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parts", WITHOUT_A_COPY.values(), ids=WITHOUT_A_COPY)
def test_parts_of_one_tensor_become_one_product_without_a_copy(rewritten, parts, bias):
    result = rewritten(Projections(parts, bias), torch.randn(4, 4, 6), passes=PASSES, exact=False)
    assert result.fired["merge_shared_weight_gemms"] == 1
    assert result.count("addmm") + result.count("mm") == 1
    assert result.count("cat") + result.count("clone") == 0


def test_columns_of_a_wider_tensor_are_read_in_place(rewritten):
    result = rewritten(Projections(lambda x: x[:, :, 1:7].unbind(0)), torch.randn(3, 2, 8), passes=PASSES, exact=False)
    assert (result.count("addmm"), result.count("cat"), result.count("clone")) == (1, 0, 0)


def test_all_input_projections_of_a_loop_become_one(rewritten):
    result = rewritten(Recurrence(), torch.randn(2, 8, 6), passes=PASSES, exact=False)
    assert result.count("addmm") == 1 + 8
    merged = next(one for one in result.ledger.rewrites if one.pass_name == "merge_shared_weight_gemms")
    assert (len(merged.nodes), merged.launches_saved) == (8, 7)


def test_unrelated_left_operands_are_concatenated_where_it_pays(rewritten):
    result = rewritten(
        Projections(lambda x: [part.exp() for part in x]), torch.randn(4, 2, 6), passes=PASSES, exact=False
    )
    assert (result.count("addmm"), result.count("cat")) == (1, 1)


def test_left_operands_of_different_heights_are_concatenated_too(rewritten):
    parts = lambda x: [x[0, :1], x[1, :3], x[2, :2]]  # noqa: E731
    result = rewritten(Projections(parts), torch.randn(4, 3, 6), passes=PASSES, exact=False)
    assert (result.count("addmm"), result.count("cat")) == (1, 1)


def test_large_left_operands_are_not_concatenated(rewritten):
    result = rewritten(
        Projections(lambda x: [part.exp() for part in x]), torch.randn(3, 5000, 6), passes=PASSES, exact=False
    )
    assert result.reasons == {"joining the left operands costs more than the launches saved": 1}


def test_products_that_are_returned_are_worth_no_copy_each(rewritten):
    result = rewritten(ReturnedProjections(), torch.randn(4, 2, 6), passes=PASSES, exact=False)
    assert result.reasons["copying the results out costs as many launches as are saved"] == 1


def test_views_that_need_contiguous_rows_are_worth_no_copy_each(rewritten):
    result = rewritten(FlattenedProjections(), torch.randn(2, 4, 6), passes=PASSES, exact=False)
    assert "merge_shared_weight_gemms" not in result.fired


@pytest.mark.parametrize("model", [TwoWeights, OneNeedsTheOther])
def test_near_misses_stay(rewritten, model):
    assert "merge_shared_weight_gemms" not in rewritten(model(), torch.randn(2, 6, 6), passes=PASSES, exact=False).fired


def test_gates_and_steps_merge_into_one_product(rewritten):
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [torch.tanh(gate(x[:, t])) for t in range(8) for gate in self.gates]

    passes = ["common_subexpressions", "merge_sibling_gemms", "merge_shared_weight_gemms"]
    result = rewritten(Cell(), torch.randn(2, 8, 6), passes=passes, exact=False)
    assert result.count("addmm") == 1


class ProductOfProduct(nn.Module):
    """A chain of steps, each of which reads two products, one of them of the other's result."""

    def forward(self, h: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
        results = []
        for _ in range(4):
            results.append(torch.tanh((h @ first) @ second))
            h = torch.tanh(h)
        return results


def test_operands_that_are_merged_products_themselves_are_read_as_they_are_then() -> None:
    with torch.no_grad():
        report = check(ProductOfProduct(), (torch.randn(1, 3), torch.randn(3, 3), torch.randn(3, 3)))
    assert report.passed, report
    assert not report.fallbacks
