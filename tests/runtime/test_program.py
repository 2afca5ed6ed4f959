"""A graph as a native program: products, views, copies, ATen calls in between, memory never shared by mistake."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fuse
from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.runtime.cpu import blas
from fuse.runtime.programs.program import program_of
from fuse.runtime.programs.steps import Launches
from fuse.testing import assert_fuses


def run(function: Callable[..., Any], *args: Tensor) -> tuple[list[Tensor | None], Launches, GraphModule]:
    """The values of the captured graph without any pass, and what was launched."""
    graph = capture(Function(function), args)
    sources = graph.meta["signature"].inputs
    tensors = [args[s.index] if s.kind == "argument" else s.value for s in sources]
    values, launches = program_of(graph).run(tensors)
    return values, Launches.unpack(launches), graph


def assert_same(function: Callable[..., Any], *args: Tensor, kernels: int, libraries: int = 0, aten: int = 0) -> None:
    """One result, equal to eager's in value and layout, with exactly these launches."""
    expected = function(*(a.clone() for a in args))
    (value, *_), launches, _ = run(function, *args)
    torch.testing.assert_close(value, expected)
    assert value is not None
    assert value.stride() == expected.stride()
    assert launches == Launches(kernels, libraries, aten)


def test_a_chain_of_operators_is_one_native_call() -> None:
    assert_same(lambda x: (x.tanh() * 2 + 1).exp(), torch.randn(4, 8), kernels=4)


def test_memory_is_the_cpus_whatever_the_default_device() -> None:
    x = torch.randn(4, 8)
    with torch.device("meta"):
        (value, *_), launches, _ = run(lambda x: torch.sort(x.tanh() * 2)[0].exp(), x)
    torch.testing.assert_close(value, torch.sort(x.tanh() * 2)[0].exp())
    assert launches == Launches(kernels=3, libraries=0, aten=1)


LAYOUTS = {
    "plain": lambda r, c: torch.randn(r, c),
    "transposed": lambda r, c: torch.randn(c, r).t(),
    "with gaps between rows": lambda r, c: torch.randn(r, c + 3)[:, 1 : c + 1],
    "transposed with gaps": lambda r, c: torch.randn(c, r + 3)[:, 1 : r + 1].t(),
}


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize(("m", "k", "n"), [(3, 5, 4), (1, 5, 4), (3, 1, 4), (3, 5, 1), (1, 1, 1)])
def test_a_product_of_any_two_layouts_is_one_library_call(left: str, right: str, m: int, k: int, n: int) -> None:
    assert_same(torch.mm, LAYOUTS[left](m, k), LAYOUTS[right](k, n), kernels=0, libraries=1)


@pytest.mark.parametrize("bias", [(4,), (3, 4), (1, 4), (3, 1), ()])
def test_a_bias_is_part_of_the_product_whatever_it_broadcasts_from(bias: tuple[int, ...]) -> None:
    assert_same(torch.addmm, torch.randn(bias), torch.randn(3, 5), torch.randn(5, 4), kernels=0, libraries=1)


@pytest.mark.parametrize(("alpha", "beta"), [(2, 1), (0.5, 3), (1, 0)])
def test_alpha_and_beta_reach_the_library(alpha: float, beta: float) -> None:
    def function(b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.addmm(b, x, y, alpha=alpha, beta=beta)

    bias = torch.full((4,), torch.nan if beta == 0 else 1.5)
    assert_same(function, bias, torch.randn(3, 5), torch.randn(5, 4), kernels=0, libraries=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches_are_one_library_call(dtype: torch.dtype) -> None:
    a, b = torch.randn(6, 3, 5, dtype=dtype), torch.randn(6, 4, 5, dtype=dtype).transpose(1, 2)
    assert_same(torch.bmm, a, b, kernels=0, libraries=1)
    assert_same(torch.baddbmm, torch.randn(6, 1, 4, dtype=dtype), a, b, kernels=0, libraries=1)
    assert_same(torch.bmm, a, b[:1].expand(6, 5, 4), kernels=0, libraries=1)


def test_batches_run_one_by_one_where_blas_has_no_batched_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuse.runtime.cpu.tables.gemm_batch_address", lambda dtype: None)
    assert_same(torch.bmm, torch.randn(6, 3, 5), torch.randn(6, 5, 4), kernels=0, libraries=1)


def test_a_matrix_and_a_vector_are_a_product() -> None:
    assert_same(torch.mv, torch.randn(3, 5), torch.randn(5), kernels=0, libraries=1)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.randn(3, 10)[:, ::2], torch.randn(5, 4)),  # no unit stride
        (torch.ones(3, 5, dtype=torch.int64), torch.ones(5, 4, dtype=torch.int64)),
        (torch.randn(3, 5).bfloat16(), torch.randn(5, 4).bfloat16()),
        (torch.randn(3, 0), torch.randn(0, 4)),
        (torch.randn(0, 5), torch.randn(5, 4)),
    ],
    ids=["strided", "integers", "bfloat16", "no terms", "no rows"],
)
def test_what_blas_does_not_take_stays_an_aten_call(a: Tensor, b: Tensor) -> None:
    assert_same(torch.mm, a, b, kernels=0, aten=1)


def test_without_blas_products_are_kernels_or_stay_aten_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "gemm_address", lambda dtype: None)
    assert_same(torch.mm, torch.randn(3, 5), torch.randn(5, 4), kernels=1, aten=0)
    assert_same(torch.bmm, torch.randn(2, 3, 5), torch.randn(2, 5, 4), kernels=0, aten=1)


def test_aten_calls_take_and_give_any_view_between_native_steps() -> None:
    def function(x: Tensor) -> Tensor:
        y = (x * 2).t()[1:]
        values, indices = torch.sort(y, dim=1)
        return values[:, 1:] + indices[:, :-1] + torch.cumprod(y.unbind(0)[2], 0)[1:]

    expected = function(x := torch.randn(4, 8))
    (value, *_), launches, _ = run(function, x)
    torch.testing.assert_close(value, expected)
    assert launches.aten == 2
    assert launches.kernels == 3


def test_a_result_that_is_viewed_by_an_aten_call_arrives_whole() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, torch.cumprod(y[1:].reshape(-1), 0)

    x = torch.randn(3, 4)
    (y, product), _, _ = run(function, x)
    torch.testing.assert_close((y, product), function(x))


def test_results_are_never_in_memory_that_is_used_again() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        a = x + 1
        b = a * 2
        c = torch.sort(b)[0]
        return b, c, (c + a).exp()

    graph = capture(Function(function), (x := torch.randn(4, 8),))
    program = program_of(graph)
    first, _ = program.run([x])
    kept = [v.clone() for v in first if v is not None]
    program.run([x * 5])
    assert all(torch.equal(v, k) for v, k in zip(first, kept, strict=True) if v is not None)


def test_written_inputs_are_read_before_they_are_written() -> None:
    def swap(x: Tensor, y: Tensor) -> Tensor:
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        return x + y

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    expected = x.clone(), y.clone()
    run(swap, x, y)
    assert torch.equal(x, expected[1])
    assert torch.equal(y, expected[0])


def test_an_input_written_with_a_view_of_itself_is_right() -> None:
    x = torch.arange(9.0).reshape(3, 3)
    run(lambda x: x.copy_(x.t().clone()), x)
    assert torch.equal(x, torch.arange(9.0).reshape(3, 3).t())


def test_writes_follow_the_strides_of_the_input() -> None:
    base = torch.zeros(4, 6)
    run(lambda x: x.add_(1), base[:, ::2])
    assert torch.equal(base[:, ::2], torch.ones(4, 3))
    assert torch.equal(base[:, 1::2], torch.zeros(4, 3))


def test_a_call_may_read_more_views_than_there_is_memory() -> None:
    assert_same(lambda x: torch.block_diag(*x.unbind(0)), torch.randn(6, 3, 3), kernels=0, aten=1)


def test_calls_at_the_same_time_do_not_share_memory() -> None:
    graph = capture(Function(lambda x: ((x * 2).exp() @ x.t()).tanh().sort()[0]), (torch.randn(32, 32),))
    program = program_of(graph)
    inputs = [torch.randn(32, 32) for _ in range(8)]
    expected = [program.run([x])[0][0] for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            value = program.run([inputs[index]])[0][0]
            assert value is not None
            if not torch.equal(value, expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_long_chain_reuses_two_places() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(50):
            x = x.tanh()
        return x

    program = program_of(capture(Function(chain), (torch.randn(64),)))
    assert program.workspace_bytes <= 64 + 2 * 256
    assert len(program.kernels) == 1


def test_a_launch_of_a_small_kernel_costs_less_than_a_microsecond() -> None:
    def chain(x: Tensor, length: int) -> Tensor:
        for _ in range(length):
            x = x + 1.0
        return x

    x = torch.randn(64)
    seconds = []
    for length in (10, 1000):
        program = program_of(capture(Function(lambda x, n=length: chain(x, n)), (x,)))
        best = float("inf")
        for _ in range(50):
            start = time.perf_counter()
            program.run([x])
            best = min(best, time.perf_counter() - start)
        seconds.append(best)
    assert (seconds[1] - seconds[0]) / 990 < 1e-6


class _KeptOutOfAutocast(nn.Module):
    """Operators that are called from Python, where ``forward`` turns autocast off."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            return torch.addbmm(x, x[None], x[None]), torch.stack([torch.linalg.matrix_exp(x) @ x] * 2).tanh()


def test_operators_that_are_called_run_behind_the_autocast_of_the_caller() -> None:
    model = _KeptOutOfAutocast()
    fused, x = fuse.compile(model), torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    for autocast in (True, False, True):
        with torch.autocast("cpu", enabled=autocast):
            for got, expected in zip(fused(x), model(x), strict=True):
                torch.testing.assert_close(got, expected)  # dtypes are compared as well
            assert torch.is_autocast_enabled("cpu") is autocast
        assert fused.last_run is not None
        assert not fused.last_run.fallbacks


def test_custom_operators_run_under_the_autocast_of_the_caller() -> None:
    @torch.library.custom_op("fuse_tests::product", mutates_args=())
    def product(x: Tensor) -> Tensor:
        return (x @ x).float()

    product.register_fake(lambda x: torch.empty_like(x))
    model = nn.Module()
    model.forward = lambda x: product(x) + 1  # type: ignore[method-assign]
    fused, x = fuse.compile(model), torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with torch.autocast("cpu"):
            assert torch.equal(fused(x), model(x))
            assert not torch.equal(model(x), x @ x + 1)
        torch.testing.assert_close(fused(x), x @ x + 1)


_kept: list[Tensor] = []


@torch.library.custom_op("fuse_tests::kept", mutates_args=())
def _keep(x: Tensor) -> Tensor:
    _kept.append(x)
    return x.sum().reshape(1)


_keep.register_fake(lambda x: x.new_empty(1))


class _Keeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = (x * 2).tanh()
        z = (x * 3).sin() @ x
        return _keep(y) + _keep(z[1:]) + (z.exp() + y).sum()


class _KeepsEachStep(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.ones(x.shape[1])
        for row in x:
            h = torch.tanh(h * row + _keep(h * 2))
        return h


@pytest.mark.parametrize("model", [_Keeps(), _KeepsEachStep()], ids=["alone", "in a loop"])
def test_what_a_custom_operator_keeps_is_never_overwritten(model: nn.Module) -> None:
    x = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    fused = fuse.compile(model)
    fused(x)
    _kept.clear()
    model(x)
    expected = [(t.clone(), t.stride()) for t in _kept]
    _kept.clear()
    fused(x)
    mine = list(_kept)
    fused(x * 2)
    assert fused.last_run is not None
    assert not fused.last_run.fallbacks
    assert len(mine) == len(expected)
    for tensor, (value, stride) in zip(mine, expected, strict=True):
        torch.testing.assert_close(tensor, value)
        assert tensor.stride() == stride


class FilledEmpty(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        empty = x.flip(-1).unflatten(-1, (2, -1))[2:]
        empty.zero_()
        return [empty]


def test_what_an_operator_gives_is_received_in_another_layout_without_a_copy() -> None:
    assert_fuses(FilledEmpty(), torch.randn(4), launches=3)
