"""The kernels that may be the fastest for a region: what there is, and that all of them compute the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fuse
from fuse.kernel.kernel import Kernel
from fuse.kernel.lower import lower
from fuse.runtime.building import tuning
from fuse.runtime.cpu.candidates import kernels_of

Function = Callable[..., Any]


class Layers(nn.Module):
    """A layer of each kind, and a function of them and the inputs."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear = nn.Linear(96, 96)
        self.conv = nn.Conv2d(4, 32, 3, padding=1)
        self.function = (function,)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function[0](self, *inputs)


Case = tuple[Function, tuple[tuple[int, ...], ...], list[str]]

CASES: dict[str, Case] = {
    "a small product": (
        lambda m, x: F.relu(m.linear(x)),
        ((100, 96),),
        ["as costs say", "one thread", "2 panels", "1 panels"],
    ),
    "a convolution": (
        lambda m, x: F.relu(m.conv(x)),
        ((2, 4, 40, 40),),
        ["as costs say", "one thread", "share 2", "share 3", "1 panels"],
    ),
    "little work": (lambda m, x: x.tanh() + 1, ((9, 9),), []),
    "work that is just worth threads": (lambda m, x: x.tanh() + 1, ((90, 95),), ["as costs say", "one thread"]),
    "much work": (lambda m, x: x.tanh() + 1, ((900, 95),), []),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ways_compute_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, shapes, expected = CASES[case]
    model, inputs = Layers(function).eval(), [torch.randn(shape) for shape in shapes]
    offered: list[str] = []
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("FUSE_TUNE", "1")
    with torch.no_grad():
        exact = Layers(function).double()
        exact.load_state_dict(model.state_dict())
        reference = exact(*(x.double() for x in inputs)).to(torch.float32)
        for chosen in expected or [""]:

            def fastest(subject: str, found: Mapping[str, Callable[[], object]], name: str = chosen) -> str:
                found[name]()
                offered[:] = list(found)
                return name

            monkeypatch.setattr(tuning, "fastest", fastest)
            fused = fuse.compile(model)
            result = fused(*inputs).to(torch.float32)
            torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)
            assert (fused.last_run.launches, fused.last_run.kernels) == (1, 1)
    assert offered == expected


@pytest.mark.parametrize(("threads", "names"), [(1, ["as costs say"]), (2, ["as costs say", "one thread"])])
def test_with_one_thread_nothing_is_tried_that_is_for_threads(threads: int, names: list[str]) -> None:
    def moved(x: Tensor) -> tuple[Tensor]:
        return (x.tanh() + 1,)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        region: GraphModule = make_fx(moved, tracing_mode="fake")(torch.ones(90, 95))
        usual = lower(region)
        assert isinstance(usual, Kernel)
        assert list(kernels_of(region, usual)) == names
    finally:
        torch.set_num_threads(before)
