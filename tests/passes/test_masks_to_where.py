from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuse.graph.function import Function

PASSES = ["common_subexpressions", "masks_to_where", "dead_code"]
X = torch.tensor([[0.5, -1.5, 2.0], [-0.25, 0.75, -3.0], [1.25, 0.1, -0.2], [-1.0, 2.5, 0.3]])
Y = torch.tensor([[1.5, 0.2, -0.7], [0.4, -1.1, 0.9], [-0.6, 2.2, 0.8], [-2.0, -0.3, 1.7]])


def put(x: Tensor, mask: Tensor, value: Tensor | float) -> Tensor:
    x = x * 2
    x[mask] = value
    return x


WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a number": lambda x, y: put(x, x > 0, 0.5),
    "a row": lambda x, y: put(x, y[:, 0] > 0, y[1]),
    "another tensor": lambda x, y: put(x, y > 0, y[y > 0]),
    "rows of another tensor": lambda x, y: put(x, y[:, 0] > 0, y[y[:, 0] > 0] * y[0] + 1),
    "columns of another tensor": lambda x, y: put(x, y > 0, torch.cat([y, y + 1], 1)[:, 3:][y > 0]),
    "another tensor transposed": lambda x, y: put(x, y > 0, (y.t() * 2).contiguous().t()[y > 0] + 1),
    "scaled in place": lambda x, y: put(x, x > 0, x[x > 0].mul_(3)),
    "several operators": lambda x, y: put(x, x > 0, torch.exp(y[x > 0] * 0.5) + x[x > 0].abs().sqrt()),
    "nan where nothing is chosen": lambda x, y: put(x, x > 0, x[x > 0].log()),
    "one number of them": lambda x, y: put(x, x > 0, y.sum()),
}
STAYING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "a sum": (lambda x, y: put(x, x > 0, y[x > 0].cumsum(0)), "more than element by element"),
    "read twice": (lambda x, y: put(x, x > 0, y[x > 0]) + y[x > 0].sum(), "another operator reads the chosen"),
    "rows of an input": (lambda x, y: put(x, x[:, 0] < 99, y + 1), "not chosen by the same mask"),
    "beside rows of an input": (lambda x, y: put(x, x[:, 0] < 99, y[x[:, 0] < 99] + y), "did not choose"),
    "integers divided": (
        lambda x, y: put((x * 9).long(), x > 0, torch.div(12, (x * 5 + 1).long()[x > 0], rounding_mode="floor")),
        "may raise",
    ),
    "added to": (lambda x, y: (x * 2).index_put((x > 0,), y[0, 0], accumulate=True), "one value is added"),
}


@pytest.mark.parametrize("function", WRITTEN.values(), ids=WRITTEN)
def test_what_a_mask_writes_is_chosen_by_where(rewritten, function):
    result = rewritten(Function(function), X, Y, passes=PASSES)
    assert result.fired["masks_to_where"] == 1
    left = {node.target for node in result.graph.graph.nodes}
    assert torch.ops.aten.index_put.default not in left
    assert torch.ops.aten.index.Tensor not in left


@pytest.mark.parametrize(("function", "reason"), STAYING.values(), ids=STAYING)
def test_what_is_no_choice_element_by_element_stays(rewritten, function, reason):
    result = rewritten(Function(function), X, Y, passes=PASSES)
    assert "masks_to_where" not in result.fired or not result.fired["masks_to_where"]
    assert any(reason in one.reason for one in result.ledger.rejected)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 2), st.booleans())
def test_every_mask_chooses_as_eager_does(rewritten, rows, kind, deep):
    mask = torch.tensor(rows)
    value = [lambda y, m: 2.0, lambda y, m: y[m] * 2, lambda y, m: y[m] + y[0]][kind]
    mask = mask[:, None].expand(4, 3).clone() if deep and kind < 2 else mask
    rewritten(Function(lambda x, y, m: put(x, m, value(y, m))), X, Y, mask, passes=PASSES)


def test_one_choice_may_be_written_twice(rewritten):
    def twice(x, y):
        chosen = y > 0
        value = y[chosen] * 3
        return put(x, chosen, value), put(x.exp(), chosen, value)

    result = rewritten(Function(twice), X, Y, passes=PASSES)
    assert result.fired["masks_to_where"] == 2
    assert torch.ops.aten.index.Tensor not in {node.target for node in result.graph.graph.nodes}
