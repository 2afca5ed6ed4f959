"""The variant that served the last calls serves the next one, and no call that it may not serve."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import fuse
from fuse.runtime import known_variants
from fuse.runtime.guards.unpacking import unpacking


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.power = 2

    def forward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
        return torch.tanh(self.linear(x) * factor) ** self.power + y + torch.zeros(4)


def called(fused: nn.Module, *args: Any, **kwargs: Any) -> int:
    """The number of searches among all variants that three calls took."""
    with mock.patch.object(known_variants, "matching", wraps=known_variants.matching) as searching:
        for _ in range(3):
            fused(*args, **kwargs)
    return searching.call_count


def usual_model() -> tuple[Model, nn.Module, tuple[Tensor, Tensor]]:
    """A model, the same compiled, and what it was called with."""
    torch.manual_seed(0)
    model = Model()
    fused, args = fuse.compile(model), (torch.randn(3, 4), torch.randn(3, 4))
    called(fused, *args)
    assert called(fused, *args) == 0
    return model, fused, args


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a device": lambda: torch.device("cpu"),
    "forward gradients": forward_ad.dual_level,
}


@pytest.mark.parametrize("mode", MODES)
def test_another_mode_is_another_call(mode: str) -> None:
    model, fused, args = usual_model()
    with MODES[mode]():
        result, expected = fused(*args), model(*args)
    assert (result.dtype, result.requires_grad) == (expected.dtype, expected.requires_grad)
    assert result.is_inference() == expected.is_inference()
    torch.testing.assert_close(result, expected)
    assert fused(*args).requires_grad


def test_another_default_dtype_is_another_call() -> None:
    model, fused, args = usual_model()
    torch.set_default_dtype(torch.float64)
    try:
        assert fused(*args).dtype == model(*args).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert fused(*args).dtype == torch.float32


CHANGES: dict[str, Callable[[Model], Any]] = {
    "an attribute": lambda m: setattr(m, "power", 3),
    "a parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "the numbers of a parameter": lambda m: m.linear.weight.data.mul_(2),
    "a hook": lambda m: m.linear.register_forward_hook(lambda module, args, result: result * 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_takes_effect(change: str) -> None:
    model, fused, args = usual_model()
    CHANGES[change](model)
    torch.testing.assert_close(fused(*args), model(*args))


ARGUMENTS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "a number": lambda x, y: (x, y, 2.0),
    "another size": lambda x, y: (x[:2], y[:2]),
    "another stride": lambda x, y: (x.t().contiguous().t(), y),
    "another dtype": lambda x, y: (x, y.double()),
    "one tensor twice": lambda x, y: (x, x),
    "a parameter": lambda x, y: (x, nn.Parameter(y)),
}


@pytest.mark.parametrize("which", ARGUMENTS)
def test_other_arguments_are_another_call(which: str) -> None:
    model, fused, args = usual_model()
    other = ARGUMENTS[which](*args)
    result, expected = fused(*other), model(*other)
    assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(fused(*args), model(*args))


class Structured(nn.Module):
    """A model whose result shows the structure, the order and the values of its arguments."""

    def forward(self, x: Tensor, state: Any = None, **others: Any) -> Any:
        parts = list(state.values() if isinstance(state, dict) else state) if state is not None else []
        named = {name: value * 2 for name, value in others.items() if isinstance(value, Tensor)}
        return type(state).__name__, x + 1, [p * (i + 2) for i, p in enumerate(parts) if isinstance(p, Tensor)], named


class Pair(NamedTuple):
    h: Any
    c: Any


class OwnTuple(tuple[Any, ...]):
    pass


a, b = torch.arange(3.0), torch.ones(3)
STRUCTURES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a tuple": ((a, (a, b)), {}),
    "a list": ((a, [a, b]), {}),
    "a longer tuple": ((a, (a, b, b)), {}),
    "a tuple in a tuple": ((a, (a, (b, b))), {}),
    "a named tuple": ((a, Pair(a, b)), {}),
    "a tuple of one's own": ((a, OwnTuple((a, b))), {}),
    "no tuple": ((a, None), {}),
    "None in a tuple": ((a, (a, None)), {}),
    "a dictionary": ((a, {"h": a, "c": b}), {}),
    "a dictionary in another order": ((a, {"c": b, "h": a}), {}),
    "an ordered dictionary": ((a, OrderedDict(h=a, c=b)), {}),
    "an empty dictionary": ((a, {}), {}),
    "keywords": ((), {"x": a, "state": (a, b)}),
    "keywords in another order": ((), {"state": (a, b), "x": a}),
    "one keyword": ((a,), {"state": (a, b)}),
    "keywords of one's own": ((a, (a, b)), {"one": a, "other": b}),
    "the same in another order": ((a, (a, b)), {"other": b, "one": a}),
    "a keyword more": ((a, (a, b)), {"one": a, "other": b, "third": b}),
    "other keywords": ((a, (a, b)), {"one": a, "another": b}),
}


@pytest.mark.parametrize("other", STRUCTURES)
@pytest.mark.parametrize("usual", ["a tuple", "a dictionary", "keywords", "keywords of one's own"])
def test_another_structure_of_arguments_is_another_call(usual: str, other: str) -> None:
    fused, (args, kwargs), (others, named) = fuse.compile(Structured()), STRUCTURES[usual], STRUCTURES[other]
    called(fused, *args, **kwargs)
    assert called(fused, *args, **kwargs) == 0
    result, expected = fused(*others, **named), Structured()(*others, **named)
    assert repr(result) == repr(expected)
    assert list(result[-1]) == list(expected[-1])
    assert repr(fused(*args, **kwargs)) == repr(Structured()(*args, **kwargs))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_unpacked_leaves_are_those_of_pytree(structure: str) -> None:
    given = STRUCTURES[structure]
    leaves, spec = pytree.tree_flatten(given)
    unpack = unpacking(spec)
    assert (unpack is None) == (structure in ("a named tuple", "an ordered dictionary"))
    if unpack is not None:
        assert [*map(id, unpack(*given) or ())] == [*map(id, leaves)]
        for other in STRUCTURES.values():
            found = unpack(*other)
            assert found is None or pytree.tree_structure(other) == spec or len(pytree.tree_leaves(other)) != len(found)


def test_another_number_of_threads_costs_two_searches() -> None:
    _, fused, args = usual_model()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert called(fused, *args) <= 2
        assert called(fused, *args) == 0
    finally:
        torch.set_num_threads(threads)


def test_calls_of_two_kinds_in_turn() -> None:
    model, fused, args = usual_model()
    for _ in range(4):
        for rows in (3, 2):
            given = [one[:rows] for one in args]
            torch.testing.assert_close(fused(*given), model(*given))


def test_a_model_that_gives_its_weights_other_data_needs_no_search() -> None:
    class Average(Model):
        def forward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
            self.linear.bias.data = self.linear.bias.data * 0.9
            return super().forward(x, y, factor)

    fused, args = fuse.compile(Average()), (torch.randn(3, 4), torch.randn(3, 4))
    called(fused, *args)
    assert called(fused, *args) == 0


def test_what_is_forgotten_serves_no_more() -> None:
    _, fused, args = usual_model()
    before = fused.compiled
    fused.refresh()
    fused(*args)
    assert fused.compiled is not before


def test_hooks_of_the_compiled_module_and_of_all_modules_are_called() -> None:
    _, fused, args = usual_model()
    seen: list[str] = []
    handle = fused.register_forward_hook(lambda module, args, result: seen.append("own"))
    fused(*args)
    handle.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, args, result: seen.append("all"))
    try:
        fused(*args)
    finally:
        everywhere.remove()
    fused(*args)
    assert seen[0] == "own"
    assert "all" in seen[1:]
    assert len(seen) == 1 + seen.count("all")
