"""What makes a compiled graph stale is noticed, and what does not is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fuse
from fuse.runtime.guards import call_guards as guards
from fuse.runtime.guards import state_guard
from fuse.runtime.guards.call_guards import call_guard, flatten, modes, overlaps
from fuse.runtime.guards.state_guard import StateGuard


class Settings:
    def __init__(self) -> None:
        self.layers = 2


@dataclass
class Options:
    layers: int = 2
    name: str = field(default="", compare=False)


class Activation:
    def __init__(self) -> None:
        self.slope = 0.1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, x * self.slope)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.register_buffer("count", torch.zeros(1))
        self.scale = 2
        self.sizes = [1, [2, 3]]
        self.pair = (2, "two")
        self.table = {"two": 2, "mixed": [2, torch.zeros(3)]}
        self.chosen, self.fixed = {2, "two", (3, 4)}, frozenset((2, 3))
        self.settings = Settings()
        self.options = Options()
        self.activation = Activation()
        self.same_options = [self.options]
        self.hidden = [nn.BatchNorm1d(3)]  # a module that nn.Module does not know of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


CHANGES: dict[str, Callable[[Model], Any]] = {
    "another attribute": lambda m: setattr(m, "scale", 3),
    "an equal number of another type": lambda m: setattr(m, "scale", 2.0),
    "an equal number of another type in a list": lambda m: m.sizes.__setitem__(0, True),
    "an equal number of another type in a nested list": lambda m: m.sizes[1].__setitem__(0, 2.0),
    "an equal number of another type in a tuple": lambda m: setattr(m, "pair", (2.0, "two")),
    "an equal number of another type in a dictionary": lambda m: m.table.update(two=2.0),
    "an equal number of another type in a set": lambda m: (m.chosen.discard(2), m.chosen.add(2.0)),
    "an equal number of another type in a tuple in a set": lambda m: (m.chosen.discard((3, 4)), m.chosen.add((3, 4.0))),
    "an equal number of another type in a new set": lambda m: setattr(m, "chosen", {2.0, "two", (3, 4)}),
    "an equal number of another type in a frozen set": lambda m: setattr(m, "fixed", frozenset((2.0, 3))),
    "another element of a set": lambda m: m.chosen.add(5),
    "an equal number of another type beside a tensor": lambda m: m.table["mixed"].__setitem__(0, 2.0),
    "an equal number of another type in an object of settings": lambda m: setattr(m.settings, "layers", 2.0),
    "a new attribute": lambda m: setattr(m, "more", 1),
    "a removed attribute": lambda m: delattr(m, "scale"),
    "inside a nested list": lambda m: m.sizes[1].append(4),
    "an equal object of settings": lambda m: setattr(m, "options", Options()),
    "an equal object of settings, held twice": lambda m: m.same_options.__setitem__(0, Options()),
    "inside an object that can be called": lambda m: setattr(m.activation, "slope", 0.2),
    "what an object of settings does not compare": lambda m: setattr(m.options, "name", "other"),
    "inside an object of settings": lambda m: setattr(m.settings, "layers", 3),
    "training": lambda m: m.inner.eval(),
    "training of a module in a list": lambda m: m.hidden[0].eval(),
    "a parameter": lambda m: setattr(m.inner[0], "weight", nn.Parameter(torch.zeros(3, 3))),
    "a buffer with the same single number": lambda m: setattr(m, "count", torch.zeros(1)),
    "a removed bias": lambda m: setattr(m.inner[0], "bias", None),
    "a submodule": lambda m: m.inner.append(nn.Tanh()),
    "a forward hook": lambda m: m.inner[0].register_forward_hook(lambda *_: None),
    "a forward pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "a dropout rate": lambda m: setattr(m.inner[1], "p", 0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_noticed(change: str) -> None:
    model = Model()
    guard = StateGuard(model)
    assert guard.holds()
    CHANGES[change](model)
    assert not guard.holds()


@pytest.mark.parametrize("counts", [True, False], ids=["versions", "no versions"])
@pytest.mark.parametrize("times", [1, state_guard.MOST_RENEWALS + 2])
def test_changes_that_are_taken_back_are_no_changes_and_the_next_is_noticed(
    times: int, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counts:  # as of a torch without them
        monkeypatch.setattr(state_guard, "_dict_version", None)
    for change in CHANGES.values():
        model = Model()
        guard = StateGuard(model)
        for _ in range(times):
            model.eval()
            assert not guard.holds()
            model.train()
            assert guard.holds()
        change(model)
        assert not guard.holds()


def test_a_hook_for_all_modules_is_noticed() -> None:
    guard = StateGuard(Model())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not guard.holds()
    finally:
        handle.remove()
    assert guard.holds()


@pytest.mark.parametrize("gradients", [False, True])
def test_hooks_for_all_modules_change_results_as_in_eager_while_they_are_there(gradients: bool) -> None:
    module = nn.modules.module
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    fused = fuse.compile(model)
    x = torch.randn(2, 3)

    def agrees() -> None:
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(fused(x), model(x))

    agrees()
    for register, hook in (
        (module.register_module_forward_hook, lambda _, args, result: result * 2),
        (module.register_module_forward_pre_hook, lambda _, args: (args[0] + 1,)),
    ):
        handle = register(hook)
        try:
            agrees()
            compiled = fused.compiled
            agrees()
            assert compiled is not None
            assert fused.compiled is compiled
        finally:
            handle.remove()
        agrees()


def test_values_of_tensors_do_not_make_the_model_another() -> None:
    model = Model()
    guard = StateGuard(model)
    with torch.no_grad():
        model.inner[0].weight.data.mul_(2)
        model.count += 1
    model.scale = int("2")
    assert guard.holds()


def test_tensors_are_not_watched_when_frozen() -> None:
    model = Model()
    guard = StateGuard(model, watch_tensors=False)
    model.count = torch.ones(1)
    assert guard.holds()
    model.scale = 3
    assert not guard.holds()


def guard_of(*args: Any, **kwargs: Any) -> guards.CallGuard:
    leaves, spec = flatten(args, kwargs)
    return call_guard(leaves, spec, [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)], set())


def matches(guard: guards.CallGuard, *args: Any, **kwargs: Any) -> bool:
    return guard.match(*flatten(args, kwargs), modes()) is not None


X = torch.randn(3, 4)
NEAR_MISSES: dict[str, tuple[Any, ...]] = {
    "shape": (torch.randn(4, 4), 2),
    "stride": (torch.randn(4, 3).t(), 2),
    "dtype": (X.double(), 2),
    "requires_grad": (X.clone().requires_grad_(), 2),
    "tensor subclass": (nn.Parameter(X, requires_grad=False), 2),
    "not a tensor": (3, 2),
    "another number": (X, 3),
    "an equal number of another type": (X, 2.0),
    "a truth value": (X, True),
    "fewer arguments": (X,),
    "a nested structure": ((X, 2),),
}


@pytest.mark.parametrize("miss", NEAR_MISSES)
def test_another_call_is_another_variant(miss: str) -> None:
    guard = guard_of(X, 2)
    assert matches(guard, X, 2)
    assert matches(guard, torch.randn(3, 4), 2)
    assert not matches(guard, *NEAR_MISSES[miss])


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.device("meta"),
    ],
    ids=["no_grad", "inference", "autocast", "autocast to float16", "default device"],
)
def test_modes_of_torch_are_part_of_the_signature(mode: Callable[[], Any]) -> None:
    guard = guard_of(X, 2)
    with mode():
        assert not matches(guard, X, 2)
    assert matches(guard, X, 2)


def test_the_default_dtype_is_part_of_the_signature() -> None:
    guard = guard_of(X)
    torch.set_default_dtype(torch.float64)
    try:
        assert not matches(guard, X)
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_tensor_twice_is_another_signature_than_two() -> None:
    x, y = torch.randn(2), torch.randn(2)
    leaves, spec = flatten((x, x), {})
    same = call_guard(leaves, spec, [0], set())
    assert matches(same, y, y)
    assert not matches(same, x, y)
    assert not matches(guard_of(x, y), x, x)


def test_a_parameter_as_argument_is_another_signature() -> None:
    weight, x = torch.randn(2), torch.randn(2)
    leaves, spec = flatten((weight,), {})
    guard = call_guard(leaves, spec, [0], {id(weight)})
    assert matches(guard, weight)
    assert not matches(guard, x)


def test_a_call_at_other_sizes_differs_in_sizes_only() -> None:
    """The short comparison agrees with the one of two guards."""
    weight, x, y = (torch.randn(n) for n in (2, 3, 4))
    calls = [
        (x, y, 1),
        (y, x, 1),
        (x, x, 1),
        (y, y, 1),
        (weight, x, 1),
        (y, weight, 1),
        (x, y, 2),
        (x, y),
        (weight, weight, 1),
    ]
    known = frozenset([id(weight)])
    for one in calls:
        leaves, spec = flatten(one, {})
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        guard = call_guard(leaves, spec, tensors, {id(weight)})
        for other in calls:
            other_leaves, other_spec = flatten(other, {})
            same = len(other) == len(one) and guard.differs_in_sizes(
                call_guard(other_leaves, other_spec, tensors, {id(weight)})
            )
            assert guard.fits_at_other_sizes(other_leaves, other_spec, modes(), known) == same, (one, other)


def test_keyword_arguments_and_nested_ones_are_matched_by_structure() -> None:
    guard = guard_of((X, {"a": X + 1}), flag=None)
    assert matches(guard, (X, {"a": X + 1}), flag=None)
    assert not matches(guard, (X, {"b": X + 1}), flag=None)
    assert not matches(guard, (X, {"a": X + 1}), flag=False)


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, True), ("a", b"a"), (SimpleNamespace(), SimpleNamespace(a=1))])
def test_values_that_may_compute_something_else_are_not_the_same(a: object, b: object) -> None:
    assert not guards.same_value(a, b)


def test_overlap_counts_only_where_something_is_written() -> None:
    x = torch.zeros(10)
    parts = [x[:6], x[4:], torch.zeros(3)]
    assert overlaps(parts, frozenset({0}))
    assert overlaps(parts, frozenset({1}))
    assert not overlaps(parts, frozenset({2}))
    assert not overlaps(parts, frozenset())


def test_an_equal_object_that_is_changed_later_is_noticed() -> None:
    """A guard that took the copy for the object that it watches would not watch the copy."""
    model = Model()
    guard = StateGuard(model)
    model.options = Options()
    assert not guard.holds()
    model.options.layers = 3
    assert not guard.holds()
