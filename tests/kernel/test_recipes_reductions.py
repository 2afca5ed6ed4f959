"""Reductions, softmax and norms as kernels: against float64, with eager's dtypes, ties, NaN and empty-handed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fuse
from fuse.check.oracle import check
from fuse.testing import assert_fuses

Cases = dict[str, tuple[Any, ...]]
INF, NAN = float("inf"), float("nan")
HALVES = (torch.bfloat16, torch.float16)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def odd_rows() -> Tensor:
    """Rows of -inf only, inf, NaN, equal numbers, zeros."""
    rows = numbers(8, 9)
    rows[0] = -INF
    rows[1, 3] = INF
    rows[2, 4] = NAN
    rows[3] = 1.5
    rows[4] = 0.0
    rows[5, 2:7] = -INF
    rows[6, 1], rows[6, 7] = NAN, NAN
    return rows


def sums() -> Cases:
    x, y = numbers(6, 5, 7), numbers(6, 5, 7).transpose(0, 2)
    cases: Cases = {
        "sum of all": (lambda x: x.sum(), x),
        "sum over the last": (lambda x: x.sum(-1), x),
        "sum over the first": (lambda x: x.sum(0), x),
        "sum over the middle, kept": (lambda x: x.sum(1, keepdim=True), x),
        "sum over two": (lambda x: x.sum((0, 2)), x),
        "sum over no list": (lambda x: x.sum([]), x),
        "sum of transposed": (lambda x: x.sum(-1), y),
        "sum of a scalar": (lambda x: x.sum(), torch.tensor(3.0)),
        "sum over an extent of one": (lambda x: x.sum(1), numbers(4, 1, 3)),
        "sum of ints": (lambda x: x.sum(1), torch.arange(12, dtype=torch.int32).view(3, 4)),
        "sum of bools": (lambda x: x.sum(), numbers(40) > 0),
        "sum of floats as ints": (lambda x: x.sum(0, dtype=torch.int64), torch.full((5, 3), 0.6)),
        "sum as bool": (lambda x: x.sum(0, dtype=torch.bool), torch.tensor([[1, 0], [-1, 0]])),
        "sum as double": (lambda x: x.sum(0, dtype=torch.float64), x),
        "sum as half": (lambda x: x.sum(0, dtype=torch.bfloat16), x),
        "sum of expanded": (lambda x: x.sum(0), numbers(1, 9).expand(5, 9)),
        "mean": (lambda x: x.mean((0, 1)), x),
        "mean of ints as floats": (lambda x: x.mean(0, dtype=torch.float32), torch.arange(12).view(4, 3)),
        "product": (lambda x: x.prod(1), x),
        "product of ints": (lambda x: x.prod(0), torch.arange(1, 13).view(4, 3)),
        "product of all": (lambda x: x.prod(), numbers(9)),
        "2-norm": (lambda x: torch.linalg.vector_norm(x, dim=1), x),
        "1-norm": (lambda x: torch.linalg.vector_norm(x, 1, dim=(0, 2)), x),
        "inf-norm": (lambda x: torch.linalg.vector_norm(x, INF), x),
        "norm as double": (lambda x: torch.linalg.vector_norm(x, dtype=torch.float64), x),
        "norm with NaN": (lambda x: torch.linalg.vector_norm(x, INF, dim=1), odd_rows()),
        "sums of odd rows": (lambda x: (x.sum(1), x.mean(1)), odd_rows()),
    }
    for dtype in HALVES:
        cases[f"sum of {dtype}"] = (lambda x: x.sum(1), x.to(dtype))
        cases[f"mean of {dtype}"] = (lambda x: x.mean(1), x.to(dtype))
        cases[f"mean of {dtype} as float"] = (lambda x: x.mean(1, dtype=torch.float32), x.to(dtype))
    return cases


def spreads() -> Cases:
    x = numbers(6, 5, 7) + 100
    return {
        "var": (lambda x: x.var(1), x),
        "var without correction": (lambda x: torch.var(x, (0, 2), correction=0), x),
        "var with correction 3": (lambda x: torch.var(x, 1, correction=3), x),
        "var of one element is NaN": (lambda x: x.var(1), numbers(4, 1)),
        "var of one element, uncorrected, is 0": (lambda x: torch.var(x, 1, correction=0), numbers(4, 1)),
        "var corrected to nothing": (lambda x: torch.var(x, 1, correction=5), numbers(4, 5)),
        "std of all": (lambda x: x.std(), x),
        "std and mean": (lambda x: torch.std_mean(x, 1, keepdim=True), x),
        "var and mean": (lambda x: torch.var_mean(x, 0), x),
        "standardised": (lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5), x),
        "var of halves": (lambda x: x.var(1), x.bfloat16()),
        "var of odd rows": (lambda x: x.var(1), odd_rows()),
    }


def extremes() -> Cases:
    x = odd_rows()
    ints = torch.tensor([[3, -5, 3], [-(2**63), 0, 2**63 - 1]])
    cases: Cases = {
        "amax": (lambda x: x.amax(1), x),
        "amin of all": (lambda x: x.amin(), numbers(5, 6)),
        "amax over the first": (lambda x: x.amax(0, keepdim=True), x),
        "max with positions": (lambda x: tuple(x.max(1)), x),
        "min with positions over the first": (lambda x: tuple(x.min(0)), x),
        "argmax": (lambda x: x.argmax(1), x),
        "argmin": (lambda x: x.argmin(1, keepdim=True), x),
        "argmax of all": (lambda x: x.argmax(), x),
        "argmax of all, kept": (lambda x: x.argmax(keepdim=True), numbers(3, 4)),
        "the first of equals": (lambda x: (x.argmax(1), x.argmin(1)), torch.ones(3, 40)),
        "the first NaN": (lambda x: (x.argmax(1), x.argmin(1)), torch.full((3, 40), NAN)),
        "extremes of ints": (lambda x: (x.amax(1), x.amin(1), x.argmax(1), x.argmin(1)), ints),
        "extremes of bytes": (lambda x: (x.amax(0), x.amin(0)), torch.arange(12, dtype=torch.uint8).view(3, 4)),
        "extremes of bools": (lambda x: (x.amax(1), x.amin(1)), numbers(4, 9) > 0),
        "extremes of halves": (lambda x: (x.amax(1), x.amin(1), x.argmax(1)), x.half()),
        "any": (lambda x: x.any(1), x > 1),
        "all of all": (lambda x: x.all(), x < 9),
        "any of floats": (lambda x: x.any(1), x.nan_to_num(0.0, 0.0, 0.0).round()),
        "any of bytes": (lambda x: x.any(0), torch.eye(3, dtype=torch.uint8)),
        "any over an empty list": (lambda x: torch.any(x, ()), x > 1),
        "long row": (lambda x: (x.amax(1), x.argmax(1), x.argmin(1)), numbers(3, 1000)),
    }
    return cases


def softmaxes() -> Cases:
    x = odd_rows()
    cases: Cases = {
        "softmax": (lambda x: functional.softmax(x, 1), x),
        "softmax over the first": (lambda x: functional.softmax(x, 0), numbers(8, 9)),
        "softmax over the middle": (lambda x: functional.softmax(x, 1), numbers(3, 8, 5)),
        "softmax in double": (lambda x: functional.softmax(x, 1, dtype=torch.float64), x),
        "softmax of a vector": (lambda x: functional.softmax(x, 0), numbers(100) * 30),
        "softmax of a scalar": (lambda x: functional.softmax(x, 0), torch.tensor(2.0)),
        "zeros where nothing is left": (lambda x: torch.ops.aten._safe_softmax.default(x, 1), x),
        "scaled and masked by the row": (
            lambda x, m: functional.softmax((x / 8).masked_fill(m, -INF), -1), numbers(4, 6, 48), numbers(4, 1, 48) > 0,
        ),
        "log-softmax": (lambda x: functional.log_softmax(x, 1), x),
        "log-softmax over the first": (lambda x: functional.log_softmax(x, 0), numbers(8, 9)),
        "logsumexp": (lambda x: torch.logsumexp(x, 1), x),
        "logsumexp over two": (lambda x: torch.logsumexp(x, (0, 2), keepdim=True), numbers(3, 8, 5)),
        "logsumexp of large numbers": (lambda x: torch.logsumexp(x, 1), numbers(4, 9) * 1e4),
        "logsumexp of ints": (lambda x: torch.logsumexp(x, 1), torch.arange(12).view(3, 4)),
        "scaled and masked": (
            lambda x, m: functional.softmax((x / 8).masked_fill(m, -INF), -1), numbers(4, 6, 50), numbers(4, 6, 50) > 0,
        ),
        "of halves": (lambda x: functional.softmax(x * 2 + 1, -1), numbers(8, 64).bfloat16()),
        "log of halves": (lambda x: functional.log_softmax(x, -1), numbers(8, 64).half()),
    }  # fmt: skip
    return cases


def norms() -> Cases:
    x, w, b = numbers(4, 6, 8), numbers(8, seed=1), numbers(8, seed=2)
    image = numbers(2, 6, 5, 3)
    channel, other = numbers(6, seed=1), numbers(6, seed=2)
    variance = numbers(6, seed=3).abs()
    cases: Cases = {
        "layer norm": (lambda x, w, b: functional.layer_norm(x, (8,), w, b), x, w, b),
        "layer norm bare": (lambda x: functional.layer_norm(x, (6, 8)), x),
        "layer norm of large numbers": (lambda x: functional.layer_norm(x + 1e4, (8,)), x),
        "layer norm of a sum": (lambda x, y, w: functional.layer_norm(x + y, (8,), w), x, x.flip(1), w),
        "rms norm": (lambda x, w: functional.rms_norm(x, (8,), w), x, w),
        "group norm": (lambda x, w, b: functional.group_norm(x, 3, w, b), image, channel, other),
        "group norm bare": (lambda x: torch.relu(functional.group_norm(x, 2)), image),
        "group norm of vectors": (lambda x: functional.group_norm(x, 2), numbers(5, 6)),
        "group norm, channels last": (
            lambda x, w: functional.group_norm(x, 3, w), image.to(memory_format=torch.channels_last), channel,
        ),
        "batch norm": (
            lambda x, m, v, w, b: functional.batch_norm(x, m, v, w, b), image, channel, variance, channel, other,
        ),
        "batch norm bare": (lambda x, m, v: functional.batch_norm(x, m, v), numbers(4, 6), channel, variance),
        "batch norm, channels last": (
            lambda x, m, v: functional.batch_norm(x, m, v),
            image.to(memory_format=torch.channels_last), channel, variance,
        ),
        "layer norm of halves": (lambda x, w, b: functional.layer_norm(x, (8,), w, b), *(t.half() for t in (x, w, b))),
    }  # fmt: skip
    return cases


GROUPS = {"sums": sums, "spreads": spreads, "extremes": extremes, "softmaxes": softmaxes, "norms": norms}


@pytest.fixture(scope="module")
def ran(run_together: Callable[..., Any]) -> Any:
    return run_together({name: case for group in GROUPS.values() for name, case in group().items()})


@pytest.mark.parametrize("name", [name for group in GROUPS.values() for name in group()])
def test_reductions_are_as_close_to_float64_as_eager(ran: Any, name: str) -> None:
    ran[name].check()


@pytest.mark.parametrize("name", list(extremes()))
def test_extremes_and_their_positions_are_eagers(ran: Any, name: str) -> None:
    ran[name].check(exact=True)


def test_a_long_sum_keeps_what_a_float_would_lose(run: Callable[..., Any]) -> None:
    ran = run(lambda x: x.sum(), torch.full((1_000_003,), 0.1))
    assert abs(ran.results[0].item() - 1_000_003 * torch.tensor(0.1).double().item()) < 0.01
    assert ran.kernel.parallel


def test_the_variance_of_distant_numbers_does_not_cancel(run: Callable[..., Any]) -> None:
    x = torch.arange(64.0) + 1e6
    assert run(lambda x: x.var(), x).results[0].item() == pytest.approx(x.double().var().item(), rel=1e-6)


def normalised_by_channel(norm: nn.Module, x: Tensor, launches: int) -> None:
    """In inference with the statistics of the batch, and with gradients."""
    model = nn.Sequential(norm, nn.SiLU()).train()
    assert_fuses(model, x, launches=launches)
    assert check(model, (x.clone().requires_grad_(),), train=True).passed


@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (2, 3, 4, 5, 2)])
def test_an_instance_norm_is_one_kernel(shape: tuple[int, ...]) -> None:
    norm = nn.InstanceNorm2d if len(shape) == 4 else nn.InstanceNorm3d
    normalised_by_channel(norm(3, affine=True), numbers(*shape), launches=1)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm2d(3), (4, 3, 5, 7)),
        (nn.BatchNorm2d(3, affine=False, momentum=0.3), (4, 3, 5, 7)),
        (nn.BatchNorm1d(6, eps=0.5), (9, 6)),
        (nn.BatchNorm3d(2).double(), (2, 2, 3, 4, 5)),
        (nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 1, 7)),
    ],
)
def test_a_batch_norm_in_training_moves_its_statistics_in_one_kernel(norm: nn.Module, shape: tuple[int, ...]) -> None:
    x = numbers(*shape).to(torch.float64 if shape[1] == 2 else torch.float32)
    normalised_by_channel(norm, x, launches=2 if norm.track_running_stats else 1)  # the second writes them back


@pytest.mark.parametrize("weighted", [True, False])
def test_a_batch_norm_in_training_does_not_move_the_mean_by_rounding(weighted: bool) -> None:
    """A difference from the mean is rounded the same way for floats of one size: the mean would be off by 1e-8."""
    norm = nn.BatchNorm2d(16, affine=weighted)
    compiled = fuse.compile(norm)
    with torch.no_grad():
        y = compiled(numbers(1, 16, 128, 128) / 10)
    assert compiled.last_run.regions
    assert y.double().mean((0, 2, 3)).abs().max() < 2e-9


def test_a_batch_norm_of_channels_side_by_side() -> None:
    normalised_by_channel(nn.BatchNorm2d(3), numbers(4, 3, 5, 7).contiguous(memory_format=torch.channels_last), 2)
