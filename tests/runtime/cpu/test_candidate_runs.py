"""How ways to compute a region are run to be measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fuse.kernel.config import Config
from fuse.kernel.kernel import Kernel
from fuse.kernel.lower import lower
from fuse.runtime.cpu import candidate_runs
from fuse.runtime.cpu.candidate_runs import made_up, run_of_library, runs_of_kernels

ONE_LIBRARY_LAUNCH = 1 << 32
aten = torch.ops.aten


def region_of(function: Callable[..., Any], *args: Tensor) -> GraphModule:
    graph: GraphModule = make_fx(lambda *inputs: (function(*inputs),), tracing_mode="fake")(*args)
    return graph


def test_made_up_operands_lie_as_the_call_has_them() -> None:
    for value in (torch.empty(3, 4).t(), torch.empty(2, 3, dtype=torch.int64), torch.empty(3, dtype=torch.bool)):
        held = made_up(value)
        assert (held.shape, held.stride(), held.dtype) == (value.shape, value.stride(), value.dtype)
        assert held.dtype.is_floating_point or not held.any()


@pytest.mark.parametrize("value", [torch.empty(3, 1).expand(3, 4), torch.empty(6).as_strided((4, 3), (1, 1))])
def test_elements_of_made_up_operands_may_share_a_place(value: Tensor) -> None:
    held = made_up(value)
    assert held.stride() == value.stride()
    assert held.isfinite().all()


def test_kernels_are_compiled_together_when_the_first_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = candidate_runs.addresses_of

    def counted(kernels: Iterable[Kernel]) -> dict[str, int]:
        together = list(kernels)
        built.append(len(together))
        return build(together)

    monkeypatch.setattr(candidate_runs, "addresses_of", counted)
    region = region_of(torch.tanh, torch.ones(300, 300))
    kernels = {"usual": lower(region), "one": lower(region, Config(threads="one"))}
    runs = runs_of_kernels(region, {name: kernel for name, kernel in kernels.items() if isinstance(kernel, Kernel)})
    assert not built
    assert [run() for run in (*runs.values(), *runs.values())] == [0, 0, 0, 0]
    assert built == [2]


@pytest.mark.parametrize("right", [torch.ones(4, 5), torch.ones(5, 4).t()])
def test_a_product_of_the_library_is_a_native_launch(right: Tensor) -> None:
    for region in (
        region_of(torch.mm, torch.ones(3, 4), right),
        region_of(torch.addmm, torch.ones(5), torch.ones(3, 4), right),
    ):
        assert run_of_library(region)() == ONE_LIBRARY_LAUNCH


def test_what_the_library_does_not_take_is_a_call() -> None:
    halves = region_of(torch.mm, torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(4, 5, dtype=torch.bfloat16))
    stride, shape, dtype, _ = run_of_library(halves)()
    assert (stride, shape, dtype) == ((5, 1), (3, 5), torch.bfloat16)
    image = region_of(lambda x, w: F.conv2d(x, w), torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3))
    assert run_of_library(image)()[1] == (1, 3, 3, 3)


def test_a_call_takes_as_long_as_it_does_in_a_program() -> None:
    run = run_of_library(region_of(torch.mm, torch.ones(3, 4).bfloat16(), torch.ones(5, 4).bfloat16().t()))
    run()
    start = time.perf_counter()
    run()
    assert time.perf_counter() - start > candidate_runs.REST_OF_A_CALL
