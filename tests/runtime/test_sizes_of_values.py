"""Models whose sizes depend on values: right whether these stay, alternate or never repeat, fused where that can be."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.graph.function import Function

ROWS, WIDTH, CALLS = 12, 8, 7
PATTERNS: dict[str, Callable[[int], int]] = {
    "stay": lambda call: 5,
    "alternate": lambda call: 3 + 4 * (call % 2),
    "never repeat": lambda call: 3 + call,
}


class Around(nn.Module):
    """Small operators around a function of rows and of which are chosen."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, chosen: Tensor) -> Any:
        y = torch.tanh(self.first(x) * 0.5 + x)
        return torch.tanh(self.last(self.function(y, chosen)) * 2)


def copied(x: Tensor, m: Tensor) -> Tensor:
    y, x = x * 3, x + 1
    x[m] = y[m]
    return x


def scaled(x: Tensor, m: Tensor) -> Tensor:
    x = x * 1.5
    x[m] *= 2
    return x


def cleared(x: Tensor, m: Tensor) -> Tensor:
    x = x * 1.5
    x[m] = 0
    return x


def branched(x: Tensor, m: Tensor) -> Tensor:
    y = x[m]
    return y.exp() if len(y) > 6 else y + 1


def of_classes(x: Tensor, m: Tensor) -> Tensor:
    """As margins of classes are taken: what is chosen was written by a number of the program's own."""
    target = torch.zeros(ROWS, WIDTH)
    target[torch.arange(ROWS), m.long()] = 1
    return x + x[target == 1].clamp(-0.5, 0.5).mean()


def unique_rows(x: Tensor, m: Tensor) -> Tensor:
    kinds, which = torch.unique(m.cumsum(0), return_inverse=True)
    return x + kinds[which].unsqueeze(-1).to(x.dtype)


def without_loops(x: Tensor, m: Tensor) -> Tensor:
    """Message passing: edges to oneself are left out, messages added where they go."""
    edges = torch.stack([torch.arange(ROWS), torch.arange(ROWS).roll(1) * m])
    edges = edges[:, edges[0] != edges[1]]
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


@torch.library.custom_op("fuse_tests::rows_above", mutates_args=())
def rows_above(x: Tensor, m: Tensor) -> Tensor:
    """An operator that no stand-in runs."""
    return x[m].clone()


@dataclass(frozen=True)
class Kind:
    """``launches`` of a call, at most; ``always``: fused however many are chosen."""

    function: Callable[[Tensor, Tensor], Tensor]
    launches: int
    always: bool = False


KINDS = {
    "copied": Kind(copied, 3, always=True),
    "scaled": Kind(scaled, 3, always=True),
    "cleared": Kind(cleared, 3, always=True),
    "chosen": Kind(lambda x, m: x[m] * 2, 5),
    "branched": Kind(branched, 6),
    "nonzero": Kind(lambda x, m: x[m.nonzero().squeeze(1)] * 2, 6),
    "masked_select": Kind(lambda x, m: torch.masked_select(x, m.unsqueeze(1)).view(-1, WIDTH) * 2, 6),
    "unique": Kind(unique_rows, 8),
    "repeat_interleave": Kind(lambda x, m: x.repeat_interleave(m.long() + 1, 0) * 2, 7),
    "longest": Kind(lambda x, m: x[: m.long().sum().item()] * 2, 5),
    "of classes": Kind(of_classes, 10),
    "without loops": Kind(without_loops, 9),
    "no stand-in": Kind(lambda x, m: rows_above(x, m) * 2, 5),
}


def calls(pattern: str) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(ROWS, WIDTH), torch.arange(ROWS) < PATTERNS[pattern](call)) for call in range(CALLS)]


@pytest.mark.sampled
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_right_and_fused_where_sizes_come_back(name: str, pattern: str) -> None:
    kind = KINDS[name]
    model = Around(kind.function)
    fused, runs = fuse.compile(model), []
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for args in calls(pattern):
            torch.testing.assert_close(fused(*args), model(*args))
            runs.append(fused.last_run)
    if kind.always or pattern != "never repeat":
        assert [run.fallbacks for run in runs] == [()] * CALLS
        assert max(run.launches for run in runs) <= kind.launches
        assert told == []
    if kind.always:
        assert all(one.guard == "none" for run in runs for one in run.reads)
    else:
        assert {one.guard for one in runs[0].reads} & {"size", "number"}
        assert len(told) <= 1, "a size that never repeats is told once"


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("without loops", "no stand-in")])
def test_training_is_right(name: str) -> None:
    model = Around(KINDS[name].function)
    eager = copy.deepcopy(model)
    fused = fuse.compile(model)
    for args in calls("alternate")[:4]:
        for one in (eager, fused):
            one(*args).square().sum().backward()
        assert fused.last_run.fallbacks == ()
        for (label, expected), found in zip(eager.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4, msg=label)


@pytest.mark.parametrize("chosen", [0, 1, ROWS])
@pytest.mark.parametrize("name", ["copied", "scaled", "cleared", "chosen", "nonzero", "unique", "no stand-in"])
def test_none_one_and_all_chosen_pass_the_oracle(name: str, chosen: int) -> None:
    report = check(Around(KINDS[name].function), (torch.randn(ROWS, WIDTH), torch.arange(ROWS) < chosen))
    assert report.passed, str(report)
    assert report.fallbacks == ()


# ---- who learns how many are chosen ----------------------------------------------------------------------------------

LEARNING: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda y: y.shape[0],
    "len": len,
    "size": lambda y: y.size(0),
    "numel": lambda y: y.numel() // WIDTH,
    "numpy": lambda y: len(y.numpy()),
    "like": lambda y: torch.ones_like(y).sum().item() // WIDTH,
    "expand_as": lambda y: torch.ones(WIDTH).expand_as(y).sum().item() // WIDTH,
    "rows": lambda y: sum(1 for _ in y),
    "view": lambda y: y.view(-1).shape[0] // WIDTH,
    "new_zeros": lambda y: y.new_zeros(y.shape[0]).shape[0],
    "a comparison": lambda y: (y == y).shape[0],
}


@pytest.mark.parametrize("ask", LEARNING.values(), ids=LEARNING)
def test_who_asks_how_many_are_chosen_gets_another_program(ask: Callable[[Tensor], Any]) -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor, m: Tensor) -> Any:
            x = x * 2
            y = x[m] * 3
            x[m] = y
            return x.relu() if ask(y) > 4 else -x

    model = Asks()
    fused = fuse.compile(model)
    with torch.no_grad():
        x = torch.ones(ROWS, WIDTH)
        for number in (3, 7, 3, 5, 7):
            chosen = torch.arange(ROWS) < number
            torch.testing.assert_close(fused(x, chosen), model(x, chosen))


def test_a_miss_by_size_changes_nothing_before_the_right_program_runs() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(WIDTH))

        def forward(self, x: Tensor, m: Tensor) -> Tensor:
            self.total += x.sum(0)
            x.mul_(2)
            return nn.functional.dropout(x[m], 0.5, training=True) + self.total

    model = Remembers()
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    with torch.no_grad():
        for number in (3, 7, 3, 7, 7, 3):
            x, m = torch.randn(ROWS, WIDTH), torch.arange(ROWS) < number
            given = x.clone(), x.clone()
            torch.manual_seed(1)
            expected = eager(given[0], m), torch.get_rng_state()
            torch.manual_seed(1)
            torch.testing.assert_close((fused(given[1], m), torch.get_rng_state()), expected)
            torch.testing.assert_close(given[1], given[0])
            torch.testing.assert_close(model.total, eager.total)
            assert fused.last_run.fallbacks == ()


def _caught(x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    chosen = y[m]
    try:
        chosen[5]
        scale = 3
    except IndexError:
        scale = -1
    return _written(x, m, chosen * scale)


def _written(x: Tensor, m: Tensor, value: Tensor) -> Tensor:
    x = x * 2
    x[m] = value
    return x


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        (_caught, (3, 7, 3, 7)),  # an exception tells the size
        (lambda x, y, m: _written(x, m, y[m] * 2), (1, 3, 1, 2, 5)),  # one element is written as a row
        (lambda x, y, m: _written(x, m, y.t().contiguous().t()[m] * 2), (3, 5, 3)),  # a source that lies otherwise
    ],
)
def test_what_a_size_decides_unseen_is_right_at_every_size(
    function: Callable[..., Tensor], counts: Sequence[int]
) -> None:
    fused = fuse.compile(Function(function))
    with torch.no_grad():
        for count in counts:
            x, y, m = torch.randn(8, 3), torch.randn(8, 3), torch.arange(8) < count
            result, expected = fused(x, y, m), function(x, y, m)
            torch.testing.assert_close(result, expected)
            assert result.stride() == expected.stride()


class Marked(nn.Module):
    """Rows of a hidden state are replaced by one that is learned, as masked models of speech and images do."""

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.write, self.layer, self.row = write, nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        return torch.tanh(self.write(self.layer(x), m, self.row))


def _replaced(h: Tensor, m: Tensor, row: Tensor) -> Tensor:
    h[m] = row
    return h


def _replaced_behind(h: Tensor, m: Tensor, row: Tensor) -> Tensor:
    h = h * 2
    h[:, m[0]] = row * 3
    return h


def _replaced_in_part(h: Tensor, m: Tensor, row: Tensor) -> Tensor:
    h[1, m[1]] = row[2]
    return h


@pytest.mark.parametrize(
    "write",
    [
        _replaced,
        _replaced_behind,
        _replaced_in_part,
        lambda h, m, row: torch.index_put(h, (m,), row[None], accumulate=True),
        lambda h, m, row: torch.index_put(h, ((row > 0).expand(h.shape),), row[0]),
    ],
)
def test_one_row_that_a_mask_writes_everywhere_is_trained_whatever_the_mask_chooses(
    write: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    model = Marked(write)
    x, m = torch.randn(3, ROWS, WIDTH), torch.rand(3, ROWS) < 0.5
    report = check(model, (x, m), train=True)
    assert (report.problems, report.fallbacks) == ((), ())
    fused = fuse.compile(model)
    for mask in (m, ~m, torch.zeros_like(m), torch.ones_like(m)):
        gradients = []
        for one in (fused, model):
            model.zero_grad()
            one(x, mask).square().sum().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(*gradients)
    assert fused.last_run.fallbacks == ()


def _least_of_chosen(h: Tensor, m: Tensor, row: Tensor) -> Tensor:
    """Writes a row where a mask is true; the gradient of it is said to be the least of what the mask chose."""

    class Writing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, row: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            x[m] = row
            return x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0], gradients[0][m].amin(0)

    return Writing.apply(h.view(h.shape), row)


def test_gradients_of_ones_own_that_a_mask_chooses_are_not_taken_for_sums() -> None:
    x, m = torch.randn(3, ROWS, WIDTH), torch.rand(3, ROWS) < 0.5
    assert check(Marked(_least_of_chosen), (x, m), train=True).problems == ()
