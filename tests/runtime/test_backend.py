"""``torch.compile(model, backend="fuse")``, in inference and in training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuse.runtime import backend
from fuse.runtime.engine import Engine
from fuse.runtime.variants.last_run import LastRun


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """What the backend made, one a graph of Dynamo."""
    torch._dynamo.reset()
    made: list[Engine] = []

    def noted(*args: Any, **kwargs: Any) -> Engine:
        made.append(Engine(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(backend, "Engine", noted)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.filterwarnings("error", message=".*(runs eager|runs op by op)")
        yield made
    torch._dynamo.reset()


def observed(engines: list[Engine]) -> list[LastRun]:
    runs = [engine.last_run() for engine in engines]
    assert all(run is not None and run.launches and not run.fallbacks for run in runs)
    return [run for run in runs if run is not None]


def assert_trains(model: nn.Module, *args: Tensor, **options: Any) -> nn.Module:
    """Two steps are eager's, and as exact: results, gradients (which accumulate) and buffers."""
    model.zero_grad()
    eager, eager_args = copy.deepcopy((model, args))
    exact, exact_args = copy.deepcopy(model).double(), tuple(_exact(arg) for arg in args)
    compiled = torch.compile(model, backend="fuse", **options)
    for _ in range(2):
        results = []
        for run, given in ((compiled, args), (eager, eager_args), (exact, exact_args)):
            torch.manual_seed(1)
            results.append(run(*given))
            (results[-1] * results[-1].detach().cos()).sum().backward()
        assert_as_exact(*results)
    for values in zip(model.parameters(), eager.parameters(), exact.parameters(), strict=True):
        assert_as_exact(*(value.grad for value in values))
    for values in zip(args, eager_args, exact_args, strict=True):
        assert_as_exact(*(value.grad for value in values))
    for values in zip(model.buffers(), eager.buffers(), exact.buffers(), strict=True):
        assert_as_exact(*values)
    return compiled


def _exact(arg: Tensor) -> Tensor:
    value = arg.detach().double() if arg.is_floating_point() else arg.detach().clone()
    return value.requires_grad_(arg.requires_grad)


def assert_as_exact(mine: Tensor | None, eager: Tensor | None, exact: Tensor | None) -> None:
    """Like eager's in all but the last bits, and not much further from float64 than eager."""
    if mine is None or eager is None or exact is None:
        assert mine is eager is exact
        return
    assert (mine.shape, mine.dtype, mine.stride()) == (eager.shape, eager.dtype, eager.stride())
    assert torch.equal(torch.isnan(mine), torch.isnan(eager))
    scale = 1 + exact.nan_to_num().abs().max() if exact.numel() else 1
    errors = [(value.double() - exact).abs().nan_to_num().flatten() for value in (mine, eager)]
    own, usual = (error.max() if error.numel() else 0.0 for error in errors)
    assert own <= 2 * usual + 1e-6 * scale


class Function(nn.Module):
    """A module of one function of a layer and the arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(8, 8)

    def forward(self, *args: Any) -> Any:
        return self.function(self.layer, *args)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module, preserve: bool) -> None:
        super().__init__()
        self.layer, self.block, self.preserve = nn.Linear(8, 8), block, preserve

    def forward(self, a: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, self.layer(a), use_reentrant=False, preserve_rng_state=self.preserve)
        return y


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_it_is_registered() -> None:
    assert "fuse" in torch._dynamo.list_backends()


def test_inference_is_fused_for_several_shapes(engines: list[Engine]) -> None:
    model = mlp().eval()
    compiled = torch.compile(model, backend="fuse")
    with torch.no_grad():
        for rows in (4, 5, 6):
            a = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(a), model(a))
    assert all(run.launches <= 3 for run in observed(engines))


def test_graph_breaks_writes_and_views_are_right() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        torch._dynamo.graph_break()
        return x.view(-1)[:3], x * 2

    compiled = torch.compile(function, backend="fuse")
    a, b = torch.zeros(2, 2), torch.zeros(2, 2)
    part, double = compiled(a)
    torch.testing.assert_close((part, double), function(b))
    assert torch.equal(a, b)
    assert part.data_ptr() == a.data_ptr()


def test_training_is_fused_in_both_directions(engines: list[Engine]) -> None:
    assert_trains(nn.Sequential(mlp(), nn.LayerNorm(8), nn.Dropout(0.3), nn.BatchNorm1d(8)), x(5, 8))
    (run,) = observed(engines)
    assert run.regions >= 1
    assert run.backward is not None
    assert run.backward.regions >= 2
    assert run.backward.fallbacks == ()


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.from_input, self.from_hidden = nn.Linear(8, 64), nn.Linear(16, 64)

    def forward(self, xs: Tensor) -> Tensor:
        h = c = xs.new_zeros(xs.shape[1], 16)
        for step in xs:
            i, f, g, o = (self.from_input(step) + self.from_hidden(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


def test_a_loop_that_dynamo_unrolled_is_rolled_in_both_directions(engines: list[Engine]) -> None:
    assert_trains(Lstm(), torch.randn(12, 3, 8))
    (run,) = observed(engines)
    assert run.launches <= 3
    assert run.backward is not None
    assert run.backward.launches <= 12


def test_graphs_between_breaks_are_fused_each(engines: list[Engine]) -> None:
    def broken(layer: nn.Module, a: Tensor) -> Tensor:
        y = layer(a).relu()
        torch._dynamo.graph_break()
        return y.tanh() * 2

    assert_trains(Function(broken), x(3, 8))
    assert len(observed(engines)) == 2


def test_dynamic_shapes_train(engines: list[Engine]) -> None:
    model = mlp()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fuse", dynamic=True)
    for rows in (3, 5, 7):
        a = torch.randn(rows, 8)
        compiled(a).square().sum().backward()
        eager(a).square().sum().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert len(observed(engines)) == 1


def test_sizes_that_dynamo_leaves_symbolic_need_no_capture_each(engines: list[Engine]) -> None:
    layer = nn.Linear(8, 8)

    def windows(a: Tensor, scale: int) -> Tensor:
        steps, batch, _ = a.shape
        padded = F.pad(layer(a), (0, 0, 0, 0, 0, 64 - steps)).reshape(64 * batch, 8)
        return padded.mul(scale + batch).view(64, batch, 8)[: steps - 1]

    compiled = torch.compile(windows, backend="fuse", dynamic=True)
    resized = []
    for steps, batch in ((30, 3), (11, 7), (17, 4), (24, 5), (19, 6), (28, 4), (20, 5), (19, 6)):
        a = torch.randn(steps, batch, 8)
        torch.testing.assert_close(compiled(a, 5), windows(a, 5))
        latest = engines[0].latest()
        assert latest is not None, engines[0].last_run()
        resized.append(latest.resized)
    assert resized == 4 * [False] + 4 * [True]
    assert len(observed(engines)) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("preserve", [True, False])
def test_a_checkpointed_block_is_computed_again(engines: list[Engine], dropout: float, preserve: bool) -> None:
    if dropout and not preserve:
        pytest.skip("eager draws another mask backward: nothing to be equal to")
    model = Checkpointed(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8)), preserve)
    assert_trains(model, x(4, 8))
    assert_trains(nn.Sequential(model.layer, model.block), x(4, 8))
    again, stored = (run.backward for run in observed(engines))
    assert again is not None
    assert stored is not None
    assert again.libraries == stored.libraries + 1  # the block's first layer, which its second one's gradient needs


def test_custom_functions_keep_their_gradients(engines: list[Engine]) -> None:
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            ctx.save_for_backward(a)
            return a.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (a,) = ctx.saved_tensors
            return 3 * g * a.cos()

    assert_trains(Function(lambda layer, a: Tripled.apply(layer(a)).relu()), x(3, 8))
    observed(engines)


def test_blocks_without_gradients_and_autocast_are_followed(engines: list[Engine]) -> None:
    def function(layer: nn.Module, a: Tensor) -> Tensor:
        with torch.no_grad():
            scale = layer(a).sigmoid()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(a)
        return y.float().tanh() * scale

    assert_trains(Function(function), x(3, 8))
    observed(engines)


def test_an_optimizer_trains_the_same_curve(engines: list[Engine]) -> None:
    model, data, target = mlp(), torch.randn(16, 8), torch.randint(0, 8, (16,))
    eager = copy.deepcopy(model)
    curves = []
    for run, trained in ((torch.compile(model, backend="fuse"), model), (eager, eager)):
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
        curve = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = F.cross_entropy(run(data), target)
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0][-1] < 0.9 * curves[0][0]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    observed(engines)


def test_recurrent_layers_reach_the_backend_where_dynamo_allows_them(engines: list[Engine]) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer, self.tags = nn.Linear(8, 8), nn.GRU(8, 8), nn.Linear(8, 4)

        def forward(self, a: Tensor) -> Tensor:
            y: Tensor = self.tags(self.layer(self.embed(a))[0])
            return y

    model = Tagger()
    assert_trains(model, x(6, 3, 8))
    assert not engines  # Dynamo runs the whole frame eager and tells no backend
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        assert_trains(model, x(6, 3, 8))
    (run,) = observed(engines)
    assert run.launches <= 6


def test_what_runs_eager_says_so_with_the_users_line() -> None:
    def function(layer: nn.Module, a: Tensor) -> Tensor:
        return layer(a.as_strided((2, 8), (8, 1), 8))

    compiled = torch.compile(Function(function), backend="fuse")
    with pytest.warns(UserWarning, match=r"a graph of Dynamo runs eager: as_strided at test_backend.py:\d+"):
        compiled(torch.randn(4, 8)).sum().backward()
