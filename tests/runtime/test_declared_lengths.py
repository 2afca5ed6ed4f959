"""A length that the user declares to vary: captured at short lengths, right at every other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fuse
from fuse.check.oracle import check
from fuse.errors import FuseError
from fuse.runtime import engine, toolchain

T = Dim("T")
B, H = 3, 16


class Function(nn.Module):
    """A function of the arguments and two weights as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(H, H) / H**0.5)
        self.u = nn.Linear(H, H)
        self.function = function
        self.scale = 2.0

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return self.function(self, x, *others, **named)


def recurrent(m: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.new_zeros(x.shape[1], H)
    states = []
    for step in x:
        h = torch.tanh(m.u(step) + h @ m.w)
        states.append(h)
    return torch.stack(states), h


def backwards_batch_first(m: Function, x: Tensor) -> Tensor:
    h, states = x[:, -1], []
    for t in range(x.shape[1] - 2, -1, -1):
        h = torch.tanh(m.scale * (x[:, t] @ m.w) + h)
        states.append(h)
    return torch.stack(states, 1).flip(1)


def both_directions(m: Function, x: Tensor) -> Tensor:
    ahead, back = recurrent(m, x)[0], recurrent(m, x.flip(0))[0].flip(0)
    return recurrent(m, m.u(ahead) + back)[0]


def masked_mean(m: Function, x: Tensor, mask: Tensor) -> Tensor:
    h = torch.zeros(B, H)
    total = torch.zeros(B, H)
    for t in range(x.shape[0]):
        h = torch.where(mask[:, t : t + 1], torch.tanh(x[t] + h @ m.w), h)
        total = total + h
    return (total / x.shape[0] + x.mean(0)) @ m.w


def written_in_place(m: Function, x: Tensor, out: Tensor) -> int:
    h = torch.zeros(B, H)
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] + h @ m.w)
        out[:, t] = h
    return x.shape[0]


def with_positions(m: Function, x: Tensor) -> dict[str, Any]:
    x = x + torch.arange(x.shape[0]).view(-1, 1, 1) * 0.01
    return {"states": recurrent(m, x)[0], "first": x[:1], "steps": x.shape[0]}


def views_of_one(m: Function, x: Tensor) -> tuple[Tensor, ...]:
    y = torch.tanh(m.u(x))
    return y, y[1:], y.transpose(0, 1), x[2:]


def twice_as_long(m: Function, x: Tensor, other: Tensor) -> Tensor:
    return recurrent(m, torch.cat([x, other]))[0] * m.scale


def sequence(length: int) -> Tensor:
    return torch.randn(length, B, H)


def batch_first(length: int) -> Tensor:
    return torch.randn(B, length, H)


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], Any]] = {
    "recurrent": (recurrent, lambda t: (sequence(t),), {"x": {0: T}}),
    "backwards, batch first": (backwards_batch_first, lambda t: (batch_first(t),), {"x": (None, T, None)}),
    "transposed input": (recurrent, lambda t: (batch_first(t).transpose(0, 1),), {"x": {0: T}}),
    "stack of loops": (both_directions, lambda t: (sequence(t),), ({0: Dim.DYNAMIC},)),
    "two inputs": (
        masked_mean,
        lambda t: (sequence(t), torch.rand(B, t) > 0.3),
        {"x": {0: Dim.AUTO}, "others": ({1: Dim.AUTO},)},
    ),
    "writes": (written_in_place, lambda t: (sequence(t), torch.zeros(B, t, H)), ({0: T}, ({1: T},))),
    "positions and numbers": (with_positions, lambda t: (sequence(t),), {"x": {0: T}}),
    "views": (views_of_one, lambda t: (sequence(t),), {"x": {0: T}}),
    "derived": (twice_as_long, lambda t: (sequence(t), sequence(2 * t + 3)), ({0: T}, ({0: 2 * T + 3},))),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the first argument of every capture from now on."""
    seen: list[tuple[int, ...]] = []
    original = engine.capture

    def counted(model: nn.Module, args: Sequence[Any], *others: Any) -> Any:
        seen.append(tuple(args[0].shape))
        return original(model, args, *others)

    monkeypatch.setattr(engine, "capture", counted)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_lengths_that_were_not_captured_are_right(name: str) -> None:
    function, inputs, declared = CASES[name]
    model = Function(function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (38, 64, 101):
            report = check(model, inputs(length), dynamic_shapes=declared)
            assert report.passed, report
            assert not report.fallbacks


@pytest.mark.parametrize("name", CASES)
def test_later_lengths_are_neither_captured_nor_compiled(
    name: str, captures: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, inputs, declared = CASES[name]
    model = Function(function)
    fused = fuse.compile(model, dynamic_shapes=declared)
    fused(*inputs(50))
    launches = fused.last_run.launches
    assert len(captures) == 3 or name == "positions and numbers"
    assert all(50 not in shape for shape in captures)
    del captures[:]

    def refused(directory: Path, source: str, *rest: object) -> toolchain.Outcome:
        raise AssertionError("something is compiled")

    monkeypatch.setattr(toolchain, "compile_in", refused)
    for length in (51, 200, 12, 50, 51):
        args = inputs(length)
        expected = model(*[a.clone() for a in args])
        torch.testing.assert_close(fused(*args), expected)
        assert fused.last_run.launches == launches
        assert fused.last_run.fallbacks == ()
    assert not captures


def test_short_calls_are_captured_as_they_are(captures: list[tuple[int, ...]]) -> None:
    fused = fuse.compile(model := Function(recurrent), dynamic_shapes={"x": {0: T}})
    for length in (1, 2, 20, 37):
        x = sequence(length)
        torch.testing.assert_close(fused(x), model(x))
    assert [shape[0] for shape in captures] == [1, 2, 20, 37]
    fused(sequence(60))
    assert [shape[0] for shape in captures[4:]] == [11, 18, 37]


def test_lengths_stay_within_their_bounds_and_apart_from_other_sizes(captures: list[tuple[int, ...]]) -> None:
    declared = {"x": {0: Dim("T", min=16)}}
    fuse.compile(Function(recurrent), dynamic_shapes=declared)(sequence(100))
    lengths = [shape[0] for shape in captures]
    assert min(lengths) > 16  # which is the number of units
    assert not {B, H} & set(lengths)
    del captures[:]
    fuse.compile(Function(recurrent), dynamic_shapes={"x": {0: Dim("T", max=30)}})(sequence(25))
    assert captures == [(25, B, H)]


def test_a_change_of_the_model_or_of_the_call_is_noticed(captures: list[tuple[int, ...]]) -> None:
    fused = fuse.compile(model := Function(backwards_batch_first), dynamic_shapes={"x": {1: T}})

    def right(x: Tensor, captured: int) -> None:
        torch.testing.assert_close(fused(x), model(x))
        assert len(captures) == captured
        del captures[:]

    right(batch_first(50), 3)
    model.w.data.mul_(0.5)
    right(batch_first(51), 0)
    model.scale = 3.0
    right(batch_first(52), 3)
    model.w = nn.Parameter(model.w * 2)
    right(batch_first(53), 3)
    right(torch.randn(B + 1, 54, H), 3)
    right(torch.randn(54, B + 1, H).transpose(0, 1), 3)
    right(torch.randn(B + 1, 60, H), 0)


def chunked(m: Function, x: Tensor) -> Tensor:
    return torch.cat([part.sum(0) for part in x[: len(x) - len(x) % 2].chunk(2)])


def decaying(m: Function, x: Tensor) -> Tensor:
    h = torch.zeros(B, H)
    for t, step in enumerate(x):
        h = h * 0.5 + step / (t + 1)
    return h


def turned_over(m: Function, x: Tensor) -> Tensor:
    return torch.stack([torch.tanh(step) for step in x.unbind()][::-1])


def steps_alone(m: Function, x: Tensor) -> list[Tensor]:
    return list(torch.unbind(torch.tanh(x) @ m.w))


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any, str]] = {
    "an even number of steps": (chunked, (sequence(50),), {"x": {0: T}}, "becomes|follow"),
    "as many pieces as steps": (turned_over, (sequence(50),), {"x": {0: T}}, "some lengths only"),
    "as many results as steps": (steps_alone, (sequence(50),), {"x": {0: T}}, "structure"),
    "two lengths": (recurrent, (sequence(50),), {"x": {0: T, 1: Dim("batch")}}, "only one length may"),
    "sizes that disagree": (masked_mean, (sequence(50), torch.rand(B, 51) > 0.5), ({0: T}, ({1: T},)), "one length"),
    "gaps": (recurrent, (torch.randn(50, B, 2 * H)[..., ::2],), {"x": {0: T}}, "gaps"),
    "shared memory": (twice_as_long, ((x := sequence(50)), x[:]), ({0: T}, ({0: T},)), "share memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_one_function_of_the_length_is_captured_with_one_warning(name: str) -> None:
    function, args, declared, reason = REFUSED[name]
    model = Function(function)
    fused = fuse.compile(model, dynamic_shapes=declared)
    with pytest.warns(UserWarning, match=f"captured at each length.*{reason}") as caught:
        torch.testing.assert_close(fused(*args), model(*args))
    assert len(caught) == 1
    longer = [torch.cat([a, a]) if a.dim() == 3 else torch.cat([a, a], 1) for a in args]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fused(*longer), model(*longer))


def test_steps_with_numbers_of_their_own_are_right() -> None:
    model = Function(decaying)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in (50, 77):
            assert check(model, (sequence(length),), dynamic_shapes={"x": {0: T}}).passed


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"y": {0: T}}, "names 'y'.*forward does not take"),
        (T, "give a dictionary"),
    ],
)
def test_a_declaration_that_names_nothing_is_an_error(declared: Any, message: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(FuseError, match=message):
        fuse.compile(Model(), dynamic_shapes=declared)


@pytest.mark.parametrize(
    ("declared", "message"),
    [({"x": {3: T}}, "dimension 3 of x, which has 3"), ({"x": {0: "T"}}, "give a torch.export.Dim")],
)
def test_a_declaration_that_does_not_fit_is_said_so(declared: Any, message: str) -> None:
    fused = fuse.compile(Function(recurrent), dynamic_shapes=declared)
    with pytest.warns(UserWarning, match=message):
        fused(sequence(50))


def test_arguments_may_be_nested_and_named() -> None:
    def nested(m: Function, x: Tensor, *, others: dict[str, list[Tensor]]) -> Tensor:
        return recurrent(m, x + others["more"][0] * others["more"][1])[0]

    declared = {"x": {0: T}, "named": {"others": {"more": [{0: T}, None]}}}
    fused = fuse.compile(model := Function(nested), dynamic_shapes=declared)
    for length in (50, 60):
        x, others = sequence(length), {"more": [sequence(length), torch.randn(H)]}
        torch.testing.assert_close(fused(x, others=others), model(x, others=others))
    assert fused.compiled.graph is None


def test_frozen_weights_are_frozen_at_every_length() -> None:
    fused = fuse.compile(model := Function(recurrent), freeze=True, dynamic_shapes={"x": {0: T}})
    x = sequence(60)
    expected = model(x)
    fused(sequence(50))
    model.w.data.zero_()
    torch.testing.assert_close(fused(x), expected)
    fused.refresh()
    torch.testing.assert_close(fused(x), model(x))
