"""What lowering promises: names, sharing, comments, what may be overwritten, and reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fuse.errors import FaultWarning
from fuse.kernel.cpu.prelude import prelude
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.lower import lower
from fuse.kernel.recipes import registry as recipes
from fuse.runtime.cpu.compiler import build

X = torch.randn(4, 8)


def kernel_of(lowered: Callable[..., Any], function: Callable[..., Any], *args: Tensor) -> Kernel:
    kernel = lowered(function, *args).kernel
    assert isinstance(kernel, Kernel), kernel
    return kernel


def test_the_name_tells_what_is_computed(lowered: Callable[..., Any]) -> None:
    kernel = kernel_of(lowered, lambda x: torch.tanh(x) * x + 1, X)
    assert kernel.name.startswith("tanh_mul_add_")
    assert f'extern "C" int {kernel.name}(char *const *args)' in kernel.source


def test_the_same_region_twice_is_one_kernel() -> None:
    first, second = (make_fx(lambda x: (torch.tanh(x) + 1,), tracing_mode="fake")(X) for _ in range(2))
    assert lower(first) is lower(second)


def test_another_stride_or_shape_or_number_is_another_kernel(lowered: Callable[..., Any]) -> None:
    names = {kernel_of(lowered, lambda x: x * 2, t).name for t in (X, X.t(), X[:2], X.double())}
    names.add(kernel_of(lowered, lambda x: x * 3, X).name)
    assert len(names) == 5


def test_a_fault_of_a_recipe_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(call: Any) -> Any:
        return [][1]

    monkeypatch.setitem(recipes._RECIPES, "cosh", faulty)
    region = make_fx(lambda x: (torch.cosh(x) * 0.3,), tracing_mode="fake")(X)
    with pytest.warns(FaultWarning, match="IndexError"):
        declined = lower(region)
    assert declined == Declined("internal error, please report it: IndexError: list index out of range")


def test_the_users_line_is_a_comment(lowered: Callable[..., Any]) -> None:
    assert "test_lower.py:" in kernel_of(lowered, lambda x: x * 2, X).source.splitlines()[0]


def test_an_input_read_only_where_it_is_written_may_be_overwritten(lowered: Callable[..., Any]) -> None:
    assert kernel_of(lowered, lambda x, y: x * y, X, X + 1).in_place == {(0, 0), (1, 0)}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + x.flip(0),
        lambda x: x + x[0],
        lambda x: torch.softmax(x, 1),
        lambda x: torch.cat([x[:, 4:], x[:, :4]], 1),
        lambda x: x.double() * 2,
    ],
)
def test_an_input_read_elsewhere_too_may_not(lowered: Callable[..., Any], function: Callable[[Tensor], Tensor]) -> None:
    assert kernel_of(lowered, function, X).in_place == frozenset()


def test_a_chain_of_thousands_of_operators_is_one_kernel(lowered: Callable[..., Any]) -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(1500):
            x = x * 0.999 + 0.001
        return x

    assert kernel_of(lowered, chain, X).source.count("\n") > 3000


def test_names_that_mean_something_in_cpp_are_no_trouble() -> None:
    graph = make_fx(lambda a, b, c, d, e: (torch.tanh(a * b) * c + d * e,), tracing_mode="fake")(*[X] * 5)
    names = ("int", "i0", "out0", "fuse_tanh", "INT64_MAX")
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = name
    kernel = lower(graph)
    assert isinstance(kernel, Kernel)
    assert hasattr(build(prelude() + kernel.source), kernel.name)


def test_inputs_named_like_operators_do_not_hide_them(run: Callable[..., Any]) -> None:
    def function(x: Tensor, mul: Tensor, mul_1: Tensor) -> Tensor:
        return (x * mul) * (x * mul_1) * mul

    run(function, torch.randn(3, 1), torch.randn(1), torch.randn(3, 4)).check(exact=True)


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (lambda x: x[None] @ x.t()[None], (X,), "a batch of products is left to the library"),
        (lambda x: x.cumsum(0), (X,), "has no kernel"),
        (lambda x: x * 2, (X.to(torch.complex64),), "dtype torch.complex64"),
        (lambda x: x * 2, (X[:0],), "no elements"),
        (
            lambda x, y: torch.remainder(x, y),
            (torch.arange(4), torch.arange(4) + 1),
            "an integer division by zero would end the process",
        ),
        (
            lambda x: torch.div(x, -1, rounding_mode="floor"),
            (torch.arange(4),),
            "an integer division by zero would end the process",
        ),
        (lambda x: torch.round(x, decimals=2), (X,), "has no kernel"),
        (lambda x: (x.sum(0), x.sum(1)), (X,), "different dimensions"),
    ],
)
def test_what_cannot_be_lowered_says_why(
    lowered: Callable[..., Any], function: Callable[..., Any], args: tuple[Tensor, ...], reason: str
) -> None:
    kernel = lowered(function, *args).kernel
    assert isinstance(kernel, Declined)
    assert reason in kernel.reason


def of_chain(function: Callable[[Tensor], Tensor], x: Tensor) -> Kernel | Declined:
    return lower(make_fx(lambda x: (function(x),), tracing_mode="fake")(x))


def test_pieces_within_pieces_do_not_make_a_kernel_that_doubles_with_each() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(24):
            x = torch.cat([x[1:] + 1, x[:1] * 2]) + x
        return x

    verdict = of_chain(function, torch.randn(4, 3))
    assert isinstance(verdict, Declined), "if such chains are shared one day, hold the source's size instead"
    assert "one by one" in verdict.reason


def test_rows_written_twice_are_read_once_by_a_chain_of_writes() -> None:
    def function(x: Tensor) -> Tensor:
        for i in range(24):
            x = torch.select_scatter(x, x[i // 2] + x[11 - i // 2], 0, i // 2)
        return x

    kernel = of_chain(function, torch.randn(12, 3))
    assert isinstance(kernel, Kernel)
    assert len(kernel.source.splitlines()) < 200


def test_of_pieces_within_pieces_only_those_are_computed_that_are_read() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(24):
            x = torch.stack([x[0] + 1, x[1] * 2, x[1] + x[0]])[:2] + torch.stack([x[1], x[0]])
        return torch.nn.functional.pad(x, (1, 1))[:, 1:-1]

    kernel = of_chain(function, torch.randn(2, 3))
    assert isinstance(kernel, Kernel)
    assert kernel.source.count("inside") < 24
    assert len(kernel.source.splitlines()) < 600
