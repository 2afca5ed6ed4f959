"""``fuse.compile`` trains: gradients, optimizer steps and autograd's rules as in eager."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fuse
from fuse.check.compare import compare
from fuse.runtime import making


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def loss_of(result: Any) -> Tensor:
    """A loss whose gradients differ from element to element."""
    return torch.stack([(t * t.detach().cos()).sum() for t in tensors(result) if t.requires_grad]).sum()


def step(run: Callable[..., Any], model: nn.Module, args: tuple[Any, ...]) -> dict[str, Tensor | None]:
    """Results and gradients of a forward and backward pass, by name."""
    torch.manual_seed(1)
    result = run(*args)
    loss_of(result).backward()
    found: dict[str, Tensor | None] = {f"result {i}": t.detach() for i, t in enumerate(tensors(result))}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found |= {f"gradient of argument {i}": a.grad for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_leaf}
    found |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    return found


def own(model: nn.Module, args: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """Copies of a model and its arguments, floating-point numbers in ``dtype``."""
    made = [
        a.detach().to(dtype if a.is_floating_point() else a.dtype).requires_grad_(a.requires_grad)
        if isinstance(a, Tensor)
        else a
        for a in args
    ]
    return copy.deepcopy(model).to(dtype), tuple(made)


def assert_trains(model: nn.Module, *args: Any, exact: bool = True) -> Any:
    """Two steps of the fused model are eager's, nothing ran as a fallback; gradients as near to float64 as eager's."""
    eager, eager_args = own(model, args)
    best, best_args = own(model, args, torch.float64)
    fused = fuse.compile(model)
    for _ in range(2):  # gradients accumulate
        mine, theirs = step(fused, model, args), step(eager, eager, eager_args)
        ideal = step(best, best, best_args) if exact else {}
        assert mine.keys() == theirs.keys()
        for name, expected in theirs.items():
            got = mine[name]
            if expected is None or got is None:
                assert got is expected, name
                continue
            if exact and expected.is_floating_point():  # sums may be added up in another order than eager's
                compared = compare(name, got, expected, ideal[name], atol=1e-5, rtol=1e-5)
                assert not compared.problem, f"{name}: {compared.problem}"
            else:
                torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")
    run = fused.last_run
    assert run.fallbacks == ()
    assert run.backward.fallbacks == ()
    assert run.launches > 0
    assert run.backward.launches > 0
    return fused


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(4)])

    def forward(self, a: Tensor) -> Tensor:
        return sum(layer(a) for layer in self.layers)


class Function(nn.Module):
    """A module of one function of a weight and the arguments."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape or (4, 4)))

    def forward(self, *args: Any) -> Any:
        return self.function(self.weight, *args)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3), nn.LogSoftmax(-1))


def unrolled(w: Tensor, xs: Tensor) -> Tensor:
    h, outputs = w.new_zeros(3, 4), []
    for one in xs:
        h = torch.tanh(one + h @ w)
        outputs.append(h)
    return torch.stack(outputs)


class Tied(nn.Module):
    """A loop between an embedding and an output layer that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.state = nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        xs = self.words(tokens)
        h = xs.new_zeros(len(xs), 4)
        for t in range(tokens.shape[1]):
            gate, value = (self.inner(xs[:, t]) + self.state(h)).chunk(2, 1)
            h = torch.sigmoid(gate) * h + torch.tanh(value)
        return F.linear(h, self.words.weight)


class BothWays(nn.Module):
    """Two layers, the second backwards in time, that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shared = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, xs: Tensor) -> Tensor:
        for layer, order in ((self.first, range(len(xs))), (self.second, range(len(xs))[::-1])):
            h, outputs = xs.new_zeros(xs.shape[1], 4), []
            for t in order:
                h = torch.tanh(layer(xs[t]) + self.shared(h))
                outputs.append(h)
            xs = torch.stack(outputs)
        return xs


def _masked_loop(w: Tensor, xs: Tensor, lengths: Tensor) -> Tensor:
    h = xs.new_zeros(len(xs), 4)
    for t in range(xs.shape[1]):
        h = torch.where((t < lengths)[:, None], torch.tanh(xs[:, t] + h @ w), h)
    return h


MODULES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "an mlp": lambda: (mlp(), x(5, 4)),
    "an input without gradient": lambda: (mlp(), torch.randn(5, 4)),
    "a convolution": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), x(2, 3, 8, 8)),
    "batch norm": lambda: (nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), x(2, 3, 8)),
    "group norm": lambda: (nn.Sequential(nn.GroupNorm(2, 4), nn.Sigmoid()), x(2, 4, 5)),
    "an embedding": lambda: (nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 4)), torch.arange(8) % 9),
    "attention": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), x(2, 5, 8)),
    "a recurrent loop": lambda: (Function(unrolled), x(7, 3, 4)),
    "a loop with a tied embedding": lambda: (Tied(), torch.randint(0, 9, (3, 9))),
    "two layers of loops": lambda: (BothWays(), x(7, 3, 4)),
    "a loop over lengths": lambda: (Function(_masked_loop), x(3, 8, 4), torch.tensor([3, 8, 5])),
    "an LSTM cell": lambda: (nn.LSTMCell(4, 4), x(3, 4)),
    "softmax": lambda: (Function(lambda w, a: torch.softmax(a @ w, 0)), x(3, 4)),
    "a mask": lambda: (
        Function(lambda w, a, m: (a * w).masked_fill(m, -1.0) + torch.where(m, w, a)),
        x(4, 4),
        torch.eye(4) > 0,
    ),
    "cat and slice": lambda: (Function(lambda w, a: torch.cat([a[:, 1:], w[:, ::2], a], 1)[1:, 2:]), x(4, 4)),
    "a residual": lambda: (Function(lambda w, a: a + torch.relu(a @ w) + a), x(3, 4)),
    "a complex number": lambda: (Function(lambda w, a: (a * w * (0.3 - 0.1j)).abs()), x(4, 4)),
    "a shared weight": lambda: (Function(lambda w, a: torch.tanh(a @ w) @ w.t()), x(3, 4)),
    "a weight broadcast": lambda: (Function(lambda w, a: (a * w).sum(-1) / a.std(-1), 4), x(3, 4)),
    "the loss of a sequence": lambda: (
        Function(lambda w, t: F.ctc_loss(w.log_softmax(-1), t, [30] * 8, [9] * 8, reduction="sum"), 30, 8, 12),
        torch.randint(1, 12, (8, 9)),
    ),
    "gather and index": lambda: (
        Function(lambda w, a, i: a.gather(1, i) * w.index_select(0, i[:, 0]) + w[i[0]]),
        x(4, 4),
        torch.randint(0, 4, (4, 4)),
    ),
    "activations": lambda: (
        Function(lambda w, a: sum(f(a * w) for f in (F.silu, F.elu, F.softplus, F.leaky_relu, F.hardswish, F.mish))),
        x(4, 4),
    ),
    "a block without gradients": lambda: (Function(_with_no_grad), x(4, 4)),
    "a write in place": lambda: (Function(_in_place), x(4, 4)),
    "a gradient of its own": lambda: (Function(lambda w, a: Doubled.apply(a @ w)), x(4, 4)),
    "a loss": lambda: (
        Function(lambda w, a, t: F.cross_entropy(a @ w, t) + F.mse_loss(a, w)),
        x(4, 4),
        torch.tensor([0, 3, 1, 1]),
    ),
    "a column of the result": lambda: (Function(lambda w, a: (a @ w)[:, 1]), x(4, 4)),
    "two views of one result": lambda: (Function(lambda w, a: _halves(a @ w)), x(4, 4)),
    "what is saved returned as a view": lambda: (Function(lambda w, a: torch.tanh(a @ w).t()), x(4, 4)),
    "an input returned": lambda: (Function(lambda w, a: (a @ w, a, a.t(), a.detach())), x(4, 4)),
    "positions": lambda: (Function(lambda w, a: (a @ w).max(1)), x(4, 4)),
    "a result of no gradient": lambda: (Function(lambda w, a: (a @ w, (a * 2).detach(), a > 0, 3)), x(4, 4)),
    "products that are merged and saved": lambda: (Experts(), x(5, 4)),
    "a weight that is not used": lambda: (Function(lambda w, a: a * 2), x(4, 4)),
}


def _halves(y: Tensor) -> tuple[Tensor, Tensor]:
    return y[:2], y[2:]


def _with_no_grad(w: Tensor, a: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (a @ w).sigmoid()
    return (a * w).tanh() * scale + a.detach().exp() * w


def _in_place(w: Tensor, a: Tensor) -> Tensor:
    y = a @ w
    y[:, 1] *= 3
    y[0] = a[1].tanh()
    return y.mul_(2) + a.relu()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return 2 * g + 0 * a


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_eagers(name: str) -> None:
    model, *args = MODULES[name]()
    assert_trains(model, *args)


def test_dropout_draws_what_eager_draws_and_keeps_its_mask_for_the_gradient() -> None:
    assert_trains(nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Tanh()), x(8, 4), exact=False)


@pytest.mark.parametrize("name", ["an mlp", "softmax", "a mask", "a recurrent loop", "a residual", "cat and slice"])
def test_gradients_agree_with_differences(name: str) -> None:
    model, *args = MODULES[name]()
    fused = fuse.compile(model.double())
    exact = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in args]
    assert torch.autograd.gradcheck(lambda *given: fused(*given[:-1]), (*exact, model_weight(model)))
    assert fused.last_run.fallbacks == ()


def model_weight(model: nn.Module) -> Tensor:
    return next(model.parameters())


def test_an_optimizer_trains_the_same_curve() -> None:
    model, data, target = mlp(), torch.randn(16, 4), torch.randint(0, 3, (16,))
    eager = copy.deepcopy(model)
    curves = []
    for run, trained in ((fuse.compile(model), model), (eager, eager)):
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cpu")
        curve = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.nll_loss(run(data), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0][-1] < 0.9 * curves[0][0]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_a_frozen_weight_gets_no_gradient_and_one_thawed_later_does() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    fused = assert_trains(model, x(3, 4))
    model[0].requires_grad_(True)
    model.zero_grad()
    fused(torch.ones(3, 4)).sum().backward()
    assert model[0].weight.grad is not None
    assert fused.last_run.fallbacks == ()


def test_a_graph_can_be_kept_and_is_freed_otherwise() -> None:
    model = Function(lambda w, a: torch.tanh(a @ w))
    y = fuse.compile(model)(torch.ones(2, 4)).sum()
    y.backward(retain_graph=True)
    assert model.weight.grad is not None
    once = model.weight.grad.clone()
    y.backward()
    torch.testing.assert_close(model.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_loss_of_some_results_leaves_the_others_alone() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.body(a))
            return self.left(h).log(), self.right(h)  # the logarithm's gradient is no number

    model = Heads()
    eager, a = copy.deepcopy(model), torch.randn(3, 4)
    fused = fuse.compile(model)
    for pick in (1, 0, 1):
        for one in (model, eager):
            one.zero_grad()
        fused(a)[pick].sum().backward()
        eager(a)[pick].sum().backward()
        for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            torch.testing.assert_close(mine.grad, theirs.grad, equal_nan=True)


class Fills(nn.Module):
    """A loop whose steps read the part of a tensor that the step before wrote."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.linear, self.copies = nn.Linear(4, 4), copies

    def forward(self, a: Tensor) -> Tensor:
        out = a.new_zeros(len(a) + 1, 3, 4)
        for t in range(len(a)):
            h = out[t].clone() if self.copies else out[t]
            out[t + 1] = torch.tanh(a[t] + self.linear(h))
        return out


@pytest.mark.parametrize("steps", [2, 6, 40])
def test_a_loop_that_overwrites_what_is_saved_raises_as_in_eager(steps: int) -> None:
    a = torch.randn(steps, 3, 4)
    assert_trains(Fills(copies=True), a, exact=False)
    for run in (Fills(copies=False), fuse.compile(Fills(copies=False))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = run(a)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_a_write_to_what_is_saved_is_noticed() -> None:
    model = Function(lambda w, a: torch.tanh(a @ w))
    fused = fuse.compile(model)
    y = fused(torch.ones(2, 4))
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = fused(x(2, 4)).sum()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_result_that_is_not_saved_may_be_written() -> None:
    a = x(2, 4)
    model = Function(lambda w, a: (a @ w).view(4, 2))
    y = fuse.compile(model)(a)
    y.mul_(2)
    y.sum().backward()
    torch.testing.assert_close(a.grad, (2 * model.weight.detach().sum(1)).expand(2, 4))


WRITTEN: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "what a loop collects": lambda: (Function(unrolled), x(7, 3, 4)),
    "a copy": lambda: (Function(lambda w, a: torch.tanh(a @ w).clone()), x(3, 4)),
    "a part": lambda: (Function(lambda w, a: (a @ w)[1:]), x(3, 4)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_result_that_eager_does_not_save_may_be_written(name: str) -> None:
    model, a = WRITTEN[name]()
    eager, (eager_a,) = own(model, (a,))
    best, (best_a,) = own(model, (a,), torch.float64)
    for run, given in ((fuse.compile(model), a), (eager, eager_a), (best, best_a)):
        y = run(given)
        y.mul_(2)
        y.square().sum().backward()
    assert not compare("argument", a.grad, eager_a.grad, best_a.grad, atol=1e-5, rtol=1e-5).problem
    assert not compare("weight", model.weight.grad, eager.weight.grad, best.weight.grad, atol=1e-5, rtol=1e-5).problem


def test_hooks_and_gradients_of_inner_tensors_outside_of_the_model_work() -> None:
    model, a = mlp(), torch.randn(3, 4, requires_grad=True)
    seen: list[Tensor] = []
    model[0].weight.register_hook(lambda g: 2 * g)
    model[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    inner = a * 2
    inner.retain_grad()
    fuse.compile(model)(inner).sum().backward()
    mine = [p.grad.clone() for p in model.parameters()]
    eager = copy.deepcopy(model)
    eager.zero_grad()
    eager(inner.detach()).sum().backward()
    torch.testing.assert_close(mine[0], 2 * eager[0].weight.grad)
    assert len(seen) == 1
    assert inner.grad is not None


def test_autocast_is_followed() -> None:
    model, a = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), x(3, 8)
    eager, eager_a = own(model, (a,))
    fused = fuse.compile(model)
    for run, given in ((fused, a), (eager, eager_a[0])):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(given)
        (y.float() ** 2).sum().backward()
    assert fused.last_run.fallbacks == ()
    torch.testing.assert_close(model[0].weight.grad, eager[0].weight.grad, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(a.grad, eager_a[0].grad, atol=1e-2, rtol=1e-2)


def test_inference_and_training_take_turns() -> None:
    model, a = mlp(), torch.randn(3, 4)
    fused = fuse.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(fused(a), model(a))
            assert fused.last_run.backward is None
        fused(a).square().sum().backward()
        optimizer.step()
    again = copy.deepcopy(fused)
    again.load_state_dict(fused.state_dict())
    torch.testing.assert_close(again(a), model(a))


class HeldInADict(nn.Module):
    """A weight that the call reaches by a plain dictionary, and by its own name, too, where ``both``."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.held = {"weight": self.weight}
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.held["weight"].view(1, 4)).cumsum(0)
        return y * self.weight * self.other if self.both else y


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("needs", [False, True])
def test_a_weight_in_a_plain_container_is_trained(both: bool, needs: bool) -> None:
    assert_trains(HeldInADict(both), torch.randn(3, 4, requires_grad=needs))


class HeldPlainly(nn.Module):
    """No parameters, and a tensor that needs gradients in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.randn(4, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


@pytest.mark.parametrize("needs", [False, True])
def test_a_tensor_that_is_no_parameter_is_trained(needs: bool) -> None:
    model = HeldPlainly()
    weight = model.weight
    x = torch.randn(3, 4, requires_grad=needs)
    expected = torch.autograd.grad(loss_of(torch.tanh(x * weight)), weight)[0]
    fused = fuse.compile(model)
    for _ in range(2):
        with torch.no_grad():
            assert not fused(x).requires_grad
        result = fused(x)
        assert fused.last_run.fallbacks == ()
        torch.testing.assert_close(torch.autograd.grad(loss_of(result), weight)[0], expected)
    weight.requires_grad_(False)
    assert fused(x).requires_grad is needs


def test_a_result_without_gradients_runs_fused() -> None:
    fused = fuse.compile(Function(lambda w, a: (a @ w).argmax(1)))
    assert not fused(torch.ones(3, 4)).requires_grad
    assert fused.last_run.fallbacks == ()


SCALE = torch.arange(4.0)


def test_a_result_needs_gradients_where_no_input_gets_one() -> None:
    model = Function(lambda w: 2 * torch.linalg.vector_norm(w, ord=0) + 1)
    result = fuse.compile(model)()
    assert result.requires_grad
    result.backward()
    assert model.weight.grad is None


def test_a_tensor_from_outside_is_returned_as_it_is() -> None:
    fused = fuse.compile(Function(lambda w, a: (a @ w * SCALE, SCALE)))
    for _ in range(2):
        result, scale = fused(torch.ones(3, 4))
        assert scale is SCALE
        assert result.requires_grad
    assert fused.last_run.fallbacks == ()


class KeepsGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("state", torch.zeros(3, 4))

    def forward(self, a: Tensor) -> Tensor:
        h = torch.tanh(a @ self.weight) + self.state.clone()
        self.state.copy_(h)
        return h * 2


def _hooked(w: Tensor, a: Tensor) -> Tensor:
    y = a @ w
    y.register_hook(lambda g: 2 * g)
    return y * 1


def _backward_inside(w: Tensor, a: Tensor) -> Tensor:
    (a @ w).sum().backward()
    return a @ w


def _turned_over_with_a_row(w: Tensor, a: Tensor) -> Tensor:
    y = w * 2
    y.t_()
    row = y[0]
    y.t_()
    return a * row


def _view_turned_over(w: Tensor, a: Tensor) -> Tensor:
    whole = torch.cat([w, w]) * 2
    y = whole[:4]
    y.t_()
    whole.add_(1)
    return a @ y


def module_hook() -> nn.Module:
    model = mlp()
    model[1].register_full_backward_hook(lambda module, gi, go: None)
    return model


DECLINED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a state with gradients": (KeepsGradient, "forward writes state, which needs gradients"),
    "a hook in forward": (lambda: Function(_hooked), "registers a hook on a tensor"),
    "a backward pass in forward": (lambda: Function(_backward_inside), r"leaves a gradient in .grad"),
    "a tensor turned over that has a view": (lambda: Function(_turned_over_with_a_row), "shape of a tensor with views"),
    "a view turned over": (lambda: Function(_view_turned_over), "shape of a tensor with views"),
    "a hook of a module": (module_hook, "module 1 has a backward hook"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_a_graph_cannot_hold_runs_eager_with_one_warning(name: str) -> None:
    make, reason = DECLINED[name]
    model, a = make(), x(3, 4)
    eager, (eager_a,) = own(model, (a,))
    fused = fuse.compile(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fused(a).square().sum().backward()
    eager(eager_a).square().sum().backward()
    assert len(caught) == 1
    assert fused.last_run.launches == 0
    with pytest.raises(AssertionError, match=reason):
        assert not fused.last_run.fallbacks, fused.last_run.fallbacks[0].reason
    torch.testing.assert_close(a.grad, eager_a.grad)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_new_tensor_is_turned_over_in_place() -> None:
    def function(w: Tensor, a: Tensor) -> Tensor:
        y = w * 2
        y.t_().unsqueeze_(0)
        return a @ y[0]

    model, a = Function(function), x(3, 4)
    eager, (eager_a,) = own(model, (a,))
    fused = fuse.compile(model)
    fused(a).square().sum().backward()
    eager(eager_a).square().sum().backward()
    assert fused.last_run.fallbacks == ()
    torch.testing.assert_close(a.grad, eager_a.grad)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_an_input_that_is_written_and_saved_is_saved_as_it_was() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("count", torch.ones(4))

        def forward(self, a: Tensor) -> Tensor:
            y = a * self.weight * self.count.clone()
            self.count += 1
            return y

    assert_trains(Counts(), x(3, 4))


def test_many_gradients_at_once_are_eagers() -> None:
    model, a = mlp(), torch.randn(3, 4)
    fused = fuse.compile(model)
    mine = torch.autograd.functional.jacobian(fused, a, vectorize=True)
    assert fused.last_run.fallbacks == ()
    torch.testing.assert_close(mine, torch.autograd.functional.jacobian(model, a))


def test_gradients_in_forward_mode_are_eagers() -> None:
    model, a = mlp(), torch.randn(3, 4)
    fused = fuse.compile(model)
    with torch.no_grad():
        fused(a)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        with pytest.warns(UserWarning, match="forward mode"):
            mine = torch.autograd.forward_ad.unpack_dual(fused(dual)).tangent
        theirs = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
    torch.testing.assert_close(mine, theirs)


def test_hooks_on_saved_tensors_make_the_call_eager() -> None:
    model = mlp()
    fused = fuse.compile(model)
    with torch.autograd.graph.save_on_cpu(), pytest.warns(UserWarning, match="hooks on saved tensors"):
        fused(torch.randn(3, 4)).sum().backward()
    fused(torch.randn(3, 4)).sum().backward()
    assert fused.last_run.fallbacks == ()


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.from_input, self.from_hidden = nn.Linear(8, 64), nn.Linear(16, 64)

    def forward(self, xs: Tensor) -> tuple[Tensor, Tensor]:
        h = c = xs.new_zeros(xs.shape[1], 16)
        outputs = []
        for one in range(len(xs)):
            i, f, g, o = (self.from_input(xs[one]) + self.from_hidden(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), c


def test_a_step_of_a_recurrent_loop_launches_as_much_at_any_length() -> None:
    launches = []
    for length in (12, 24):
        run = assert_trains(Lstm(), torch.randn(length, 3, 8)).last_run
        launches.append((run.launches, run.backward.launches))
    assert launches[0] == launches[1]
    assert sum(launches[0]) <= 20


class TwoLayouts(nn.Module):
    """Two results of one value, whose gradients arrive in two layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.linear(x).view(2, 4, 2, 4)
        turned = heads.transpose(1, 2) @ heads.new_ones(4, 4)
        return heads.sin(), turned


@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_of_one_result_whose_gradient_lies_otherwise_than_the_sum_of_all(used: int) -> None:
    model = TwoLayouts()
    expected, fused = copy.deepcopy(model), fuse.compile(model)
    for _ in range(2):
        x = torch.randn(2, 4, 8)
        fused(x)[used].square().sum().backward()
        expected(x)[used].square().sum().backward()
    assert fused.last_run.fallbacks == ()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


class Features(nn.Module):
    """A result that is computed from another result; ``through`` says whether gradients flow between them."""

    def __init__(self, through: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.through = nn.Linear(3, 4), nn.Linear(4, 2), through

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return self.last(h if self.through else h.detach()), h


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "a hook": lambda h: h.register_hook(lambda gradient: gradient * 3),
    "retain_grad": lambda h: h.retain_grad(),
}


@pytest.mark.parametrize("hook", list(HOOKS))
def test_a_hook_that_gets_the_gradient_of_a_later_result_is_refused_once_and_then_right(hook: str) -> None:
    model, x = Features(), torch.randn(5, 3)
    fused = fuse.compile(model)
    y, h = fused(x)
    HOOKS[hook](h)
    with pytest.raises(RuntimeError, match="from which another result is computed"):
        (y.sum() + h.square().sum()).backward()
    found = []
    for run in (fused, model):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y, h = run(x)
        HOOKS[hook](h)
        (y.sum() + h.square().sum()).backward()
        found.append([h.grad if h.retains_grad else None, *(p.grad for p in model.parameters())])
    assert fused.last_run is not None
    assert "from which another result is computed" in fused.last_run.fallbacks[0].reason
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("hook", list(HOOKS))
@pytest.mark.parametrize("case", ["later result", "loss without it", "no gradient between"])
def test_a_hook_that_gets_no_gradient_of_another_result_works(case: str, hook: str) -> None:
    model, x = Features(case != "no gradient between"), torch.randn(5, 3)
    fused, found = fuse.compile(model), []
    for run in (fused, model):
        model.zero_grad()
        y, h = run(x)
        hooked = y if case == "later result" else h
        HOOKS[hook](hooked)
        (h.square().sum() + (0 if case == "loss without it" else y.sum())).backward()
        found.append([hooked.grad if hooked.retains_grad else None, *(p.grad for p in model.parameters())])
    assert fused.last_run is not None
    assert not fused.last_run.fallbacks
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("removed", [False, True])
def test_a_hook_outlives_its_result(removed: bool) -> None:
    """The result is gone before the backward pass; autograd keeps its hooks, of which none is left if ``removed``."""
    model, x = Features(), torch.randn(5, 3)
    fused, found = fuse.compile(model), []

    def loss(run: nn.Module) -> Tensor:
        y, h = run(x)
        handle = h.register_hook(lambda gradient: gradient * 3)
        if removed:
            handle.remove()
        return y.sum() + h.square().sum()

    if not removed:
        with pytest.raises(RuntimeError, match="from which another result is computed"):
            loss(fused).backward()
    for run in (fused, model):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss(run).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])
    assert fused.last_run is not None
    assert bool(fused.last_run.fallbacks) is not removed


def test_a_hook_is_refused_at_one_size_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes vary from step to step: one step raises, not the first one of each size, and no further one is captured."""
    model, raised, captured = Features(), 0, []
    capture = making.capture_joint
    monkeypatch.setattr(making, "capture_joint", lambda *a, **k: captured.append(1) or capture(*a, **k))
    fused = fuse.compile(model)
    for rows in (5, 6, 7, 8, 5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y, h = fused(torch.randn(rows, 3))
        h.register_hook(lambda gradient: gradient * 3)
        try:
            (y.sum() + h.square().sum()).backward()
        except RuntimeError:
            raised += 1
    assert raised == len(captured) == 1


def test_the_last_run_does_not_keep_what_a_hook_refers_to() -> None:
    fused, held = fuse.compile(Features()), nn.Linear(1, 1)
    y, h = fused(torch.randn(5, 3))
    h.register_hook(lambda gradient, held=held: gradient)
    still = weakref.ref(held)
    del y, h, held
    assert fused.last_run is not None
    assert still() is None
