"""Other ways to run through the loops of a kernel than the one that costs say; see
``tests/runtime/test_candidates.py`` for what they compute."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fuse.kernel.config import DEFAULT, Config, Threads
from fuse.kernel.lower import Kernel, lower


def region_of(function: Callable[..., Any], *args: Tensor) -> GraphModule:
    graph: GraphModule = make_fx(lambda *inputs: (function(*inputs),), tracing_mode="fake")(*args)
    return graph


def shared_out(
    function: Callable[..., Any], *args: Tensor, threads: Threads = "inside", config: Config = DEFAULT
) -> str:
    """The source of another way to run through the loops, and the lines that ask for threads."""
    kernel = lower(region_of(function, *args), threads, config)
    assert isinstance(kernel, Kernel)
    return "\n".join(line.strip() for line in kernel.source.splitlines() if "omp parallel" in line)


def test_a_sum_of_all_may_be_shared_out_by_rows() -> None:
    x = torch.ones(400, 400)
    assert shared_out(torch.sum, x) == "#pragma omp parallel for"
    assert not shared_out(torch.sum, x, threads="if worth it")
    assert not shared_out(torch.argmax, x)  # in order
    assert not shared_out(lambda x: x.sum(0), x[:, :64])  # each row adds to what the row before has stored


def test_few_rows_may_be_shared_out_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for rows, lines in ((3, 2), (4, 1), (9, 1)):
        text = shared_out(lambda x: x / x.sum(-1, keepdim=True), torch.ones(rows, 70000))
        assert len(text.splitlines()) == lines
        assert ("simd" in text) == (lines > 1)


def test_threads_may_be_woken_for_less() -> None:
    x = torch.ones(60, 70)
    kernel = lower(region_of(torch.tanh, x))
    assert isinstance(kernel, Kernel)
    assert not kernel.parallel
    assert shared_out(torch.tanh, x, threads="early") == "#pragma omp parallel for simd"


def test_columns_may_be_reduced_in_smaller_blocks() -> None:
    assert shared_out(lambda x: x.sum(0), torch.ones(4000, 128), threads="if worth it", config=Config(lanes=64))


def test_loops_may_run_in_the_next_best_order() -> None:
    graph = region_of(lambda x: x.t().contiguous() + 1, torch.ones(30, 40))
    one, other = (lower(graph, config=Config(order=place)) for place in (0, 1))
    assert isinstance(one, Kernel)
    assert isinstance(other, Kernel)
    assert one.source.index("i0 <") < one.source.index("i1 <")
    assert other.source.index("i1 <") < other.source.index("i0 <")
