"""A model that runs in a narrower dtype, with some operators left in float32."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fuse
import fuse.runtime.module
from fuse.errors import FuseError
from fuse.graph.precision import Precision, Watch, in_precision


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("shift", torch.randn(16))
        self.factor = 2

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = functional.gelu(self.inner(self.norm(x)))
        h = self.outer(h) * self.factor
        weights = torch.softmax(h + mask.to(x.dtype), -1)
        return weights @ x.transpose(0, 1) + self.shift[:1]


class Mends(nn.Module):
    """Computes a part in float32 of its own accord."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


X, MASK = torch.randn(16, 16), torch.ones(16, 16).triu().bool()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("model", [Net(), Mends()])
def test_nothing_kept_is_what_a_converted_model_computes(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    args = (X, MASK) if isinstance(model, Net) else (X,)
    converted = copy.deepcopy(model).to(dtype)
    expected = converted(args[0].to(dtype), *args[1:])
    found = in_precision(model, Precision(name))(*args)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_everything_kept_is_float32() -> None:
    model, watch = Net(), Watch()
    in_precision(model, Precision("bf16"), watch)(X, MASK)
    kept = in_precision(model, Precision("bf16", tuple(watch.sites)))(X, MASK)
    assert kept.dtype == torch.float32
    assert torch.allclose(kept, model(X, MASK), atol=1e-6)


def test_functions_of_a_line_are_kept() -> None:
    torch.manual_seed(0)
    model, watch = Net(), Watch()
    narrow = in_precision(model, Precision("bf16"), watch)(X, MASK)
    softmax = next(site for site in watch.sites if site.endswith(":softmax"))
    assert watch.casts.keys() == {softmax.rpartition(":")[0]}
    sums = tuple(site for site in watch.sites if site.endswith((":softmax", ":matmul", ":add")))
    better = in_precision(model, Precision("bf16", sums))(X, MASK)
    exact = copy.deepcopy(model).double()(X.double(), MASK)
    assert (better - exact).norm() < (narrow - exact).norm()


def test_autocast_leaves_kept_operators_out() -> None:
    model, watch = Net(), Watch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(X, MASK)
    assert torch.equal(in_precision(model, Precision("autocast"), watch)(X, MASK), expected)
    products = tuple(site for site in watch.sites if site.endswith(("linear", "matmul")))
    kept = in_precision(model, Precision("autocast", products))(X, MASK)
    assert torch.allclose(kept, model(X, MASK), atol=1e-6)


def test_the_model_shares_its_state_with_the_one_that_runs_narrow() -> None:
    model = Net()
    twin = in_precision(model, Precision("bf16"))
    before = twin(X, MASK)
    model.factor = 4
    assert not torch.equal(twin(X, MASK), before)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert isinstance(twin, Net)
    assert next(twin.parameters()) is next(model.parameters())
    apart = copy.deepcopy(twin)
    model.factor = 8
    assert torch.equal(apart(X, MASK), in_precision(copy.deepcopy(apart), Precision("bf16"))(X, MASK))
    assert apart.factor == 4


def test_running_statistics_are_written_in_float32() -> None:
    model = nn.BatchNorm1d(4)
    in_precision(model, Precision("bf16"))(torch.randn(8, 4) + 3)
    assert model.running_mean is not None
    assert model.running_mean.dtype == torch.float32
    assert model.running_mean.abs().max() > 0.1


def test_what_is_to_be_kept_and_never_runs_is_told_once() -> None:
    twin = in_precision(nn.Linear(2, 2), Precision("bf16", ("nowhere.py:1",)))
    with pytest.warns(UserWarning, match=r"nothing ran at nowhere\.py:1"):
        twin(torch.ones(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin(torch.ones(1, 2))


@pytest.mark.parametrize(("dtype", "keep"), [("f8", ()), ("bf16", ("softmax",))])
def test_what_is_no_precision_is_refused(dtype: str, keep: tuple[str, ...]) -> None:
    with pytest.raises(FuseError):
        Precision(dtype, keep)


@pytest.mark.parametrize("dtype", ["bf16", "autocast"])
def test_a_compiled_model_computes_what_the_eager_one_does(dtype: str) -> None:
    model, watch = Net(), Watch()
    in_precision(model, Precision(dtype), watch)(X, MASK)
    precision = Precision(dtype, tuple(site for site in watch.sites if site.endswith((":softmax", ":gelu"))))
    fused = fuse.compile(model, precision=precision)
    with torch.no_grad():
        found, expected = fused(X, MASK), in_precision(model, precision)(X, MASK)
    assert fused.last_run.fallbacks == ()
    assert fused.last_run.launches < 30
    assert found.dtype == expected.dtype
    assert torch.allclose(found.float(), expected.float(), atol=0.05)


def test_a_compiled_model_trains_with_a_gradient_scaler() -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    fused = fuse.compile(model, precision="f16")
    losses: list[list[float]] = []
    for module, own in ((fused, model), (in_precision(plain, Precision("f16")), plain)):
        optimizer = torch.optim.SGD(own.parameters(), 0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        losses.append([])
        for _ in range(4):
            loss = module(X, MASK).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses[-1].append(loss.item())
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in own.parameters())
    assert fused.last_run.fallbacks == ()
    assert losses[0][-1] < losses[0][0]
    assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=5e-3)


class Rounds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.bfloat16().float()) + 1


@pytest.mark.parametrize("precision", ["relaxed", Precision("autocast", relaxed=True)])
def test_relaxed_leaves_roundings_out(precision: str | Precision) -> None:
    x, model = torch.randn(8, 8), Rounds()
    with torch.no_grad():
        assert torch.allclose(fuse.compile(model)(x), model(x), atol=1e-6)
        assert torch.allclose(fuse.compile(model, precision=precision)(x), torch.tanh(x) + 1, atol=1e-6)
    assert not torch.allclose(model(x), torch.tanh(x) + 1, atol=1e-6)


def test_a_frozen_weight_is_cast_once_for_all() -> None:
    model, x = Net().eval(), X
    with torch.no_grad():
        frozen, thawed = (fuse.compile(model, precision="bf16", freeze=freeze) for freeze in (True, False))
        assert torch.equal(frozen(x, MASK), thawed(x, MASK))

    def read(fused: fuse.runtime.module.Fused) -> set[torch.dtype]:
        weights = [node.meta["val"] for node in fused.compiled.graph.graph.find_nodes(op="placeholder") if node.users]
        return {value.dtype for value in weights if value.dim() == 2 and value.shape != x.shape}

    assert read(frozen) == {torch.bfloat16}
    assert read(thawed) == {torch.float32}
