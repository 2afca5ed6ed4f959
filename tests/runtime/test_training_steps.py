"""Several training steps, written as users write them, give eager's losses and weights."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse

Run = Callable[..., Any]
STEPS = 4


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Model(nn.Module):
    """A tied embedding, a recurrent loop, a norm, a frozen layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.inner, self.state, self.norm = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.running = nn.BatchNorm1d(8)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        xs = self.inner(self.words(tokens))
        h = xs.new_zeros(len(xs), 8)
        for t in range(tokens.shape[1]):
            h = torch.tanh(xs[:, t] + self.state(h))
        h = self.running(torch.tanh(self.norm(h)) + self.frozen(h))
        return F.linear(F.dropout(h, 0.2, self.training), self.words.weight)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield torch.randint(0, 11, (6, 5), generator=generator), torch.randint(0, 11, (6,), generator=generator)


def plain(run: Run, model: nn.Module, make: Callable[..., Any]) -> Iterator[Tensor]:
    optimizer = make(model.parameters())
    for tokens, target in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(run(tokens), target)
        loss.backward()
        optimizer.step()
        yield loss


def accumulated(run: Run, model: nn.Module) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, (tokens, target) in enumerate(batches()):
        loss = F.cross_entropy(run(tokens), target)
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number > 1)
        yield loss


def scaled_and_clipped(run: Run, model: nn.Module) -> Iterator[Tensor]:
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=2.0**30)
    for number, (tokens, target) in enumerate(batches()):
        optimizer.zero_grad()
        loss = F.cross_entropy(run(tokens), target)
        scaler.scale(loss * (torch.inf if number == 1 else 1.0)).backward()  # a step that the scaler leaves out
        scaler.unscale_(optimizer)
        yield nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        yield torch.tensor(scaler.get_scale())


def with_autocast(run: Run, model: nn.Module) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for tokens, target in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(run(tokens), target)
        loss.backward()
        optimizer.step()
        yield loss


def twice_backward(run: Run, model: nn.Module) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for tokens, target in batches():
        optimizer.zero_grad()
        result = run(tokens)
        F.cross_entropy(result, target).backward(retain_graph=True)
        loss = result.square().mean()
        loss.backward()
        optimizer.step()
        yield loss


def two_calls_one_backward(run: Run, model: nn.Module) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for tokens, target in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(run(tokens), target) - run(tokens.flip(0)).log_softmax(-1).mean()
        loss.backward()
        optimizer.step()
        yield loss


def hooked(run: Run, model: Any) -> Iterator[Tensor]:
    seen: list[Tensor] = []
    model.inner.register_forward_hook(lambda module, args, result: result * 0.5)
    model.norm.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    model.state.weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    model.inner.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.norm()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for tokens, target in batches():
        optimizer.zero_grad()
        result = run(tokens)
        result.register_hook(lambda gradient: 2 * gradient)
        F.cross_entropy(result, target).backward()
        optimizer.step()
        yield seen[-1]
    yield torch.tensor(len(seen))


def frozen_and_thawed(run: Run, model: Any) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, (tokens, target) in enumerate(batches()):
        model.frozen.requires_grad_(number % 2 == 1)
        model.norm.requires_grad_(number % 2 == 0)
        optimizer.zero_grad()
        loss = F.cross_entropy(run(tokens), target)
        loss.backward()
        optimizer.step()
        yield loss


def averaged(run: Run, model: nn.Module) -> Iterator[Tensor]:
    """Training, then evaluation of it and of a running average of its weights."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    for tokens, target in batches():
        optimizer.zero_grad()
        F.cross_entropy(run(tokens), target).backward()
        optimizer.step()
        average.update_parameters(model)
        model.eval()
        with torch.no_grad():
            yield F.cross_entropy(run(tokens), target)
        model.train()
    yield average.module.words.weight


def saved_and_loaded(run: Run, model: nn.Module) -> Iterator[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    start = copy.deepcopy(model.state_dict())
    for number, (tokens, target) in enumerate(batches()):
        if number == 2:
            buffer = io.BytesIO()
            torch.save((run.state_dict(), optimizer.state_dict()), buffer)
            buffer.seek(0)
            model_state, optimizer_state = torch.load(buffer)
            run.load_state_dict(start)
            yield F.cross_entropy(run(tokens), target)
            run.load_state_dict(model_state, assign=True)
            optimizer = torch.optim.Adam(model.parameters(), 1e-2)
            optimizer.load_state_dict(optimizer_state)
        optimizer.zero_grad()
        loss = F.cross_entropy(run(tokens), target)
        loss.backward()
        optimizer.step()
        yield loss


def reparametrized(run: Run, model: Any) -> Iterator[Tensor]:
    nn.utils.parametrizations.weight_norm(model.inner)
    yield from plain(run, model, functools.partial(torch.optim.SGD, lr=0.1))


def penalised(run: Run, model: nn.Module) -> Iterator[Tensor]:
    """Gradients by ``torch.autograd.grad``, written into ``.grad``."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trained = [p for p in model.parameters() if p.requires_grad]
    for tokens, target in batches():
        loss = F.cross_entropy(run(tokens), target)
        for weight, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
            weight.grad = gradient
        optimizer.step()
        yield loss


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam, foreach": functools.partial(torch.optim.Adam, lr=1e-2, foreach=True),
    "AdamW, fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
}
WAYS: dict[str, Callable[[Run, nn.Module], Iterator[Tensor]]] = {
    **{name: functools.partial(plain, make=make) for name, make in OPTIMIZERS.items()},
    "accumulated": accumulated,
    "scaled and clipped": scaled_and_clipped,
    "twice backward": twice_backward,
    "two calls, one backward": two_calls_one_backward,
    "hooked": hooked,
    "frozen and thawed": frozen_and_thawed,
    "averaged": averaged,
    "saved and loaded": saved_and_loaded,
    "reparametrized": reparametrized,
    "autograd.grad": penalised,
}


def both(way: Callable[[Run, nn.Module], Iterator[Tensor]], model: nn.Module) -> Any:
    """The fused and the eager run: what they yield, and the weights at the end."""
    curves, states = [], []
    eager = copy.deepcopy(model)
    fused = fuse.compile(model)
    for run, trained in ((fused, model), (eager, eager)):
        torch.manual_seed(3)
        curves.append([value.detach() for value in way(run, trained)])
        states.append(trained.state_dict())
    return fused, curves, states


@pytest.mark.sampled
@pytest.mark.parametrize("name", WAYS)
def test_steps_are_eagers(name: str) -> None:
    fused, curves, states = both(WAYS[name], Model())
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(states[0], states[1], rtol=1e-3, atol=1e-4)
    assert fused.last_run.fallbacks == ()
    assert fused.last_run.launches


def test_autocast_steps_are_eagers_to_half_precision() -> None:
    fused, curves, states = both(with_autocast, Model())
    torch.testing.assert_close(curves[0], curves[1], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(states[0], states[1], rtol=2e-2, atol=2e-2)
    assert fused.last_run.fallbacks == ()


def test_a_copy_trains_apart_from_its_original() -> None:
    fused = fuse.compile(Model().eval())
    tokens, _ = next(batches())
    fused(tokens).sum().backward()
    twin = copy.deepcopy(fused)
    before = fused(tokens)
    for _ in plain(twin, twin, functools.partial(torch.optim.SGD, lr=0.1)):
        pass
    torch.testing.assert_close(fused(tokens), before)
    assert not torch.allclose(twin(tokens), before)
    assert twin.last_run.fallbacks == ()
