"""Reductions of what reductions leave: one kernel, whatever lies between and behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fuse.graph.function import Function
from fuse.report.show import show
from fuse.testing import assert_fuses

X = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))


def centred(x: Tensor) -> object:
    y = x.amax(-1, keepdim=True)
    return F.gelu(y - y.mean(0, keepdim=True))


def loss(x: Tensor) -> object:
    return ((x * x).sum(-1).sqrt() - 1).abs().mean() * 0.5


def whole_rows_too(x: Tensor) -> object:
    y = torch.log_softmax(x, -1)
    return y, y.amax(-1).mean()


def standardised(x: Tensor) -> object:
    y = x.logsumexp(1)
    return (y - y.mean()) / (y.var() + 1e-5).sqrt(), y


def where_the_least_maximum_is(x: Tensor) -> object:
    y = x.amax(-1)
    return y.argmin(), y.min() + 1, x.argmax(-1).sum()


def columns(x: Tensor) -> object:
    return x.sum(0).tanh().prod()


ONE_KERNEL = [centred, loss, whole_rows_too, standardised, where_the_least_maximum_is, columns]


@pytest.mark.parametrize("function", ONE_KERNEL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_reduces_what_it_has_reduced(function: Callable[[Tensor], object], dtype: torch.dtype) -> None:
    assert_fuses(Function(function), X.to(dtype), launches=1)


def test_not_a_number_stays_one() -> None:
    x = X.clone()
    x[2, 3] = torch.nan
    assert_fuses(Function(centred), x, launches=1)


def all_elements_again(x: Tensor) -> object:
    y = x.sigmoid()
    return y * y.sum(-1).amax()


def other_columns(x: Tensor) -> object:
    return x.sum(-1).mean() + x.sum(0)


def three_levels(x: Tensor) -> object:
    return x.reshape(6, 4, 10).sum(-1).amax(-1).prod()


@pytest.mark.parametrize("function", [all_elements_again, other_columns, three_levels], ids=lambda f: f.__name__)
def test_what_one_kernel_does_not_pay_for_takes_two(function: Callable[[Tensor], object]) -> None:
    assert_fuses(Function(function), X, launches=2)


def test_any_loops_may_read_what_is_held(run: Callable[..., Any]) -> None:
    run(lambda x: torch.stack([x.sum(), x.mean()]), X).check()
    run(all_elements_again, X).check()
    run(three_levels, X).check()


def test_many_rows_are_not_held() -> None:
    assert_fuses(Function(lambda x: x.sum(-1).sqrt().sum()), torch.rand(4096, 2), launches=1)
    assert_fuses(Function(lambda x: x.sum(-1).sqrt().sum()), torch.rand(4097, 2), launches=2)


def many_maxima(x: Tensor) -> object:
    functions = (torch.cos, torch.exp, torch.tanh)
    y = x[:, 0]
    for i in range(34):
        y = functions[i * i % 7 % 3]((x * i).sin().amax(-1)) * y
    return y.mean()


def test_what_is_held_fits_on_the_stack() -> None:
    report = show(Function(many_maxima), (torch.rand(4096, 2, dtype=torch.float64),), {})
    assert report.after.launches == 2


@settings(max_examples=8, deadline=None)
@given(
    shape=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    order=st.randoms(use_true_random=False),
    first=st.sampled_from([torch.sum, torch.amax, torch.logsumexp]),
    then=st.sampled_from([torch.mean, torch.amin, torch.prod]),
    keepdim=st.booleans(),
)
def test_any_rows(shape: list[int], order: object, first: Callable, then: Callable, keepdim: bool) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)
    x = torch.randn([shape[d] for d in dims]).permute([dims.index(d) for d in range(len(shape))])

    def model(x: Tensor) -> object:
        y = first(x, -1, keepdim=keepdim)
        return then(y, 0, keepdim=True) * 2 + y

    assert_fuses(Function(model), x)
