"""What is generated for a few lengths as one kernel for all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuse.kernel.cpu.any_length import for_any_length
from fuse.kernel.cpu.prelude import prelude
from fuse.kernel.lower import Declined, Kernel, lower
from fuse.runtime.compiler import build
from fuse.runtime.laws import law_of

LENGTHS = (11, 18, 37)
B, H = 3, 24


def joined(lowered: Callable[..., Any], function: Callable[..., Any], inputs: Callable[[int], list[Tensor]]) -> Any:
    """The kernels of a function at the short lengths, joined."""
    kernels = []
    for length in LENGTHS:
        args = inputs(length)
        kernel = lower(lowered(function, *args).graph, "asked in the call")
        assert isinstance(kernel, Kernel), kernel
        kernels.append(kernel)
    return for_any_length(kernels, len(args) + 1)


def steps(length: int) -> list[Tensor]:
    return [torch.randn(length, B, H), torch.randn(B, H)]


def batch_first(length: int) -> list[Tensor]:
    return [torch.randn(B, length, H), torch.randn(B, 1, H)]


def transposed(length: int) -> list[Tensor]:
    return [torch.randn(B, H, length).transpose(1, 2), torch.randn(B, 1, H)]


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[int], list[Tensor]]]] = {
    "elementwise": (lambda x, y: torch.tanh(x) * y, steps),
    "batch first": (lambda x, y: torch.tanh(x) * y, batch_first),
    "turned over": (lambda x, y: (x + y).contiguous(), transposed),
    "merged rows": (lambda x, y: (x * 2).reshape(-1, H) + y[0], steps),
    "norm of rows": (lambda x, y: torch.nn.functional.layer_norm(x + y, (H,)), steps),
    "sum over the length": (lambda x, y: (x * y).sum(0), steps),
    "mean over the length": (lambda x, y: (x * y).mean(1), batch_first),
    "positions": (lambda x, y: x + torch.arange(x.shape[0]).view(-1, 1, 1) * y, steps),
    "halves": (lambda x, y: (x.bfloat16() / x.shape[0]).float() + y, steps),
    "backwards": (lambda x, y: x.flip(0) - y, steps),
    "two in one": (lambda x, y: torch.cat([x, x.flip(0)], 0) * y, steps),
}


def run(kernel: Kernel, sizes: tuple[tuple[str, int], ...], args: list[Tensor], expected: Tensor) -> Tensor:
    library = build(prelude() + kernel.source)
    result = torch.full_like(expected, torch.nan)
    numbers = torch.tensor([value for _, value in sizes])
    pointers = [t.data_ptr() for t in (*args, result, numbers)]
    assert getattr(library, kernel.name)((ctypes.c_void_p * len(pointers))(*pointers)) == 0
    return result


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_is_right_at_every_length(name: str, lowered: Callable[..., Any]) -> None:
    function, inputs = CASES[name]
    kernels = joined(lowered, function, inputs)
    assert isinstance(kernels, list), kernels
    assert len({(kernel.name, kernel.source) for kernel in kernels}) == 1
    law = law_of(LENGTHS, [kernel.sizes for kernel in kernels])
    for length in (2, 11, 64, 999):
        args = inputs(length)
        expected = function(*args)
        torch.testing.assert_close(run(kernels[0], law(length), args, expected), expected)


def test_threads_are_asked_for_where_the_length_is_worth_them(lowered: Callable[..., Any]) -> None:
    (kernel, *_) = joined(lowered, *CASES["elementwise"])
    (pragma,) = [line for line in kernel.source.splitlines() if "omp parallel" in line]
    assert "if(parallel : size_" in pragma
    assert kernel.source == joined(lowered, *CASES["elementwise"])[0].source


NEAR_MISSES: dict[str, tuple[Callable[..., Tensor], Callable[[int], list[Tensor]], str]] = {
    "a number that is not whole": (lambda x, y: x * (1 / x.shape[0]) + y, steps, "becomes"),
    "another operator at another length": (lambda x, y: x + y if len(x) < 30 else x - y, steps, "becomes|otherwise"),
    "a row kept in local memory": (lambda x, y: torch.softmax(torch.exp(x) + y, 0), steps, "local memory"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_no_one_kernel_is_declined_with_the_reason(name: str, lowered: Callable[..., Any]) -> None:
    function, inputs, reason = NEAR_MISSES[name]
    found = joined(lowered, function, inputs)
    assert isinstance(found, Declined)
    assert any(part in found.reason for part in reason.split("|")), found.reason
