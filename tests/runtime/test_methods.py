"""Methods of a compiled model other than ``forward``: right, and what they call runs fused."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fuse
from fuse.runtime.methods import LARGEST_IDLE


class Base(nn.Module):
    def described(self) -> str:
        return "base"


class Model(Base):
    """A recurrent model with the methods of published ones."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Sigmoid())
        self.cell = nn.GRUCell(4, 4)
        self.calls = 0

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        h = torch.zeros_like(x) if h is None else h
        y = self.encoder(x)
        for _ in range(6):
            h = self.cell(y, h)
        return h

    @torch.no_grad()
    def generate(self, x: Tensor, steps: int = 3) -> Tensor:
        """Feeds results back."""
        for _ in range(steps):
            x = self(x)
        return x

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._loss(self(batch[0]), batch[1])

    def _loss(self, y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean()

    def by_forward(self, x: Tensor) -> Tensor:
        return self.forward(x, h=x)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x) * 2

    def described(self) -> str:
        return super().described() + type(self).__name__

    def counted(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.generate(x, self.calls)

    def raising(self, x: Tensor) -> Tensor:
        self(x)
        raise KeyError("own")

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            x = self(x)
            yield x

    @property
    def width(self) -> int:
        return self.cell.hidden_size

    @classmethod
    def made(cls) -> Model:
        return cls()

    @staticmethod
    def plain(x: Tensor) -> Tensor:
        return x + 1


X = torch.rand(3, 4)


def pair() -> tuple[Model, Model, Any]:
    torch.manual_seed(0)
    model = Model()
    return copy.deepcopy(model), model, fuse.compile(model)


CALLS: dict[str, tuple[Any, ...]] = {
    "generate": (X,), "training_step": ((X, X),), "by_forward": (X,), "encode": (X,), "counted": (X,), "plain": (X,),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_method_is_right_and_its_calls_run_fused(name: str) -> None:
    eager, model, fused = pair()
    for _ in range(6):
        mine, theirs = getattr(fused, name)(*CALLS[name]), getattr(eager, name)(*CALLS[name])
        torch.testing.assert_close(mine, theirs)
        assert mine.requires_grad == theirs.requires_grad
        if mine.requires_grad:
            mine.sum().backward()
            theirs.sum().backward()
            for one, other in zip(model.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)
        assert "forward" not in vars(model)
    assert eager.calls == model.calls
    if name == "plain":
        assert fused.last_run is None
    elif name == "encode":
        assert "encode is a method" in fused.last_run.fallbacks[0].reason
        assert 0 < fused.last_run.launches <= 2
    else:
        assert 0 < fused.last_run.launches <= 4, "six steps of a cell are one kernel"
        assert fused.last_run.fallbacks == ()


def test_methods_without_modules_become_the_models_own() -> None:
    eager, model, fused = pair()
    for _ in range(LARGEST_IDLE):
        assert fused.described() == eager.described() == "baseModel"
    assert type(fused.described) is MethodType
    assert fused.described == model.described
    assert fused.width == 4
    assert type(fused.made()) is Model


def test_a_method_has_the_attributes_of_the_models() -> None:
    _, model, fused = pair()
    assert inspect.signature(fused.generate) == inspect.signature(model.generate)
    assert (fused.generate.__name__, fused.generate.__doc__) == ("generate", "Feeds results back.")
    assert fused.generate.__self__ is model
    assert fused.generate == model.generate
    assert len({fused.generate, fused.generate}) == 1
    torch.testing.assert_close(pickle.loads(pickle.dumps(fused.generate))(X), model.generate(X))


def test_an_error_leaves_the_model_as_it_was() -> None:
    _, model, fused = pair()
    for _ in range(2):
        with pytest.raises(KeyError, match="own"):
            fused.raising(X)
        assert "forward" not in vars(model)
        torch.testing.assert_close(fused(X), model(X))


def test_a_generator_is_right() -> None:
    eager, _, fused = pair()
    torch.testing.assert_close([*fused.stream(X)], [*eager.stream(X)])


def test_hooks_of_the_model_run_once_a_call() -> None:
    _, model, fused = pair()
    fused.generate(X)
    seen: list[int] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    fused.generate(X, steps=5)
    assert len(seen) == 5


def test_modes_see_the_operators_of_a_method() -> None:
    eager, _, fused = pair()
    found = []
    fused.generate(X)
    for one in (eager, fused):
        with FlopCounterMode(display=False) as counting:
            one.generate(X)
        found.append(counting.get_total_flops())
    assert found[0] == found[1] > 0


def test_a_method_of_a_fused_part_is_captured_with_the_whole() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner.generate(x, 2) + self.inner.encode(x))  # type: ignore[operator]

    eager, _, fused = pair()
    outer = fuse.compile(Outer(fused))
    for _ in range(2):
        torch.testing.assert_close(outer(X), Outer(eager)(X))
    assert outer.last_run is not None
    assert not outer.last_run.fallbacks


@pytest.mark.filterwarnings("error")
def test_threads_may_call_methods_at_once() -> None:
    eager, model, fused = pair()
    expected, found = eager.generate(X), []

    def work() -> None:
        for _ in range(10):
            found.append(fused.generate(X))
            with torch.no_grad():
                found.append(fused.by_forward(fused(fused.generate(X, 1))) * 0 + expected)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for one in found:
        torch.testing.assert_close(one, expected)
    assert fused.last_run.fallbacks == ()
    assert "forward" not in vars(model)


def test_a_default_device_leaves_methods_fused() -> None:
    eager, _, fused = pair()
    with torch.device("cpu"):
        torch.testing.assert_close(fused.generate(X), eager.generate(X))
    assert fused.last_run.launches > 0
    assert fused.last_run.fallbacks == ()
