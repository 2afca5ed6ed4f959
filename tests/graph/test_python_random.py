"""A model that draws from Python's ``random`` has eager's draws, results and state in each call: a program draws, too.

Where it cannot, the model's own Python runs.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

import fuse


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    state = random.getstate()
    yield
    random.setstate(state)


class Model(nn.Module):
    def __init__(self, draws: Callable[[Model, Tensor], Tensor | float | None]) -> None:
        super().__init__()
        self.linear, self.draws = nn.Linear(4, 4), draws
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        found = self.draws(self, x)
        y = torch.tanh(self.linear(x)) * 2
        return y if found is None else y * found


def reasons_of_three_calls(model: Model) -> list[str]:
    """Hold results, draws and state of ``model`` fused to eager's; the reasons why calls ran eager."""
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    reasons: list[str] = []
    for call in range(3):
        x = torch.randn(2, 4)
        random.seed(call)
        expected, after = eager(x), random.random()
        random.seed(call)
        torch.testing.assert_close(fused(x), expected)
        assert random.random() == after
        assert model.scale == eager.scale
        assert fused.last_run is not None
        reasons += [one.reason for one in fused.last_run.fallbacks]
    return reasons


def _checks(model: Model, x: Tensor) -> None:
    """As type checkers do with one item of a list."""
    items = [x, x]
    assert isinstance(items[random.getrandbits(32) % len(items)], Tensor)


def _checks_keyword(
    model: Model, x: Tensor, *, bits: Callable[[int], int] = random.getrandbits, items: Sequence[Tensor] = ()
) -> None:
    """As type checkers do that bind the function that draws as a default, and draw for an empty list, too."""
    number = bits(32)
    assert not items or isinstance(items[number % len(items)], Tensor)


def _checking(bits: Callable[[int], int]) -> Callable[[Model, Tensor], None]:
    def checks(model: Model, x: Tensor) -> None:
        assert isinstance([x][bits(32) % 1], Tensor)

    return checks


def _draws_much(model: Model, x: Tensor) -> None:
    for _ in range(300):
        random.random()


def _scales(model: Model, x: Tensor) -> float:
    return random.random()


def _drops_seldom(model: Model, x: Tensor) -> float:
    return 0.0 if random.random() < 1e-4 else 1.0


def _compares(model: Model, x: Tensor) -> float:
    return 2.0 if random.random() < random.random() else 1.0


def _shuffles(model: Model, x: Tensor) -> Tensor:
    order = [0, 1, 2, 3]
    random.shuffle(order)
    return x[:, order]


def _draws_by_what_it_drew(model: Model, x: Tensor) -> None:
    random.randrange(3)  # again, where the number is too large


def _tensor(model: Model, x: Tensor) -> Tensor:
    return torch.tensor([random.random(), 1.0, 1.0, 1.0])


def _keeps(model: Model, x: Tensor) -> None:
    model.scale = random.random()


def _seeds(model: Model, x: Tensor) -> None:
    random.seed(3)


def _gauss(model: Model, x: Tensor) -> None:
    random.gauss(0, 1)


COMPILED = [
    _checks,
    _checks_keyword,
    _checking(random.getrandbits),
    _draws_much,
    _scales,
    _drops_seldom,
    _compares,
    _draws_by_what_it_drew,
    _keeps,
    _gauss,
]
EAGER = [_shuffles, _tensor, _seeds]


@pytest.mark.parametrize("draws", COMPILED)
def test_programs_draw_what_eager_draws(draws: Callable[[Model, Tensor], Tensor | float | None]) -> None:
    with torch.no_grad():
        assert reasons_of_three_calls(Model(draws)) == []


@pytest.mark.filterwarnings("ignore:Model runs eager")
@pytest.mark.parametrize("draws", EAGER)
def test_draws_that_no_program_makes_are_those_of_eager(
    draws: Callable[[Model, Tensor], Tensor | float | None],
) -> None:
    with torch.no_grad():
        reasons = reasons_of_three_calls(Model(draws))
    assert len(reasons) == 3
    assert all("random" in reason for reason in reasons)
