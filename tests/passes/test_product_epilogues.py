from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.graph.function import Function
from fuse.runtime.sizes import patience
from fuse.testing import assert_fuses


class Feedforward(nn.Module):
    """Two products, an activation behind the first, the input added behind the second."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu, bias: bool = True, size: int = 24) -> None:
        super().__init__()
        self.expand = nn.Linear(size, 50, bias)
        self.contract = nn.Linear(50, size, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(self.activation(self.expand(x)))


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = [torch.relu, F.gelu, gelu_tanh, F.silu, torch.tanh, torch.sigmoid, F.leaky_relu, F.hardswish, F.softplus]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_residual_join_their_products(activation: Callable[[Tensor], Tensor]) -> None:
    assert_fuses(Feedforward(activation), torch.randn(2, 7, 24), launches=2, fired={"product_epilogues": 2})


def test_a_product_without_bias() -> None:
    assert_fuses(Feedforward(bias=False), torch.randn(33, 24), launches=2, fired={"product_epilogues": 2})


def test_a_product_of_doubles() -> None:
    assert_fuses(Feedforward().double(), torch.randn(9, 24).double(), launches=2)


@pytest.mark.parametrize(("depth", "rows", "columns", "dtype"), [
    (40, 24, 50, torch.float32), (33, 37, 70, torch.float32), (1, 5, 20, torch.float32), (600, 9, 33, torch.float64),
])  # fmt: skip
def test_a_left_operand_may_lie_turned_over(depth: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    class GradientOfAWeight(nn.Module):
        def forward(self, d: Tensor, x: Tensor) -> Tensor:
            return torch.relu(d[:, :-3].t() @ x) * 2

    operands = torch.randn(depth, rows + 3, dtype=dtype), torch.randn(depth, columns, dtype=dtype)
    assert_fuses(GradientOfAWeight(), *operands, launches=1, fired={"product_epilogues": 1})


def test_a_left_operand_that_lies_turned_over_and_is_deep_is_left_to_the_library() -> None:
    class Deep(nn.Module):
        def forward(self, d: Tensor, x: Tensor) -> Tensor:
            return torch.relu(d.t() @ x)

    assert_fuses(Deep(), torch.randn(2049, 8), torch.randn(2049, 16), fired={"product_epilogues": 0})


def test_scale_shift_and_a_column_of_factors() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, w: Tensor, scale: Tensor, shift: Tensor, rows: Tensor) -> Tensor:
            return torch.relu((x @ w) * scale + shift) * rows

    operands = torch.randn(12, 20), torch.randn(20, 40), torch.randn(40), torch.randn(40), torch.randn(12, 1)
    assert_fuses(Scaled(), *operands, launches=1, fired={"product_epilogues": 1})


def test_addmm_with_factors_of_its_own_and_a_full_addend() -> None:
    class Weighted(nn.Module):
        def forward(self, c: Tensor, x: Tensor, w: Tensor) -> Tensor:
            return torch.tanh(torch.addmm(c, x, w, alpha=0.5, beta=2.0))

    assert_fuses(Weighted(), torch.randn(6, 9), torch.randn(6, 5), torch.randn(5, 9), launches=1)


def test_beta_of_zero_does_not_spread_a_nan() -> None:
    class Unread(nn.Module):
        def forward(self, c: Tensor, x: Tensor, w: Tensor) -> Tensor:
            return torch.tanh(torch.addmm(c, x, w, beta=0))

    nan = torch.full((9,), float("nan"))
    assert_fuses(Unread(), nan, torch.randn(6, 5), torch.randn(5, 9), launches=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_so(value: float) -> None:
    x = torch.randn(8, 24)
    x[3, 5] = value
    assert_fuses(Feedforward(), x, launches=2)


def test_several_blocks_of_depth_rows_and_columns() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return torch.sigmoid(x @ w)

    assert_fuses(Wide(), torch.randn(70, 1100), torch.randn(1100, 130) / 30, launches=1)


def test_another_reader_gets_the_product_too() -> None:
    class ReadTwice(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            y = x @ w
            return torch.tanh(y), y

    assert_fuses(ReadTwice(), torch.randn(8, 8), torch.randn(8, 24), launches=1, fired={"product_epilogues": 1})


def test_a_reader_that_reads_something_later_than_the_product() -> None:
    class Sorted(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            y = x @ w
            return torch.tanh(y) + torch.sort(x + 1).values

    assert_fuses(Sorted(), torch.randn(8, 8), torch.randn(8, 8), fired={"product_epilogues": 1})


def test_heads_stored_in_their_own_order() -> None:
    class Heads(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            heads = (x @ w).view(2, 5, 3, 8).transpose(1, 2)
            return (heads * 0.125).contiguous()

    assert_fuses(Heads(), torch.randn(10, 16), torch.randn(16, 24), launches=1, fired={"product_epilogues": 1})


def test_a_result_that_is_turned() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return torch.relu((x @ w).t()) + y

    assert_fuses(Turned(), torch.randn(9, 8), torch.randn(8, 7), torch.randn(7, 9), launches=1)


def test_weights_change_between_calls() -> None:
    model = Feedforward()
    fused, x = fuse.compile(model), torch.randn(8, 24)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
        model.expand.weight.data.mul_(2)
        torch.testing.assert_close(fused(x), model(x))
    assert fused.last_run.launches == 2


def test_gradients() -> None:
    model, x = Feedforward(F.gelu), torch.randn(8, 24, requires_grad=True)
    fused = fuse.compile(model)
    names = [n for n, _ in model.named_parameters()]
    got = torch.autograd.grad(fused(x).square().sum(), [x, *model.parameters()])
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    for name, one, other in zip(["x", *names], got, wanted, strict=True):
        torch.testing.assert_close(one, other, msg=name)


class FewRows(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x[:2] @ w)


class DtypeBetween(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x.to(torch.bfloat16) @ w.to(torch.bfloat16))


class Sliced(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.relu((x @ w)[:, 2:5])


class Reduced(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x @ w, 0)


class Broadcast(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).unsqueeze(1) * torch.arange(3.0)[:, None]


class LeftInNoOrder(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x[:, ::2] @ w[:4])


class OneColumn(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w[:, :1])


@pytest.mark.parametrize("model", [FewRows, OneColumn, DtypeBetween, Sliced, Reduced, Broadcast, LeftInNoOrder])
def test_near_misses_stay(model: type[nn.Module]) -> None:
    assert_fuses(model(), torch.randn(8, 8), torch.randn(8, 8), fired={"product_epilogues": 0})


def test_a_product_that_is_written_before_it_is_read() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            y = x @ w
            y[:, 1] = 3
            x.add_(1)
            return torch.relu(y) + x

    assert_fuses(Written(), torch.randn(8, 8), torch.randn(8, 8))


def test_one_reader_of_two_products_takes_in_one() -> None:
    class Gated(nn.Module):
        def forward(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
            return F.silu(x @ v) * (torch.tanh(x) @ w)

    report = assert_fuses(Gated(), torch.randn(8, 8), torch.randn(8, 24), torch.randn(8, 24))
    assert sum(one.count for one in report.fired if one.pass_name == "product_epilogues") == 1


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(4, 40),
    depth=st.integers(1, 40),
    columns=st.integers(2, 70),
    transposed=st.booleans(),
    step=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_size_and_layout(
    rows: int, depth: int, columns: int, transposed: bool, step: int, dtype: torch.dtype
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return torch.relu(x @ w + b)

    torch.manual_seed(rows * 100 + columns)
    x = torch.randn(rows * step, depth + 3, dtype=dtype)[::step, 2 : depth + 2]
    w = torch.randn(columns, depth, dtype=dtype).t() if transposed else torch.randn(depth, columns, dtype=dtype)
    assert_fuses(Model(), x, w, torch.randn(columns, dtype=dtype), launches=1)


def test_other_readers_that_wait_for_the_product_alone_join_it() -> None:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y.relu(), y > 0.5

    assert_fuses(Function(run), torch.randn(16, 32), torch.randn(32, 28), launches=1)


def test_a_reader_that_waits_for_another_stays_behind_it() -> None:
    def run(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = x @ w
        return (y.relu() @ v) * y.sigmoid()

    assert_fuses(Function(run), torch.randn(16, 32), torch.randn(32, 28), torch.randn(28, 28), launches=2)


@pytest.mark.parametrize(("width", "launches"), [(16, 1), (128, 2)])
def test_a_single_row_of_a_call_whose_sizes_vary(width: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of calls with more rows serves it, where packing the weight costs next to nothing."""
    monkeypatch.setattr(patience, "AT_ONCE", 3)
    monkeypatch.setattr(patience, "SETTLED_UNLIKE", 8)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh()).eval()
    fused = fuse.compile(model)
    with torch.no_grad():
        for rows in (9, 7, 1):
            x = torch.randn(rows, width)
            torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    assert fused.last_run is not None
    assert fused.last_run.launches == launches
