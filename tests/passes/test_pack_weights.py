from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.graph.capture import capture
from fuse.graph.freezing import freeze


def ledger_of(model: nn.Module, *args: Tensor) -> fuse.Ledger:
    """What the passes did to a frozen model."""
    with torch.no_grad():
        graph = capture(model, args)
    freeze(graph, model, {})
    return fuse.run_passes(graph)


def packed(model: nn.Module, *args: Tensor) -> int:
    return sum(rewrite.pass_name == "pack_weights" for rewrite in ledger_of(model, *args).rewrites)


def reasons(model: nn.Module, *args: Tensor) -> list[str]:
    return [one.reason for one in ledger_of(model, *args).rejected if one.pass_name == "pack_weights"]


def assert_frozen(model: nn.Module, *args: Tensor, kernels: int) -> None:
    """Frozen, the model gives what it gave, by so many kernels and no library."""
    fused = fuse.compile(model.eval(), freeze=True)
    with torch.no_grad():
        for _ in range(2):
            expected = copy.deepcopy(model).double()(*(x.double() if x.is_floating_point() else x for x in args))
            torch.testing.assert_close(fused(*args).double(), expected, rtol=1e-5, atol=1e-5)
        assert (fused.last_run.kernels, fused.last_run.libraries, fused.last_run.aten) == (kernels, 0, 0)
        assert not fused.last_run.fallbacks


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("columns", [16, 48, 64, 80, 192])
def test_a_product_on_its_own_becomes_a_kernel(rows: int, columns: int) -> None:
    model, x = nn.Linear(33, columns), torch.randn(rows, 33)
    assert packed(model, x) == 1
    assert_frozen(model, x, kernels=1)


def test_what_follows_stays_in_the_kernel() -> None:
    model, x = (
        nn.Sequential(nn.Linear(33, 128), nn.GELU(), nn.Linear(128, 32, bias=False), nn.ReLU()),
        torch.randn(9, 33),
    )
    assert packed(model, x) == 2
    assert_frozen(model, x, kernels=2)


def test_merged_weights_are_packed() -> None:
    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(24, 32), nn.Linear(24, 32)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.query(x)) * self.key(x)

    assert packed(Merged(), torch.randn(7, 24)) == 1
    assert_frozen(Merged(), torch.randn(7, 24), kernels=2)


def test_a_weight_of_several_layers_is_packed_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(48, 48)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.layer(x)))

    model, x = Shared(), torch.randn(5, 48)
    with torch.no_grad():
        graph = capture(model, (x,))
    freeze(graph, model, {})
    before = len(graph.graph.find_nodes(op="placeholder"))
    fuse.run_passes(graph)
    assert len(graph.graph.find_nodes(op="placeholder")) == before + 1
    assert_frozen(model, x, kernels=2)


class Steps(nn.Module):
    """Layers with one weight, too large for a loop's kernel: their body is a program of its own."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = layers
        self.mix, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.layers):
            y = self.mix(x)
            x = self.norm(x + (torch.softmax(y @ y.mT, -1) @ y).sort(-1).values)
        return x


@pytest.mark.usefixtures("unranked")
def test_weights_that_steps_of_a_loop_read_are_packed_once() -> None:
    model, x = Steps(), torch.randn(2, 20, 32)
    assert packed(model, x) == 1
    fused = fuse.compile(model.eval(), freeze=True)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    assert fused.last_run.libraries == 0


def test_weights_are_taken_over_when_that_is_announced() -> None:
    model, x = nn.Linear(33, 64).eval(), torch.randn(4, 33)
    fused = fuse.compile(model, freeze=True)
    with torch.no_grad():
        before = fused(x)
        model.weight.mul_(2)
        torch.testing.assert_close(fused(x), before)
        fused.refresh()
        torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize(("taps", "outputs"), [(1, 16), (3, 48), (3, 128), ((2, 3), 192)])
def test_the_weight_of_a_convolution_whose_channels_lie_side_by_side(taps: int, outputs: int) -> None:
    model, x = nn.Sequential(nn.Conv2d(7, outputs, taps), nn.ReLU()), torch.randn(2, 7, 9, 8)
    assert packed(model, x) == 1
    assert_frozen(model, x, kernels=1)


def test_a_convolution_whose_places_lie_side_by_side_reads_its_weight_as_it_lies() -> None:
    model, x = nn.Conv2d(6, 32, 3, groups=2), torch.randn(2, 6, 9, 8)
    assert packed(model, x) == 0
    assert reasons(model, x) == []


def test_doubles() -> None:
    assert_frozen(nn.Linear(33, 64).double(), torch.randn(4, 33).double(), kernels=1)


class Given(nn.Module):
    """The weight comes with the call."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w)


class Read(nn.Module):
    """The weight is read beside the product, in its kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.weight


class Written(nn.Module):
    """A buffer that the call writes is no constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.mul_(0.5)
        return x @ self.weight


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (nn.Linear(16, 20), (torch.randn(8, 16),)),
        (nn.Linear(16, 32).bfloat16(), (torch.randn(8, 16).bfloat16(),)),
        (Given(), (torch.randn(8, 16), torch.randn(16, 32))),
        (Read(), (torch.randn(32, 32),)),
        (Written(), (torch.randn(8, 32),)),
    ],
)
def test_near_misses_stay(model: nn.Module, args: tuple[Tensor, ...]) -> None:
    assert packed(model, *args) == 0


def test_reasons() -> None:
    assert reasons(nn.Linear(16, 20), torch.randn(8, 16)) == ["its 20 columns do not fill whole panels"]
    assert reasons(Read(), torch.randn(32, 32)) == ["something else in the region reads the weight"]


@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, 20), depth=st.integers(1, 70), panels=st.integers(1, 9), bias=st.booleans())
def test_any_shape(rows: int, depth: int, panels: int, bias: bool) -> None:
    assert_frozen(nn.Linear(depth, 16 * panels, bias=bias), torch.randn(rows, depth), kernels=1)
