"""Kernels that are printed as Python: points, rows, levels, scans and look-ups, without a line of C++."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fuse.check.compare import compare
from fuse.graph.capture import capture
from fuse.graph.loop import Loop
from fuse.graph.outputs import outputs_of
from fuse.kernel import target
from fuse.kernel.ir import KernelBody
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.loops.lower_loops import lower_loop
from fuse.kernel.lower import lower
from fuse.kernel.nests.schedule import schedule
from fuse.kernel.recipes.reading import computation_of
from fuse.rewrite.pipeline import run_passes
from tests.kernel.python_target import python_of, run, run_source


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y = numbers(5, 6), numbers(5, 6, seed=1)
CASES: Mapping[str, tuple[Any, ...]] = {
    "points": (lambda x, y: torch.tanh(x) * (1 - y * y), X, Y),
    "broadcast and transposed": (lambda x, y: (x.t() + y).relu(), X, numbers(5)),
    "two orders of stores": (lambda x: (x.exp(), x.t().contiguous() * 2), X),
    "padded": (lambda x: functional.pad(x, (1, 2, 0, 1), value=3.0) * 2, X),
    "pieces": (lambda x, y: torch.cat([x, y * 2, x], 1) + 1, X, Y),
    "halves": (lambda x, y: (x * y + x) * y, X.bfloat16(), Y.bfloat16()),
    "float16": (lambda x, y: (x * y + x) * y, X.half(), Y.half()),
    "integers wrap around": (lambda x: x * 37 + 100, torch.arange(-128, 128, dtype=torch.int8)),
    "bits": (lambda x, y: (x & y) | ~x, torch.arange(64), torch.arange(64) * 5),
    "bools": (lambda x, y: (x > 0) & ~(y > 0), X, Y),
    "triangle": (lambda x: torch.tril(x) - torch.triu(x, 1), X),
    "pool": (lambda x: functional.max_pool2d(x, 3, 2, 1), numbers(1, 2, 7, 7)),
    "sum": (lambda x: x.sum(), X),
    "rows": (lambda x: torch.softmax(x * 2, -1), X),
    "columns in lanes": (lambda x: torch.softmax(x, 0), X),
    "norm": (lambda x, w: functional.layer_norm(x, (6,), w), X, numbers(6)),
    "extremes and positions": (lambda x: (x.max(1), x.argmin(1)), X),
    "positions in lanes": (lambda x: x.argmin(0), X),
    "levels": (lambda x: x.amax(-1) - x.amax(-1).mean(0), X),
    "truths": (lambda x: ((x > 0).any(1), (x > -1).all(1)), X),
    "embedding": (lambda w, i: functional.embedding(i, w) * 2, X, torch.tensor([4, 0, 2])),
    "indexed from the end": (lambda w, i: w[i] + 1, X, torch.tensor([-1, 0, 2])),
    "loss": (lambda x, t: functional.nll_loss(x, t), X, torch.tensor([1, 0, 5, 2, 2])),
}


class Function(nn.Module):
    """A function as a module with a flat tuple of results."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        return tuple(torch.utils._pytree.tree_leaves(self.function(*args)))


def loops_of(function: Any, *args: Tensor) -> tuple[KernelBody, list[Tensor]]:
    """The loops of a function, and what they read."""
    graph = capture(Function(function), args)
    inputs = [args[s.index] if s.kind == "argument" else s.value for s in graph.meta["signature"].inputs]
    return schedule(computation_of(graph)), inputs


@pytest.mark.parametrize("name", list(CASES))
def test_python_computes_what_eager_does(name: str) -> None:
    function, *args = CASES[name]
    body, inputs = loops_of(function, *args)
    with torch.no_grad():
        results = torch.utils._pytree.tree_leaves(function(*args))
    out = [torch.full_like(result, 7) for result in results]
    assert run(body, [*inputs, *out])
    for mine, theirs in zip(out, results, strict=True):
        assert not (problem := compare("", mine, theirs).problem), problem


class Network(nn.Module):
    """Products, a norm, softmax and a loop: what passes fuse, in a few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm, self.cell = nn.LayerNorm(6), nn.GRUCell(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x[0] * 0
        for step in x:
            h = self.cell(step, h)
        y = self.norm(x + self.second(functional.gelu(self.first(x))))
        return torch.softmax(y @ y.transpose(1, 2), -1) @ y, h.tanh() * 2


class InPython(torch.fx.Interpreter):
    """Runs a rewritten graph with the kernels that the target wrote for its regions; counts them."""

    kernels = 0

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if isinstance(module, Loop):
            (call,) = (node for node in self.module.graph.nodes if node.target == target)
            return self.run_kernel(lower_loop(module, args, call.meta["val"]), args, call.meta["val"])
        if isinstance(module, torch.fx.GraphModule) and isinstance(kernel := lower(module), Kernel):
            expected = [node.meta["val"] for node in outputs_of(module.graph)]
            results = self.run_kernel(kernel, args, expected)
            return results if isinstance(module.graph.output_node().args[0], (tuple, list)) else results[0]
        return super().call_module(target, args, kwargs)

    def run_kernel(self, kernel: Kernel | Declined, args: Sequence[Tensor], expected: Sequence[Tensor]) -> Any:
        assert isinstance(kernel, Kernel), kernel
        results = tuple(torch.empty_strided(e.shape, e.stride(), dtype=e.dtype) for e in expected)
        assert run_source(kernel.source, [*args, *results])
        self.kernels += 1
        return results


def passes_run_for_python() -> int:
    """Rewrite the network by all passes for the Python target, run it with its kernels, and count them."""
    target.TARGETS["cpu"] = "tests.kernel.python_target"
    torch.manual_seed(0)
    model, x = Network().eval(), numbers(4, 2, 6)
    graph = capture(model, (x,))
    inputs = [x if s.kind == "argument" else model.get_parameter(s.name) for s in graph.meta["signature"].inputs]
    with torch.no_grad():
        run_passes(graph)
        runner = InPython(graph)
        results, expected = runner.run(*inputs), model(x)
    for mine, theirs in zip(results, expected, strict=True):
        assert not (problem := compare("", mine, theirs).problem), problem
    return runner.kernels


def test_no_cpp_is_needed() -> None:
    code = """
import sys
sys.modules["fuse.kernel.cpu"] = None
from tests.kernel import test_python_target as cases
for name in cases.CASES:
    cases.test_python_computes_what_eager_does(name)
print(len(cases.CASES), "kernels,", cases.passes_run_for_python(), "of a network")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == f"{len(CASES)} kernels, 5 of a network\n", ran.stderr


def test_an_index_out_of_range_writes_nothing() -> None:
    body, _ = loops_of(lambda w, i: functional.embedding(i, w), X, torch.tensor([4, 0]))
    out = torch.full((2, 6), 7.0)
    assert not run(body, [X, torch.tensor([4, 5]), out])
    assert (out == 7).all()


def test_the_source_reads_like_the_loops() -> None:
    source = python_of(loops_of(lambda x: x * 0.5, X)[0])
    assert "_at = load(" in source
    assert "* float32(0.5))" in source
