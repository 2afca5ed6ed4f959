"""Gradients of gradients of compiled calls: eager's, or an error that says why there are none."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.graph.loading.load import load
from fuse.runtime.autograd.differentiable import TWICE

pytestmark = pytest.mark.filterwarnings("ignore:.*gradients of gradients")


class Function(nn.Module):
    def __init__(self, run: Callable[[Tensor, Tensor], Tensor], rows: int = 4, columns: int = 4) -> None:
        super().__init__()
        self.run = run
        self.weight = nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.weight, x)


def second(run: Callable[..., Any], model: nn.Module, *args: Tensor) -> list[Tensor | None]:
    """Gradients of the squared length of a loss's gradients, by arguments and parameters."""
    y = run(*args)
    by = [t for t in (*args, *model.parameters()) if t.requires_grad]
    first = torch.autograd.grad((y * y.detach().cos()).sum(), by, create_graph=True)
    return list(torch.autograd.grad(sum((g * g).sum() for g in first), by, allow_unused=True))


def assert_as_eager(model: nn.Module, *args: Tensor) -> None:
    """In float64, in the call whose gradients are the first to be differentiated, and in the next one."""
    model = model.double()
    args = tuple(a.detach().double().requires_grad_(a.requires_grad) for a in args)
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    for call in range(2):
        found, wanted = second(fused, model, *args), second(eager, eager, *args)
        assert fused.last_run is not None
        assert [TWICE in fallback.reason for fallback in fused.last_run.fallbacks] == [True] * call
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(*(t if t is not None else torch.zeros(()) for t in (mine, theirs)))


def recurrent(w: Tensor, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    kept = []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] + h @ w)
        kept.append(h)
    return torch.stack(kept)


def attention(w: Tensor, x: Tensor) -> Tensor:
    return torch.softmax(x @ w @ x.mT / 2, -1) @ x


FUNCTIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda w, x: torch.tanh(x @ w),
    lambda w, x: (x @ w.exp()).relu() * 2 + x.mean(),
    lambda w, x: F.silu(F.layer_norm(x @ w, (4,))),
    lambda w, x: F.gelu(F.group_norm(x @ w, 2)) if x.dim() == 2 else F.gelu(x @ w),
    lambda w, x: torch.logsumexp(x @ w, -1) * torch.cat([x[..., :1], w[0] * x[..., 1:2]], -1).sum(),
    lambda w, x: F.softplus(x @ w).cumsum(-1) / (1 + x.square()),
    lambda w, x: F.log_softmax(x @ w, -1)[..., ::2] * (x @ w).amax(-1, keepdim=True),
    lambda w, x: F.cross_entropy(x @ w, torch.softmax(x, -1)) + F.logsigmoid(x @ w).sum(),
    lambda w, x: torch.where(x > 0, torch.tanh(x @ w), torch.sigmoid(x @ w)),
]


@pytest.mark.sampled
@pytest.mark.parametrize("which", range(len(FUNCTIONS)))
@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=2), st.booleans(), st.integers(0, 3))
def test_gradients_of_gradients_are_eagers(which: int, sizes: list[int], needs: bool, seed: int) -> None:
    x = torch.randn(*sizes, 4, generator=torch.Generator().manual_seed(seed), requires_grad=needs)
    assert_as_eager(Function(FUNCTIONS[which]), x)


@pytest.mark.parametrize("run", [recurrent, attention])
def test_gradients_of_gradients_through_loops_and_attention(run: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_as_eager(Function(run), torch.randn(2, 6, 4, requires_grad=True))


@pytest.mark.parametrize("cell", [nn.LSTMCell(4, 4), nn.GRUCell(4, 4)])
def test_gradients_of_gradients_through_cells(cell: nn.Module) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor) -> Tensor:
            found = self.cell(x)
            return found if isinstance(found, Tensor) else found[0] * found[1]

    assert_as_eager(First(), torch.randn(2, 4, requires_grad=True))


def test_gradients_of_gradients_of_a_classifier() -> None:
    kinds = torch.tensor([0, 3, 1])
    assert_as_eager(Function(lambda w, x: F.cross_entropy(x @ w, kinds, torch.ones(4).to(w))), torch.randn(3, 4))


@pytest.mark.parametrize("train", [True, False])
def test_gradients_of_gradients_through_normalised_convolutions(train: bool) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 1)).train(train)
    assert_as_eager(model, torch.randn(3, 2, 6, 6, requires_grad=True))


@pytest.mark.parametrize("by", ["weight", "tangent", "x", "input of x"])
def test_they_may_be_taken_by_any_tensor(by: str) -> None:
    found = []
    for compiled in (True, False):
        model = Function(FUNCTIONS[0])
        a, t = torch.ones(3, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
        x = a * 2
        y = (fuse.compile(model) if compiled else model)(x)
        (g,) = torch.autograd.grad(y, x, t, create_graph=True)
        found += torch.autograd.grad(
            g.square().sum(), {"weight": model.weight, "tangent": t, "x": x, "input of x": a}[by]
        )
    torch.testing.assert_close(*found)


def test_a_backward_pass_by_operators_says_so() -> None:
    fused, x = fuse.compile(Function(FUNCTIONS[0])), torch.ones(3, 4, requires_grad=True)
    torch.autograd.grad(fused(x).sum(), x, create_graph=True)
    assert fused.last_run is not None
    assert fused.last_run.backward is not None
    assert [TWICE in fallback.reason for fallback in fused.last_run.backward.fallbacks] == [True]


def test_third_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), torch.linspace(0, 1, 5)[:, None]
    found = []
    for run in (fuse.compile(model), model):
        x = x.detach().requires_grad_()
        u = run(x)
        for _ in range(3):
            (u,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        found.append(u)
    torch.testing.assert_close(*found)


def test_the_next_call_runs_eager_with_one_warning_and_others_stay_fused() -> None:
    model = Function(FUNCTIONS[0])
    fused = fuse.compile(model)
    x = torch.randn(3, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            second(fused, model, x.detach().requires_grad_())
            fused(x).sum().backward()
            assert fused.last_run is not None
            assert not fused.last_run.fallbacks
    assert [TWICE in str(one.message) for one in caught] == [True]


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda w, x: torch.tanh(x.detach() @ w) * x, "detach"),
        (lambda w, x: F.dropout(torch.tanh(x @ w), 0.5), "random"),
    ],
)
def test_where_operators_do_not_say_it_all_they_raise(run: Callable[[Tensor, Tensor], Tensor], reason: str) -> None:
    model = Function(run)
    y = fuse.compile(model)(torch.ones(3, 4, requires_grad=True)).sum()
    (g,) = torch.autograd.grad(y, model.weight, create_graph=True)
    torch.testing.assert_close(g, g.detach())
    with pytest.raises(RuntimeError, match=f"gradients of gradients.*{reason}"):
        g.sum().backward()


def test_an_input_that_was_changed_or_is_gone_raises() -> None:
    for change, reason in ((True, "was changed"), (False, "no longer there")):
        model = Function(lambda w, x: torch.tanh((x + 1) @ w))
        x = torch.ones(3, 4)
        y = fuse.compile(model)(x).sum()
        if change:
            x.mul_(5)
        else:
            del x
            gc.collect()  # a capture leaves cycles behind
        (g,) = torch.autograd.grad(y, model.weight, create_graph=True)
        with pytest.raises(RuntimeError, match=reason):
            g.sum().backward()


class Scaled(nn.Module):
    """A buffer and a parameter that the call does not save, because the gradient of tanh needs its result only."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((4,), 0.1))
        self.register_buffer("scale", torch.full((4,), 1000.0))
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.scale += 1
            return torch.tanh(x * (self.scale / 1000))
        return torch.tanh(x + self.shift + self.scale / 1000)


@torch.no_grad()
def slightly(model: nn.Module, name: str) -> None:
    model.get_parameter(name).mul_(1.001) if name == "shift" else model.get_buffer(name).mul_(1.001)


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "written parameter": (lambda model: slightly(model, "shift"), "was changed"),
    "written buffer": (lambda model: slightly(model, "scale"), "was changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_slight_change_of_the_model_raises(change: str) -> None:
    model, x = Scaled(), torch.ones(3, 4, requires_grad=True)
    y = fuse.compile(model)(x).sum()
    alter, reason = CHANGES[change]
    alter(model)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match=reason):
        g.sum().backward()


def test_hooks_of_results_see_their_second_gradients() -> None:
    model, x = Function(lambda w, x: torch.tanh(x @ w)), torch.ones(3, 4, requires_grad=True)
    found = []
    for run in (fuse.compile(model), model):
        y = run(x)
        y.register_hook(lambda g: 3 * g)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), (x, model.weight)))
    torch.testing.assert_close(*found)


def test_an_exchanged_buffer_is_that_of_the_call() -> None:
    found = []
    for compiled in (True, False):
        model, x = Scaled(), torch.ones(3, 4, requires_grad=True)
        y = (fuse.compile(model) if compiled else model)(x).sum()
        model.scale = model.scale * 1.001
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        found += torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(*found)


def test_a_buffer_that_the_call_writes_and_reads_raises() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    (g,) = torch.autograd.grad(fuse.compile(Scaled(counts=True))(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="writes to an input that it reads"):
        g.sum().backward()


def test_a_gradient_penalty_trains_as_eager_does() -> None:
    """Critic steps of Gulrajani et al., "Improved Training of Wasserstein GANs", NeurIPS 2017."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    real, made = torch.randn(8, 4), torch.randn(8, 4)
    trained = []
    for compiled in (True, False):
        model = copy.deepcopy(critic)
        run = fuse.compile(model) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            mixed = torch.lerp(real, made, step / 4).requires_grad_()
            (slope,) = torch.autograd.grad(run(mixed).sum(), mixed, create_graph=True)
            loss = run(made).mean() - run(real).mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*trained)


def test_a_graph_means_the_same_to_torch_and_to_the_kernels() -> None:
    """Parameters of a generated function must not be called like other nodes of it."""
    loaded = load("models/crf.py", settings=("batch_size=3", "seq_length=6", "tags=4"), real=True)
    assert_as_eager(Tags(loaded.model, loaded.args[1]), loaded.args[0])


class Tags(nn.Module):
    def __init__(self, crf: nn.Module, mask: Tensor) -> None:
        super().__init__()
        self.crf = crf
        self.mask = mask

    def forward(self, emissions: Tensor) -> Tensor:
        found: Tensor = self.crf(emissions, self.mask)
        return found
