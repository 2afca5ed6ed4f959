"""The last copies of a call come in an order in which none reads what another has overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuse.check.oracle import check
from fuse.graph.function import Function


def swap(x: Tensor, y: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def shift(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    x.copy_(y)
    y.copy_(z)
    z.zero_()
    return x * 2


def rotate(x: Tensor, y: Tensor, z: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(z)
    z.copy_(old)


def reverse(x: Tensor, y: Tensor) -> None:
    x.copy_(x.clone().t())
    y.add_(1)


def one_into_two(x: Tensor, y: Tensor, z: Tensor) -> None:
    old = x.clone()
    x.add_(1)
    y.copy_(old)
    z.copy_(old.t())


CALLS: dict[str, tuple[Callable[..., Any], int]] = {  # launches, fused
    "swap": (swap, 3),
    "shift": (shift, 4),
    "rotate": (rotate, 4),
    "reverse": (reverse, 2),
    "one_into_two": (one_into_two, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_input_gets_its_value_in_as_few_copies_as_counted(name: str) -> None:
    function, launches = CALLS[name]
    inputs = [torch.randn(4, 4) for _ in range(function.__code__.co_argcount)]
    report = check(Function(function), inputs)
    assert report.passed, str(report)
    assert report.observed[1] == report.predicted[1] == launches


@pytest.mark.parametrize("name", CALLS)
def test_without_a_compiler_the_order_holds_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    function, _ = CALLS[name]
    report = check(Function(function), [torch.randn(4, 4) for _ in range(function.__code__.co_argcount)])
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("inputs", "launches"),
    [
        ([torch.randn(4), torch.randn(3, 5).t(), torch.arange(6), torch.tensor(2)], 2),
        (
            [torch.randn(4).bfloat16(), torch.randn(5).double(), torch.randn(7).half(), torch.arange(5).to(torch.int8)],
            2,
        ),
        ([torch.randn(8, 8)[::2, 1:], torch.randn(())], 2),
        ([torch.randn(4), torch.randn(600_000), torch.randn(3)], 4),  # a large one is copied for itself
        ([torch.randn(4, dtype=torch.complex64), torch.randn(4), torch.randn(5)], 4),  # no kernel for complex numbers
    ],
)
def test_small_values_are_written_together(inputs: list[Tensor], launches: int) -> None:
    def add(*tensors: Tensor) -> None:
        for tensor in tensors:
            tensor.add_(1)

    report = check(Function(add), inputs)
    assert report.passed, str(report)
    assert report.observed[1] == launches


def test_statistics_of_batch_norms_are_written_by_one_kernel() -> None:
    layers = [nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(5)]
    model = nn.Sequential(*layers).train()
    report = check(model, (torch.randn(6, 4),))
    assert report.passed, str(report)
    assert report.observed == (15, 11)  # norms join what follows; products; the counters added, everything written back
