"""Inverses, solutions and factors of small matrices in a step of a loop are kernels; eager decides where to raise."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.kernel.nests.small_matrices import MOST_ROWS

STEPS = 8
Step = Callable[[Tensor, Tensor], Tensor]


def definite(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


def inverted(h: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.inv(x + h * 0.1) * 0.5


def solved(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(torch.linalg.solve(x + 0.1 * h, h + 1))


def solved_for_a_vector(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h + torch.linalg.solve(x, h[..., 0]).unsqueeze(-1))


def factored(h: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.cholesky(definite(h)) + x


def factored_upwards(h: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.cholesky(definite(h), upper=True) + x


def whitened(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(torch.linalg.solve_triangular(torch.linalg.cholesky(definite(x)), h, upper=False) + x)


def whitened_from_the_right(h: Tensor, x: Tensor) -> Tensor:
    lower = torch.linalg.cholesky(definite(x))
    return torch.tanh(torch.linalg.solve_triangular(lower, h, upper=False, left=False) + x)


def of_ones_on_the_diagonal(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(torch.linalg.solve_triangular(x * 0.2, h, upper=True, unitriangular=True) + x)


def solved_by_a_factor(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(torch.cholesky_solve(h, torch.linalg.cholesky(definite(x))) + x)


def solved_by_an_upper_factor(h: Tensor, x: Tensor) -> Tensor:
    upper = torch.linalg.cholesky(definite(x), upper=True)
    return torch.tanh(torch.cholesky_solve(h, upper, upper=True) + x)


ALL = [
    inverted,
    solved,
    solved_for_a_vector,
    factored,
    factored_upwards,
    whitened,
    whitened_from_the_right,
    of_ones_on_the_diagonal,
    solved_by_a_factor,
    solved_by_an_upper_factor,
]


class Loop(nn.Module):
    def __init__(self, step: Step, size: int = 4) -> None:
        super().__init__()
        self.step = (step,)
        self.weight = nn.Parameter(torch.randn(size, size) / size)

    def forward(self, xs: Tensor) -> Tensor:
        h = self.weight.expand(xs.shape[1:])
        for x in xs:
            h = self.step[0](h, x)
        return h


def matrices(*batch: int, size: int = 4) -> Tensor:
    return torch.randn(STEPS, *batch, size, size) + 3 * torch.eye(size)


@pytest.mark.sampled
@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
@pytest.mark.parametrize("step", ALL, ids=lambda step: step.__name__)
def test_a_loop_is_one_kernel_and_trains(step: Step, batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    report = check(Loop(step), (matrices(*batch),), train=True)
    assert report.passed, report
    assert report.fallbacks == ()
    assert report.observed[1] <= 2
    assert report.observed_backward[1] < STEPS


@pytest.mark.sampled
@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 7, MOST_ROWS])
def test_matrices_of_any_small_size_are_right(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for step in (inverted, solved, whitened):
        report = check(Loop(step, size).to(dtype), (matrices(2, size=size).to(dtype),))
        assert report.passed, report
        assert report.observed[1] == 1


def test_larger_matrices_stay_with_the_library() -> None:
    (loop,) = fuse.show(Loop(inverted, MOST_ROWS + 1), (matrices(size=MOST_ROWS + 1),)).loops
    assert loop.launches_per_step_after > 0


def test_rows_are_swapped_for_the_largest_pivot() -> None:
    model, xs = Loop(inverted), matrices(2)
    xs[:] = torch.tensor([[0.0, 2, 0, 0], [0, 0, 3, 0], [1, 0, 0, 0], [1e-6, 1, 0, 5]])
    report = check(model, (xs,))
    assert report.passed, report
    assert report.observed[1] == 1


@pytest.mark.parametrize("step", [inverted, solved], ids=lambda step: step.__name__)
def test_a_singular_matrix_raises_as_in_eager(step: Step) -> None:
    model = Loop(step)
    nn.init.zeros_(model.weight)
    fused, xs = fuse.compile(copy.deepcopy(model)), matrices(3)
    fused(xs)
    assert fused.last_run.launches <= 3
    xs[0, 1] = 0
    for one in (model, fused):
        with pytest.raises(torch.linalg.LinAlgError, match=r"\(Batch element 1\)"):
            one(xs)


def test_a_matrix_that_is_not_definite_raises_as_in_eager() -> None:
    model = Loop(lambda h, x: torch.linalg.cholesky(x) + h)
    xs = torch.eye(4).repeat(STEPS, 2, 1, 1)
    fused = fuse.compile(copy.deepcopy(model))
    fused(xs)
    xs[5, 0, 2, 2] = -1
    for one in (model, fused):
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
            one(xs)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1 + 2**-23], ids=str)
def test_where_eager_may_raise_the_result_is_eagers(number: float) -> None:
    model = Loop(lambda h, x: torch.linalg.solve(x, h + 1))
    xs = torch.eye(4).repeat(STEPS, 2, 1, 1)
    xs[..., 3, 2] = 1
    fused = fuse.compile(copy.deepcopy(model))
    with torch.no_grad():
        fused(xs)
        xs[3, 1, 2, 3] = 1
        xs[3, 1, 3, 3] = number
        with pytest.warns(UserWarning, match="a matrix may be singular"):
            result = fused(xs)
        torch.testing.assert_close(result, model(xs), rtol=0, atol=0, equal_nan=True)
        assert fused.last_run.fallbacks


def error_of(model: Callable[[Tensor], Tensor], xs: Tensor) -> str:
    try:
        model(xs)
    except torch.linalg.LinAlgError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e18], ids=str)
def test_errors_are_eagers_for_random_matrices_of_few_integers(scale: float) -> None:
    model = Loop(lambda h, x: torch.linalg.cholesky(x @ x.mT) + torch.linalg.inv(x) + 0 * h, 3)
    fused, errors = fuse.compile(copy.deepcopy(model)), []
    for seed in range(40):
        torch.manual_seed(seed)
        xs = torch.eye(3).repeat(STEPS, 2, 1, 1)
        xs[-1] = (torch.randint(-2, 3, (2, 3, 3)) + 2 * (seed % 2) * torch.eye(3)) * scale
        errors.append(error_of(model, xs))
        assert error_of(fused, xs) == errors[-1]
    assert any(errors)


def test_errors_that_the_caller_reads_stay_with_the_library() -> None:
    def step(h: Tensor, x: Tensor) -> Tensor:
        inverse, info = torch.linalg.inv_ex(x)
        return h + inverse * (info == 0).unsqueeze(-1).unsqueeze(-1)

    model, xs = Loop(step), matrices(2)
    xs[2, 1] = 0
    report = check(model, (xs,))
    assert report.passed, report
    assert report.observed[1] > STEPS
