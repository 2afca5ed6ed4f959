"""Tables that ``forward`` makes and looks a size up in: each look-up is recorded, so that no other size is served."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from tests.runtime.recapturing import recaptured
from tests.runtime.test_reaching import captures

LENGTHS = 11, 27, 19, 31, 23, 14, 29, 40, 22, 24, 26, 25
"""25 is the size for which all tables have another number, and it is called last."""
ODD = 25

__all__ = ["captures"]  # a fixture


def numbers() -> list[float]:
    found = [1.0] * 60
    found[ODD] = 3.0
    return found


def from_a_local(x: Tensor) -> Tensor:
    table = [1.0] * 60
    table[ODD] = 3.0
    return x * table[x.shape[0]]


def from_the_end(x: Tensor) -> Tensor:
    table = numbers()[::-1]
    return x * table[-1 - x.shape[0]]


def from_a_result(x: Tensor) -> Tensor:
    return x * numbers()[x.shape[0]]


def from_a_display(x: Tensor) -> Tensor:
    return x * [1.0, 3.0][x.shape[0] == ODD]


def from_a_constant(x: Tensor) -> Tensor:
    return x * (3.0, 1.0, 1.0, 1.0, 1.0)[x.shape[0] % 5]


def from_a_text(x: Tensor) -> Tensor:
    return x if "....................................................."[x.shape[0]] == "x" else x * 2


def from_an_inner_table(x: Tensor) -> Tensor:
    tables = [numbers(), numbers()]
    return x * tables[0][x.shape[0]]


def from_a_slice(x: Tensor) -> Tensor:
    table = numbers()
    return x * sum(table[: x.shape[0] + 1])


def from_a_deque(x: Tensor) -> Tensor:
    table = deque(numbers())
    return x * table[x.shape[0]]


def from_a_comprehension(x: Tensor) -> Tensor:
    table = [3.0 if n == ODD else 1.0 for n in range(60)]
    (factor,) = [table[n] for n in (x.shape[0],)]
    return x * factor


def in_a_function(x: Tensor) -> Tensor:
    table = numbers()

    def factor(n: int) -> float:
        return table[n]

    return x * factor(x.shape[0])


def by_a_getter(x: Tensor) -> Tensor:
    return x * operator.itemgetter(x.shape[0])(numbers())


def by_a_method(x: Tensor) -> Tensor:
    return x * numbers().pop(x.shape[0])


def by_its_own_method(x: Tensor) -> Tensor:
    return x * numbers().__getitem__(x.shape[0])


def by_an_iterator(x: Tensor) -> Tensor:
    return x * next(itertools.islice(numbers(), x.shape[0], None))


def in_the_last_step(x: Tensor) -> Tensor:
    table, h, factor = [0.0, *numbers()], x[0] * 0, 1.0
    for t in range(x.shape[0] + 1):
        factor = table[t + 1]
        h = torch.tanh(h + factor)
    return h * factor


def written_at(x: Tensor) -> Tensor:
    table = [1.0] * 60
    table[x.shape[0]] = 3.0
    return x * table[ODD]


def of_tensors(x: Tensor) -> Tensor:
    one, other = torch.ones_like(x), torch.zeros_like(x)
    table = [one] * ODD + [other] + [one] * ODD
    return x + table[x.shape[0]]


def of_constants(x: Tensor) -> Tensor:
    return x + CONSTANTS[x.shape[0]]


def of_the_remainder(x: Tensor) -> Tensor:
    table = [x.sin(), x.cos(), x * 2]
    return table[x.shape[0] % 3]


def beside_the_steps(x: Tensor) -> Tensor:
    h, factor = x[0] * 0, 1.0
    for row, factor in zip(x, numbers()[1:], strict=False):  # noqa: B007 - the last one is used
        h = torch.tanh(row + h)
    return h * factor


def in_a_text(x: Tensor) -> Tensor:
    h, text = x[0] * 0, ""
    for row in x:
        h = torch.tanh(row + h)
        text += "."
    return -h if len(text) == ODD else h


CONSTANTS = [torch.full((3,), number) for number in numbers()]

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    one.__name__: one
    for one in (
        *(from_a_local, from_the_end, from_a_result, from_a_display, from_a_constant, from_a_text, from_a_slice),
        *(from_an_inner_table, from_a_deque, from_a_comprehension, in_a_function, by_a_getter, by_a_method),
        *(of_tensors, of_constants, of_the_remainder, beside_the_steps, in_a_text),
        *(by_its_own_method, by_an_iterator, in_the_last_step, written_at),
    )
}


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.function(x))


@pytest.mark.sampled
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_look_up_by_a_size_is_right_at_every_size(name: str) -> None:
    model = Model(FUNCTIONS[name])
    fused = fuse.compile(model)
    with torch.no_grad():
        for length in LENGTHS:
            x = torch.randn(length, 3)
            torch.testing.assert_close(fused(x), model(x))


def layout(x: Tensor) -> tuple[int, int]:
    return x.shape[0], 3


def without_a_look_up(x: Tensor) -> Tensor:
    steps, width = layout(x)
    h, shape = x[0] * 0, [steps, width]
    for t in range(steps):
        h = torch.tanh(x[t] + h)
    return (h + x[:steps]).view(shape)


@pytest.mark.usefixtures("captures")
def test_results_that_could_be_tables_cost_nothing() -> None:
    assert recaptured(Model(without_a_look_up), LENGTHS, 3) <= 4
