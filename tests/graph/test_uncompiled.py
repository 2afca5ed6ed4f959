"""Functions that torch.compile made are captured as they were written, and are compiled again afterwards."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.graph.patches.uncompiled import uncompiled


class Counting:
    """A backend of torch.compile that counts the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Block(nn.Module):
    """Holds a compiled module and a compiled function."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.compiled = torch.compile(self.layers, backend=backend)
        self.scaled = torch.compile(lambda x: x.sin() * 2 + 1, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.compiled(x))


@pytest.mark.parametrize("training", [False, True])
def test_compiled_parts_of_a_model_are_fused(training: bool) -> None:
    backend = Counting()
    model, x = Block(backend), torch.randn(2, 4)
    fused = fuse.compile(model)
    with torch.set_grad_enabled(training), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fused(x)
    assert backend.graphs == 0
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(found, model(x))
    assert backend.graphs == 2  # eager's call above compiles, as without fuse
    assert fused.last_run.fallbacks == ()
    assert fused.last_run.launches == 2
    if training:
        found.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()])


def test_a_model_that_compiles_in_forward_is_captured_though_dynamo_was_not_imported() -> None:
    code = """
import sys, torch, fuse
class Late(torch.nn.Module):
    def forward(self, x):
        return torch.compile(lambda y: y.sin() * 2, backend="eager")(x)
before = torch.compile
model = Late()
fused = fuse.compile(model)
with torch.no_grad():
    assert "torch._dynamo" not in sys.modules
    found = fused(torch.ones(3))
assert torch.compile is before
assert torch.equal(found, model(torch.ones(3)))
assert fused.last_run.fallbacks == () and fused.last_run.launches == 1, fused.last_run
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)


def test_functions_are_compiled_again_after_an_error() -> None:
    backend = Counting()
    double = torch.compile(lambda x: x * 2, backend=backend)
    with pytest.raises(IndexError), uncompiled():
        double(torch.ones(1))[1]
    assert backend.graphs == 0
    double(torch.ones(1))
    assert backend.graphs == 1


def test_capture_within_a_compiled_region_is_left_alone() -> None:
    """Dynamo calls its backend, and what the backend made, within such a region."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled, x = torch.compile(model, backend="fuse"), torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
