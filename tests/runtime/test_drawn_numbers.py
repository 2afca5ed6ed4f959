"""Calls that draw from ``random`` or ``numpy.random``: eager's numbers, and generators in eager's state afterwards."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from random import random as drawn
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.graph.capture import capture
from fuse.graph.numbers.drawn_numbers import LARGEST_INPUTS
from fuse.runtime.variants.specialised import LARGEST_FAMILY


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def _states() -> Any:
    return random.getstate(), str(np.random.get_state(legacy=False))


class Decoder(nn.Module):
    """Teacher forcing as in many tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.out = nn.Embedding(12, 8), nn.GRUCell(8, 8), nn.Linear(8, 12)

    def best(self, output: Tensor) -> Tensor:
        return output.argmax(1)

    def forward(
        self, h: Tensor, trg: Tensor, ratio: float = 0.5, per_step: bool = True, simple: bool = False
    ) -> Tensor:
        token, outputs = trg[0], []
        teacher_force = random.random() < ratio
        for t in range(1, trg.shape[0]):
            h = self.cell(self.embedding(token), h)
            output = self.out(h)
            outputs.append(output)
            if per_step:
                teacher_force = random.random() < ratio
            if simple:
                top1 = output.argmax(1)
                token = trg[t] if teacher_force else top1
            else:
                token = trg[t] if teacher_force else self.best(output)
        return torch.stack(outputs)


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Drawing, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.draw, self.calls = nn.Linear(6, 6), draw, 0

    def forward(self, x: Tensor) -> Any:
        return self.draw(self, torch.tanh(self.linear(x)))


def compiled_calls(model: nn.Module, args: tuple[Any, ...], calls: int = 12, train: bool = False) -> list[bool]:
    """Whether each of these calls ran fused; its results, gradients and generators are held to eager's."""
    eager, fused, found = copy.deepcopy(model), fuse.compile(model), []
    for seed in range(calls):
        results = []
        for one in (eager, fused):
            random.seed(seed)
            np.random.seed(seed)
            one.zero_grad()
            with torch.set_grad_enabled(train), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = one(*args)
            after = _states()
            if train:
                result.square().sum().backward()
            results.append((result, after, [p.grad for p in one.parameters()]))
        torch.testing.assert_close(results[1][0], results[0][0])
        assert results[1][1] == results[0][1]
        torch.testing.assert_close(results[1][2], results[0][2])
        assert fused.last_run is not None
        found.append(fused.last_run.fallbacks == ())
    return found


def _decoded() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 8), torch.randint(0, 12, (7, 3))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("ratio", [0, 0.0, 1, 1.0])
def test_a_comparison_with_one_result_needs_no_specialisation(ratio: float, train: bool) -> None:
    model = Decoder()
    assert all(compiled_calls(model, (*_decoded(), ratio), 4, train))
    drawn = capture(model, (*_decoded(), ratio)).meta["signature"].drawn
    assert (len(drawn.draws), drawn.comparisons) == (7, ())


@pytest.mark.parametrize("train", [False, True])
def test_one_draw_for_each_batch_makes_two_programs(train: bool) -> None:
    fused = Decoder()
    assert all(compiled_calls(fused, (*_decoded(), 0.5, False), 8, train))


@pytest.mark.parametrize("train", [False, True])
def test_a_draw_for_each_step_ends_after_few_captures(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuse.runtime import known_variants

    made = []
    monkeypatch.setattr(known_variants, "make", lambda *a, of=known_variants.make, **k: made.append(1) or of(*a, **k))
    fused = compiled_calls(Decoder(), (*_decoded(), 0.5), 20, train)
    assert not any(fused[8:])
    assert len(made) <= LARGEST_FAMILY


def test_the_message_names_the_line() -> None:
    fused, args = fuse.compile(Decoder()), (*_decoded(), 0.5)
    random.seed(0)

    def decode() -> None:
        with torch.no_grad():
            for _ in range(20):
                fused(*args)

    with pytest.warns(UserWarning, match=r"test_drawn_numbers.py:\d+ differs from call to call"):
        decode()


def _crops(model: Drawing, y: Tensor) -> Tensor:
    start = random.randint(0, 3)
    return y[:, start : start + 3] * 2


def _chooses(model: Drawing, y: Tensor) -> Tensor:
    return random.choice([torch.sin, torch.cos])(y)


def _by_its_name(model: Drawing, y: Tensor) -> Tensor:
    return y * 2 if drawn() < 0.5 else y


def _by_numpy(model: Drawing, y: Tensor) -> Tensor:
    if np.random.rand() < 0.5:
        y = y + 1
    return y * np.random.uniform(0.5, 2) + np.random.randint(3)


def _computes(model: Drawing, y: Tensor) -> Tensor:
    return y * (random.random() * 2 - 1) if random.random() * 2 - 1 < 0 else y


def _keyword(model: Drawing, y: Tensor) -> Tensor:
    return y + random.uniform(a=1, b=2)


def _of_a_tensor(model: Drawing, y: Tensor) -> Tensor:
    return y * random.uniform(0, float(y.sum()))


def _returns(model: Drawing, y: Tensor) -> tuple[Tensor, float, int]:
    return y, random.random(), random.randrange(5)


def _counts(model: Drawing, y: Tensor) -> Tensor:
    model.calls += random.random() < 0.5
    return y + model.calls


def _both(model: Drawing, y: Tensor) -> Tensor:
    y = y * 2 if (y > 2).any() else y
    return torch.nn.functional.dropout(y, 0.5) if random.random() < 0.5 else y


@pytest.mark.parametrize(
    "draw",
    [_crops, _chooses, _by_its_name, _by_numpy, _computes, _keyword, _of_a_tensor, _returns, _both],
    ids=lambda d: d.__name__,
)
def test_draws_are_made_by_programs(draw: Callable[[Drawing, Tensor], Any]) -> None:
    torch.manual_seed(1)
    model, x = Drawing(draw), torch.randn(4, 6)
    if draw is not _both:  # dropout draws from torch's generator as well
        assert all(compiled_calls(model, (x,)))
        return
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    for seed in range(8):
        found = []
        for one in (eager, fused):
            random.seed(seed)
            torch.manual_seed(seed)
            with torch.no_grad():
                found.append((one(x), torch.get_rng_state().tolist(), random.getstate()))
        torch.testing.assert_close(found[1][0], found[0][0])
        assert found[1][1:] == found[0][1:]


def test_gradients_flow_past_drawn_numbers() -> None:
    torch.manual_seed(1)
    assert all(compiled_calls(Drawing(_computes), (torch.randn(4, 6),), train=True))
    assert all(compiled_calls(Drawing(_keyword), (torch.randn(4, 6),), train=True))


def _raises(model: Drawing, y: Tensor) -> Tensor:
    if random.random() < 0.5:
        raise ValueError("unlucky")
    return y + random.random()


def _looks_up(model: Drawing, y: Tensor) -> Tensor:
    return y * random.random() + nn.functional.embedding((y[:, 0] * 0 + 9).long(), model.linear.weight)


@pytest.mark.parametrize(("draw", "error"), [(_raises, ValueError), (_looks_up, IndexError)])
def test_a_call_that_raises_has_drawn_what_eager_drew(draw: Any, error: type[Exception]) -> None:
    model, x = Drawing(draw), torch.randn(4, 6)
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    for seed in range(8):
        found = []
        for one in (eager, fused):
            random.seed(seed)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    result = one(x)
                except error:
                    result = torch.zeros(0)
            found.append((result, _states()))
        torch.testing.assert_close(found[1][0], found[0][0])
        assert found[1][1] == found[0][1]


class _KeepsIt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = random.uniform(1, 2)
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.scale


class _DrawsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * random.random()


@pytest.mark.filterwarnings("ignore:Drawing runs eager")
@pytest.mark.parametrize("function", [_KeepsIt, _DrawsBackward])
def test_a_backward_pass_with_drawn_numbers_runs_eager(function: Any) -> None:
    torch.manual_seed(1)
    model, x = Drawing(lambda _, y: function.apply(y)), torch.randn(4, 6)
    assert not any(compiled_calls(model, (x,), 4, train=True))
    random.seed(5)
    model(x).sum().backward()
    before = _states()
    random.seed(5)
    fuse.compile(model)(x).sum().backward()
    assert _states() == before


def _seeds_again(model: Drawing, y: Tensor) -> Tensor:
    random.seed(0)  # the state in which the test calls it
    return y * random.random()


def _peeks(model: Drawing, y: Tensor) -> Tensor:
    state = random.getstate()
    found = random.random()
    random.setstate(state)
    return y * found


def _many(model: Drawing, y: Tensor) -> Tensor:
    for _ in range(LARGEST_INPUTS + 1):
        y = y + random.random()
    return y


def _formats(model: Drawing, y: Tensor) -> Tensor:
    return y + len(f"{random.random()}")


def _draws_many(model: Drawing, y: Tensor) -> Tensor:
    return y + len(range(random.randint(0, 1000)))


def _of_an_array(model: Drawing, y: Tensor) -> Tensor:
    return y + float(np.random.rand(3).sum())


@pytest.mark.parametrize(
    "draw", [_seeds_again, _peeks, _many, _formats, _draws_many, _of_an_array], ids=lambda d: d.__name__
)
def test_near_misses_run_eager(draw: Callable[[Drawing, Tensor], Any]) -> None:
    torch.manual_seed(1)
    assert not any(compiled_calls(Drawing(draw), (torch.randn(4, 6),), 4))


def test_a_capture_leaves_the_generators_alone() -> None:
    before = _states()
    capture(Drawing(_by_numpy), (torch.randn(4, 6),))
    capture(Decoder(), _decoded())
    assert _states() == before
    assert random.random.__self__ is random._inst


def test_counts_that_depend_on_draws() -> None:
    assert any(compiled_calls(Drawing(_counts), (torch.randn(4, 6),)))


def test_drawn_numbers_are_no_constants_of_frozen_programs() -> None:
    model = Drawing(_keyword).eval()
    fused = fuse.compile(model, freeze=True)
    for seed in range(3):
        random.seed(seed)
        expected = model(torch.ones(2, 6))
        random.seed(seed)
        with torch.no_grad():
            torch.testing.assert_close(fused(torch.ones(2, 6)), expected.detach())
