from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.graph.capture import capture
from fuse.graph.freezing import freeze
from fuse.rewrite.registry import select


def ledger_of(model: nn.Module, *args: Tensor) -> fuse.Ledger:
    """What the passes did to a frozen model."""
    with torch.no_grad():
        graph = capture(model, args)
    freeze(graph, model, {})
    return fuse.run_passes(graph)


def fired(model: nn.Module, *args: Tensor) -> int:
    return sum(rewrite.pass_name == "channels_last" for rewrite in ledger_of(model.eval(), *args).rewrites)


def reasons(model: nn.Module, *args: Tensor) -> list[str]:
    return [one.reason for one in ledger_of(model.eval(), *args).rejected if one.pass_name == "channels_last"]


def assert_frozen(model: nn.Module, *args: Tensor, launches: int | None = None) -> None:
    """Frozen, the model gives what it gave, laid out as it was."""
    fused = fuse.compile(model.eval(), freeze=True)
    with torch.no_grad():
        for _ in range(2):
            plain, results = model(*args), fused(*args)
            expected = copy.deepcopy(model).double()(*(x.double() if x.is_floating_point() else x for x in args))
            parts = zip(
                *((one if isinstance(one, tuple) else (one,)) for one in (results, plain, expected)), strict=True
            )
            for got, eager, oracle in parts:
                assert (got.dtype, got.stride()) == (eager.dtype, eager.stride())
                torch.testing.assert_close(got.double(), oracle, rtol=1e-4, atol=1e-5)
        assert not fused.last_run.fallbacks
        assert launches is None or fused.last_run.launches == launches


def block(channels: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))


class Then(nn.Module):
    """Convolutions, and a function of what they make."""

    def __init__(self, function: Callable[[Tensor], Tensor | tuple[Tensor, ...]], channels: int = 16) -> None:
        super().__init__()
        self.block = block(channels)
        self.function = function

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self.block(x))


class Residual(nn.Module):
    """Batch norms fold, and the sum joins the second convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.stem, self.down = nn.Conv2d(3, 32, 7, 2, 3), nn.Conv2d(32, 48, 1, 2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(2))
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.stem(x)), 3, 2, 1)
        y = torch.relu(self.norms[0](self.first(x)))
        x = torch.relu(self.norms[1](self.second(y)) + x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.down(x), 1), 1))


def test_a_residual_network_changes_as_a_whole() -> None:
    model, x = Residual(), torch.randn(2, 3, 32, 32)
    assert fired(model, x) == 1
    assert_frozen(model, x)


def test_launches_stay_what_they_are() -> None:
    model, x = Residual().eval(), torch.randn(2, 3, 32, 32)
    others = [info.name for info in select(ignore=["channels_last"])]
    ways = [fuse.compile(model, freeze=True, passes=names) for names in (None, others)]
    with torch.no_grad():
        counts = [(way(x), way.last_run.launches)[1] for way in ways]
    assert counts[0] == counts[1]


def test_what_leaves_the_graph_lies_as_before() -> None:
    assert_frozen(block(), torch.randn(2, 3, 9, 8), launches=2)


FOLLOW = [
    lambda y: y.flatten(1),  # a view that the new order does not allow
    lambda y: y.flatten(2).transpose(1, 2),  # one that it does
    lambda y: F.interpolate(y[:, :64], scale_factor=2, mode="bilinear").tanh(),
    lambda y: torch.cat([y, F.avg_pool2d(y, 3, 1, 1)], 1).softmax(1),
    lambda y: (y.mean((2, 3)), y.amax(1)),
    lambda y: y[:, 2:5, ::2].sigmoid() * 2,
    lambda y: F.pixel_shuffle(y, 2),
    lambda y: torch.einsum("bchw,bdhw->bcd", y, y),
    lambda y: y.permute(0, 2, 3, 1) @ y.new_ones(y.shape[1], 4),
    lambda y: F.pad(y, (1, 2, 0, 1)).unfold(2, 3, 2).sum(-1),
    lambda y: F.group_norm(y, 4),
    lambda y: F.conv_transpose2d(y, y.new_ones(y.shape[1], 2, 2, 2), stride=2).relu(),
    lambda y: y + torch.arange(y.shape[-1]),
    lambda y: (y, y.clone(), y.contiguous(), torch.empty_like(y).copy_(y)),
    lambda y: y.view(-1),
    lambda y: y[:, 1, 0, 0] * 2,  # the same strides in both orders, from another element on
    lambda y: y.diagonal(dim1=2, dim2=3)[:, 3, 2].exp(),
    lambda y: y.topk(3, dim=1).values,
]


@pytest.mark.sampled
@pytest.mark.parametrize("function", FOLLOW)
def test_what_reads_the_images_follows(function: Callable[[Tensor], Tensor]) -> None:
    model, x = Then(function, channels=256), torch.randn(2, 3, 6, 8)
    assert fired(model, x) == 1
    assert_frozen(model, x)


STAY = [
    (
        nn.Sequential(block(), nn.Conv2d(16, 16, 3, groups=16)),
        "a convolution in groups reads its image position by position",
    ),
    (block(2), "too few channels to fill vectors of 16"),
    (Then(lambda y: F.group_norm(y, 4)), "other readers of the images would lose more time than the convolutions gain"),
    (Then(lambda y: y.as_strided((2, 3), (1, 2)) * 2), "is read by its position in memory"),
    (Then(lambda y: F.dropout(y, 0.5, training=True)), "depends on the order of elements in memory"),
    (Then(lambda y: y + torch.rand_like(y)), "depends on the order of elements in memory"),
]


@pytest.mark.parametrize(("model", "reason"), STAY)
def test_near_misses(model: nn.Module, reason: str) -> None:
    x = torch.randn(2, 3, 10, 12)
    assert fired(model, x) == 0
    (found,) = reasons(model, x)
    assert reason in found


def test_values_that_lie_elsewhere_in_memory_are_known_to() -> None:
    """Those with the strides that they had, too."""
    model = Then(lambda y: y[:, 1, 0, 0].sort().values, channels=250)
    with torch.no_grad():
        graph = capture(model, (torch.randn(2, 3, 6, 8),))
    freeze(graph, model, {})
    fuse.run_passes(graph)
    (last,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.sort.default)
    assert last.all_input_nodes[0].meta["val"].storage_offset() == 1


def test_a_weight_that_is_too_large_on_the_way_stays() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.columns = nn.Parameter(torch.randn(64000, 1, 1, 1)), nn.Parameter(torch.randn(1, 16, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, (self.rows * self.columns)[:16].tanh())

    assert reasons(Part(), torch.randn(1, 16, 20, 20)) == [
        "a weight takes too much memory to be computed before any call"
    ]
    assert_frozen(Part(), torch.randn(1, 16, 20, 20))


def test_nothing_is_logged_of_what_does_not_follow(caplog: pytest.LogCaptureFixture) -> None:
    """A view that the new order does not allow is an answer, not an error for the user to read."""
    model = Then(lambda y: torch.view_as_complex(y.reshape(2, -1, 3, 8, 2).contiguous()).abs(), channels=256)
    assert fired(model, torch.randn(2, 3, 6, 8)) == 1
    assert not caplog.records


def test_weights_that_may_change_stay() -> None:
    with torch.no_grad():
        graph = capture(block().eval(), (torch.randn(2, 3, 10, 12),))
    ledger = fuse.run_passes(graph)
    assert not [one for one in (*ledger.rewrites, *ledger.rejected) if one.pass_name == "channels_last"]


def test_images_that_lie_so_already_stay() -> None:
    x = torch.randn(2, 3, 10, 12).contiguous(memory_format=torch.channels_last)
    assert fired(block().to(memory_format=torch.channels_last), x) == 0
    assert_frozen(block().to(memory_format=torch.channels_last), x, launches=2)


def test_a_weight_of_two_convolutions_and_of_others() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.layer(x))) * self.layer.weight.sum()

    assert fired(Shared(), torch.randn(1, 16, 8, 8)) == 1
    assert_frozen(Shared(), torch.randn(1, 16, 8, 8))


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_network(data: st.DataObject) -> None:
    draw = data.draw
    channels, layers = draw(st.integers(1, 6)), []
    shape = (draw(st.integers(1, 3)), channels, draw(st.integers(6, 15)), draw(st.integers(6, 15)))
    for _ in range(draw(st.integers(1, 4))):
        outputs, taps = draw(st.sampled_from((8, 16, 24, 40))), draw(st.sampled_from((1, 3)))
        layers.append(nn.Conv2d(channels, outputs, taps, draw(st.integers(1, 2)), taps // 2, bias=draw(st.booleans())))
        channels = outputs
        between = st.sampled_from((nn.ReLU(), nn.BatchNorm2d(outputs), nn.GroupNorm(4, outputs), nn.MaxPool2d(2, 1, 1)))
        layers += draw(st.lists(between, max_size=2))
    assert_frozen(nn.Sequential(*layers), torch.randn(shape))
