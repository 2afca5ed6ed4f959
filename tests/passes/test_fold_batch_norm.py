from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fuse
from fuse.graph.capture import capture
from fuse.graph.freezing import freeze
from fuse.rewrite.ledger import Ledger
from fuse.rewrite.pipeline import run_passes


class Layers(nn.Module):
    """Modules one after the other, the norm between them with statistics that are not its first ones."""

    def __init__(self, *layers: nn.Module, both: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.both = both
        for layer in self.layers:
            if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
                for value, low in (
                    (layer.weight, -1),
                    (layer.bias, -1),
                    (layer.running_mean, -1),
                    (layer.running_var, 1),
                ):
                    if value is not None:
                        nn.init.uniform_(value, low, 2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        results = []
        for layer in self.layers:
            x = layer(x)
            results.append(x)
        return (x, results[0]) if self.both else x


def rewritten(model: nn.Module, *args: Tensor, frozen: bool = True) -> tuple[GraphModule, Ledger]:
    model.eval()
    graph = capture(model, args)
    if frozen:
        freeze(graph, model, {})
    ledger = run_passes(graph, passes=["dead_code", "view_chains", "constant_folding", "fold_batch_norm"])
    assert not ledger.failed, ledger.failed[0].traceback
    return graph, ledger


def names(graph: GraphModule) -> list[str]:
    return [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]


def fired(ledger: Ledger) -> int:
    return sum(one.pass_name == "fold_batch_norm" for one in ledger.rewrites)


def reasons(ledger: Ledger) -> set[str]:
    return {one.reason for one in ledger.rejected if one.pass_name == "fold_batch_norm"}


IMAGE = torch.randn(2, 4, 7, 6)
FOLDED: dict[str, tuple[Callable[[], Layers], Tensor]] = {
    "convolution": (lambda: Layers(nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)), IMAGE),
    "with a bias": (lambda: Layers(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), IMAGE),
    "in groups": (lambda: Layers(nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8)), IMAGE),
    "transposed": (lambda: Layers(nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6)), IMAGE),
    "no affine part": (lambda: Layers(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6, affine=False)), IMAGE),
    "signal": (lambda: Layers(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), IMAGE[..., 0]),
    "linear": (lambda: Layers(nn.Linear(4, 6), nn.BatchNorm1d(6)), IMAGE[:, :, 0, 0]),
    "linear without bias": (lambda: Layers(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)), IMAGE[:, :, 0, 0]),
    "double": (lambda: Layers(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).double(), IMAGE.double()),
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_norm_disappears_in_the_layer_before_it(name: str) -> None:
    make, x = FOLDED[name]
    model = make()
    graph, ledger = rewritten(model, x)
    assert fired(ledger) == 1
    assert not any("norm" in name for name in names(graph))
    fused = fuse.compile(model, freeze=True)
    with torch.no_grad():
        expected, actual = model(x), fused(x)
        exact = model.double()(x.double())
        torch.testing.assert_close(actual, expected)
        error, eagers = ((y - exact).abs().max() for y in (actual, expected))
        assert error <= 4 * eagers + 1e-6 * exact.abs().max()
    assert actual.stride() == expected.stride()
    assert fused.last_run.launches == 1


NEAR_MISSES: dict[str, tuple[Callable[[], Layers], Tensor, str]] = {
    "another reader": (
        lambda: Layers(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), both=True),
        IMAGE,
        "other operators read the layer's result, too",
    ),
    "half precision": (
        lambda: Layers(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).bfloat16(),
        IMAGE.bfloat16(),
        "folded weights would be rounded to torch.bfloat16 once more",
    ),
    "not finite": (
        lambda: Layers(nn.Conv2d(4, 6, 3), with_variance(nn.BatchNorm2d(6), -1.0)),
        IMAGE,
        "a folded weight is not finite",
    ),
}


def with_variance(norm: nn.BatchNorm2d, variance: float) -> nn.Module:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    nn.init.constant_(norm.running_var, variance)
    return Fixed()


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name: str) -> None:
    make, x, reason = NEAR_MISSES[name]
    model = make()
    _, ledger = rewritten(model, x)
    assert (fired(ledger), reasons(ledger)) == (0, {reason})
    fused = fuse.compile(model, freeze=True)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), equal_nan=True, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.ReLU(), nn.BatchNorm2d(4)),
        lambda: (nn.Conv2d(4, 6, 3), nn.ReLU(), nn.BatchNorm2d(6)),
        lambda: (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, track_running_stats=False)),
        lambda: (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
        lambda: (nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6)),
    ],
)
def test_what_is_no_layer_and_norm_is_not_asked(layers: Callable[[], tuple[nn.Module, ...]]) -> None:
    _, ledger = rewritten(Layers(*layers()), IMAGE)
    assert (fired(ledger), reasons(ledger)) == (0, set())


def test_weights_that_may_change_are_not_folded() -> None:
    model = Layers(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    _, ledger = rewritten(model, IMAGE, frozen=False)
    assert (fired(ledger), reasons(ledger)) == (0, set())


def test_a_refreshed_model_folds_again() -> None:
    model = Layers(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).eval()
    fused = fuse.compile(model, freeze=True)
    with torch.no_grad():
        fused(IMAGE)
        model.layers[1].running_mean.add_(1)
        model.layers[0].weight.mul_(2)
        fused.refresh()
        torch.testing.assert_close(fused(IMAGE), model(IMAGE))
