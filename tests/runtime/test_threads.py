"""Threads that meet while a model is captured: each sees what it would see alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import fuse

PATIENCE = 30.0


class Meeting(nn.Module):
    """Waits, when it is captured, until another thread has done what it wants to do meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.meet = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if isinstance(x, FakeTensor):
            self.meet()
        return torch.tanh(h) * self.scale


def meanwhile(model: Meeting, action: Callable[[], Any]) -> Any:
    """What ``action`` returns in another thread while ``model`` is being captured by a first fused call."""
    found: list[Any] = []
    during, done = threading.Event(), threading.Event()

    def meet() -> None:
        during.set()
        assert done.wait(PATIENCE)

    def other() -> None:
        assert during.wait(PATIENCE)
        try:
            with torch.no_grad():
                found.append(action())
        finally:
            done.set()

    model.meet = meet
    thread = threading.Thread(target=other)
    thread.start()
    x = torch.randn(3, 4)
    with torch.no_grad():
        fused = fuse.compile(model)
        result = fused(x)
        thread.join(PATIENCE)
        model.meet = lambda: None
        torch.testing.assert_close(result, model(x))
    assert fused.compiled is not None
    assert not isinstance(result, FakeTensor)
    return found[0]


def test_eager_calls_of_the_live_model_see_its_own_weights() -> None:
    model, x = Meeting(), torch.randn(2, 4)
    with torch.no_grad():
        expected = model(x)
    assert torch.equal(meanwhile(model, lambda: model(x)), expected)


def test_all_that_names_weights_shows_the_real_ones() -> None:
    model = Meeting()

    def look() -> list[Any]:
        return [*model.parameters(), *model.buffers(), *model.state_dict().values(), model.inner.weight, model.scale]

    assert not any(isinstance(t, FakeTensor) for t in meanwhile(model, look))
    assert type(model.inner._parameters) is dict


def test_a_weight_that_is_set_meanwhile_stays_set() -> None:
    model, weight = Meeting(), nn.Parameter(torch.zeros(4))

    def replace() -> None:
        model.inner.bias.data.copy_(weight.data)

    meanwhile(model, replace)
    assert torch.equal(model.inner.bias, weight)


def test_a_second_compiled_model_with_the_same_weights_captures_and_runs() -> None:
    model, x = Meeting(), torch.randn(2, 4)
    with torch.no_grad():
        expected = torch.tanh(model.inner(x))
    other = fuse.compile(nn.Sequential(model.inner, nn.Tanh()))
    results: list[Tensor] = []

    def call() -> None:
        with torch.no_grad():
            results.append(other(x))

    thread = threading.Thread(target=call)
    meanwhile(model, thread.start)  # it cannot end before the capture does
    thread.join(PATIENCE)
    torch.testing.assert_close(results[0], expected)
    assert other.compiled is not None


def test_an_lstm_layer_and_the_random_generator_are_the_other_threads_own() -> None:
    lstm, x = nn.LSTM(4, 8), torch.randn(5, 2, 4)
    with torch.no_grad():
        expected = lstm(x)[0]

    def seeded() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return lstm(x)[0], torch.rand(2)

    output, drawn = meanwhile(Meeting(), seeded)
    assert torch.equal(output, expected)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))


def test_a_fused_part_does_not_wait_for_the_thread_that_captures_the_whole() -> None:
    model, x = Meeting(), torch.randn(2, 4)
    part = fuse.compile(nn.Linear(4, 4))
    whole = fuse.compile(nn.Sequential(part, nn.Tanh()))
    results: list[Tensor] = []

    def call() -> None:
        with torch.no_grad():
            results.append(whole(x))

    threads = [threading.Thread(target=call) for _ in range(2)]
    threads.append(threading.Thread(target=lambda: results.append(torch.tanh(no_grad(part, x)))))
    meanwhile(model, lambda: [thread.start() for thread in threads])
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    with torch.no_grad():
        expected = torch.tanh(nn.functional.linear(x, part.weight, part.bias))
    assert len(results) == len(threads)
    assert whole.last_run is not None
    assert whole.last_run.fallbacks == ()
    for result in results:
        torch.testing.assert_close(result, expected)


def no_grad(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(x)
    return result


@pytest.mark.parametrize("shared", [True, False], ids=["one_model", "two_models_on_one_part"])
def test_first_calls_at_once_are_right(shared: bool) -> None:
    part = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    first = fuse.compile(part)
    models = [first, first if shared else fuse.compile(nn.Sequential(part, nn.Tanh()))]
    finish: list[Callable[[Tensor], Tensor]] = [lambda t: t, (lambda t: t) if shared else torch.tanh]
    start = threading.Barrier(6)
    wrong: list[str] = []
    finished: list[int] = []

    def work(number: int) -> None:
        x = torch.randn(2 + number % 2, 4)  # two sizes: both are captured at their first call
        with torch.no_grad():
            start.wait(PATIENCE)
            for _ in range(3):
                result, expected = models[number % 2](x), finish[number % 2](part(x))
                if isinstance(result, FakeTensor) or not torch.allclose(result, expected, atol=1e-5):
                    wrong.append(f"{number}: {result} instead of {expected}")
        finished.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == []
    assert len(finished) == 6
    assert all(model.compiled is not None for model in models)
