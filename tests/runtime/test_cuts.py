"""Calls that are cut around submodules which capture cannot see through: right whatever these do, once in each call."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.runtime import pieces
from fuse.runtime.module import Fused
from fuse.runtime.steps import Fallback

Inputs = tuple[Any, ...]


class Noting(nn.Module):
    """Python that a graph cannot hold: it notes what it is given. What it computes is ``odd``."""

    def __init__(self, odd: Callable[..., Any] = lambda self, x: x.sin() * self.weight) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.odd = odd
        self.seen: list[float] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(sum(float(one.double().sum()) for one in args if isinstance(one, Tensor)))
        return self.odd(self, *args, **kwargs)


class Around(nn.Module):
    """A submodule between fused parts; ``between`` says how it is called and what comes behind."""

    def __init__(self, odd: nn.Module, between: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))
        self.inner = nn.Sequential(odd)
        self.after = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))
        self.between = between or (lambda self, h: self.after(self.inner[0](h)) + h)

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.between(self, self.before(x) + 1, *rest)


@pytest.fixture(autouse=True)
def _costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models as small as these are cut, too."""
    monkeypatch.setattr(pieces, "SECONDS_OF_CALL", -1.0)


def model(odd: Any = None, between: Any = None) -> Around:
    torch.manual_seed(0)
    made = odd if isinstance(odd, nn.Module) else Noting(odd) if odd else Noting()
    return Around(made, between).eval()


def inputs(count: int = 6) -> list[Inputs]:
    return [(torch.randn(4, 16, generator=torch.Generator().manual_seed(i)),) for i in range(count)]


def outcome(module: Callable[..., Any], args: Inputs) -> Any:
    try:
        return module(*args)
    except Exception as error:
        return type(error), str(error)


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other), (one, other)
    if isinstance(one, Tensor):
        # Eager's own results are up to 3e-5 from float64: layer norm of rows that hardly vary, three times in a row.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert one.stride() == other.stride()
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


def notes(module: nn.Module) -> list[list[float]]:
    return [m.seen for m in module.modules() if isinstance(m, Noting)]


def run(module: nn.Module, calls: Sequence[Inputs], *, eager: bool | None = False) -> Fused:
    """Every call beside eager's: results, what was noted, inputs, state and random numbers behind it; ``eager`` or cut
    in the end, or either where it is None."""
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for args in calls:
        given = copy.deepcopy(args)
        torch.manual_seed(3)
        with torch.no_grad():
            right = outcome(expected, given)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(outcome(fused, args), right)
        assert torch.equal(torch.get_rng_state(), state)
        same(args, given)
        for a, b in zip(notes(module), notes(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        for a, b in zip(module.state_dict().values(), expected.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b)
    last = fused.last_run
    assert last is not None
    if eager is None:
        return fused
    if eager:
        assert last.launches == 0, last
        assert last.fallbacks
    else:
        assert last.kernels > 0, last
        assert {one.op for one in last.fallbacks} <= {"inner.0", "inner", "second"}
    return fused


# ---- what is cut ----------------------------------------------------------------------------------------------------


def test_what_lies_around_the_submodule_is_fused() -> None:
    fused = run(model(), inputs())
    assert fused.last_run is not None
    (piece,) = fused.last_run.fallbacks
    assert isinstance(piece, Fallback)
    assert piece.op == "inner.0"
    assert "Noting.seen" in piece.reason
    assert piece.source.startswith("test_cuts.py:")
    assert fused.last_run.launches == 4


def through_numpy(self: Any, x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


class Numpy(nn.Module):
    """It has no effect, and reads values that differ in each call."""

    def forward(self, x: Tensor) -> Tensor:
        return through_numpy(self, x)


def test_a_submodule_that_reads_values_which_never_repeat() -> None:
    run(model(Numpy()), inputs(30))


def drawn_by_numpy(self: Any, x: Tensor) -> Tensor:
    return x * float(np.random.default_rng(len(self.seen)).random())


@pytest.mark.parametrize(
    "odd",
    [
        through_numpy,
        drawn_by_numpy,
        lambda self, x: x,  # the argument itself
        lambda self, x: torch.rand_like(x) + x,
        lambda self, x: x.sparse_mask(x.to_sparse().coalesce()).to_dense(),
        lambda self, x: x.clone(memory_format=torch.preserve_format).t().contiguous().t(),
        lambda self, x: torch.tensor(x.tolist()),
    ],
)  # fmt: skip
def test_a_submodule_that_returns_a_tensor(odd: Any) -> None:
    run(model(odd), inputs())


def test_arguments_and_results_of_several_kinds() -> None:
    def odd(self: Any, x: Tensor, how: str, *, both: tuple[Tensor, Tensor], scale: float) -> Any:
        assert how == "twice"
        return x * scale, None, (both[0] + both[1], 3), x

    def between(self: Any, h: Tensor) -> Any:
        a, nothing, (b, three), same = self.inner[0](h, "twice", both=(h, h[:, :8].repeat(1, 2)), scale=0.5)
        return self.after(a + b) * three, nothing, same, b

    run(model(odd, between), inputs())


def test_the_result_of_the_submodule_is_the_very_tensor_that_it_keeps() -> None:
    def odd(self: Any, x: Tensor) -> Tensor:
        self.last = x.exp()
        return self.last

    module = model(odd, lambda self, h: (self.inner[0](h), self.after(h)))
    fused = run(module, inputs())
    with torch.no_grad():
        result = fused(inputs()[0][0])
    assert result[0] is module.inner[0].last


def test_a_submodule_that_is_called_several_times_and_two_of_them() -> None:
    module = model(None, lambda self, h: self.after(self.inner[0](self.second(self.inner[0](h) * 2)) + h))
    module.second = Noting(through_numpy)
    run(module.eval(), inputs(10))


def test_a_submodule_that_advances_an_iterator_of_its_own() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = iter(range(1000))

        def __deepcopy__(self, memo: Any) -> Any:
            return Counting()

        def forward(self, x: Tensor) -> Tensor:
            return x * next(self.numbers)

    run(model(Counting()), inputs())


GLOBAL: list[float] = []


class Telling(nn.Module):
    """It changes what nothing but its code names."""

    def forward(self, x: Tensor) -> Tensor:
        GLOBAL.append(float(np.random.rand()))
        return x.sin()


def test_a_submodule_that_changes_something_outside() -> None:
    module = model(Telling())
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for (x,) in inputs():
        before = len(GLOBAL)
        np.random.seed(3)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = fused(x)
            drawn = np.random.rand()
            assert len(GLOBAL) == before + 1
            np.random.seed(3)
            same(result, expected(x))
            assert np.random.rand() == drawn
            assert GLOBAL[-1] == GLOBAL[-2]
    assert fused.last_run is not None
    assert [one.op for one in fused.last_run.fallbacks] == ["inner.0"]


def test_an_operator_that_is_refused() -> None:
    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(1))

    run(model(Drawing()), inputs())


def test_values_that_are_read_before_it() -> None:
    def between(self: Any, h: Tensor, t: Tensor) -> Tensor:
        if t.sum() > 0:
            return self.after(self.inner[0](h))
        return self.after(self.inner[0](h * 2) - 1)

    calls = [(*one, torch.tensor([float(i % 3 - 1), 0.5])) for i, one in enumerate(inputs(16))]
    run(model(None, between), calls)


def test_values_that_are_read_behind_it() -> None:
    def between(self: Any, h: Tensor, t: Tensor) -> Tensor:
        y = self.after(self.inner[0](h))
        return y * 2 if t.sum() > 0 else y - 1

    calls = [(*one, torch.tensor([float(i % 3 - 1), 0.5])) for i, one in enumerate(inputs(16))]
    run(model(None, between), calls)


def test_random_numbers_that_it_draws_are_drawn_once_where_a_value_behind_it_is_otherwise() -> None:
    def between(self: Any, h: Tensor, t: Tensor) -> Tensor:
        y = self.inner[0](h)
        y = self.after(y) if t.sum() > 0 else y - 1
        return y + self.inner[0](h)

    calls = [(*one, torch.tensor([float(i % 2) - 0.5])) for i, one in enumerate(inputs(12))]
    run(model(lambda self, x: torch.rand_like(x) + x, between), calls)


def test_values_that_depend_on_it_are_not_read() -> None:
    def between(self: Any, h: Tensor) -> Tensor:
        y = self.inner[0](h)
        return self.after(y) if y.sum() > 0 else self.after(-y)

    run(model(None, between), inputs(), eager=True)


def test_other_sizes_are_watched_by_themselves() -> None:
    run(model(), [(torch.randn(2 + i // 4, 16),) for i in range(12)])


def test_what_is_changed_between_calls_is_seen() -> None:
    module = model(lambda self, x: x * self.scale * self.weight)
    module.inner[0].scale = 2.0
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for i, (x,) in enumerate(inputs(12)):
        for one in (module, expected):
            if i == 10:
                one.inner[0] = nn.Tanh()
            if i >= 10:
                continue
            one.inner[0].scale = float(i)
            with torch.no_grad():
                one.inner[0].weight.mul_(1.1)
            if i == 6:
                one.inner[0].weight = nn.Parameter(torch.full((16,), 3.0))
            if i == 8:
                one.inner[0].register_forward_hook(lambda module, args, result: result * 2)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(fused(x), expected(x))


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu"), torch.enable_grad])
def test_modes(mode: Any) -> None:
    noticed: list[Any] = []

    def odd(self: Any, x: Tensor) -> Tensor:
        noticed.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        return (x @ x.t()) @ x

    module = model(odd).requires_grad_(False)
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for (x,) in inputs():
        with mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(fused(x), expected(x), rtol=2e-2, atol=2e-2)
    assert len(set(noticed)) == 1
    assert fused.last_run is not None
    assert fused.last_run.kernels > 0


def test_calls_that_need_gradients_are_not_cut() -> None:
    module = model()
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for (x,) in inputs(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused(x).square().sum().backward()
        expected(x).square().sum().backward()
    for one, other in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(notes(module), notes(expected), rtol=1e-3, atol=1e-4)


def test_buffers_that_the_rest_writes() -> None:
    module = model(None, lambda self, h: self.norm(self.after(self.inner[0](self.norm(h)))))
    module.norm = nn.BatchNorm1d(16)
    run(module.train(), inputs())


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    module = model(lambda self, x: torch.rand_like(x) + x)
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for (x,) in inputs():
        torch.manual_seed(1)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = fused(x)
            torch.manual_seed(1)
            same(result, expected(x))
    np.testing.assert_allclose(notes(module)[0], notes(expected)[0], rtol=1e-4)


def test_several_threads() -> None:
    module = model()
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    wrong: list[Any] = []

    def calls(number: int) -> None:
        for i in range(8):
            x = torch.full((2 + number % 2, 16), 0.1 * i)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = fused(x)
                right = expected.after(expected.before(x) + 1)  # of eager's parts alone: the lists are not to meet
                y = expected.before(x) + 1
                right = expected.after(y.sin() * expected.inner[0].weight) + y
            if not torch.allclose(result, right, rtol=1e-4, atol=1e-5):
                wrong.append((number, i))

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert "forward" not in module.inner[0].__dict__


# ---- what changes its mind ------------------------------------------------------------------------------------------


def at(number: int, then: Callable[[Any, Tensor], Any]) -> Any:
    """Does something else in one call, and ``x.sin()`` in others."""
    return lambda self, x: then(self, x) if len(self.seen) == number else x.sin()


def raised(self: Any, x: Tensor) -> Any:
    raise KeyError("now")


def written(self: Any, x: Tensor) -> Tensor:
    x.mul_(3)
    return x.sin()


def written_by_numpy(self: Any, x: Tensor) -> Tensor:
    x.numpy()[0] = 7
    return x.sin()


def written_and_raised(self: Any, x: Tensor) -> Any:
    x.add_(1)
    raise ValueError("behind")


@pytest.mark.parametrize("number", [1, 4, 6])
@pytest.mark.parametrize(
    "then",
    [
        raised,
        written,
        written_by_numpy,
        written_and_raised,
        lambda self, x: x,
        lambda self, x: x.view(4, 16),
        lambda self, x: x[:, :1].expand(4, 16),
        lambda self, x: x.double().sin(),
        lambda self, x: self.weight.expand(4, 16),
        lambda self, x: x.sin()[:1],
        lambda self, x: torch.rand(4, 16),
    ],
)
@pytest.mark.parametrize("of_input", [False, True])
def test_a_submodule_that_does_something_else_in_one_call(then: Any, number: int, of_input: bool) -> None:
    def between(self: Any, h: Tensor, x: Tensor) -> Tensor:
        z = h * 2 + x
        y = self.inner[0](x if of_input else h)
        return self.after(y.float()) + h.sum() + z + x

    calls = [(*one, one[0].clone()) for one in inputs(9)]
    module = model(at(number, then), between)
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for args in calls:
        given = copy.deepcopy(args)
        torch.manual_seed(3)
        with torch.no_grad():
            right = outcome(expected, given)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(outcome(fused, args), right)
        assert torch.equal(torch.get_rng_state(), state)
        same(args, given)
        np.testing.assert_allclose(notes(module)[0], notes(expected)[0], rtol=1e-3, atol=1e-4)


def test_an_error_that_forward_catches() -> None:
    def between(self: Any, h: Tensor) -> Tensor:
        try:
            return self.after(self.inner[0](h))
        except KeyError:
            return h - 1

    run(model(at(5, raised), between), inputs(7))


def test_an_error_behind_it_raises_once_it_has_run() -> None:
    def between(self: Any, h: Tensor, place: Tensor) -> Tensor:
        return self.after(F.embedding(place, self.inner[0](h)))

    calls = [(*one, torch.tensor([0, 40 if i == 5 else 3])) for i, one in enumerate(inputs(8))]
    run(model(None, between), calls)


def by_heads(self: Any, h: Tensor) -> Tensor:
    """What an attention's caller reads of it, before and behind the call and by a method."""
    odd = self.inner[0]
    h = h * 2 if odd.wide else h
    y = odd(h.view(4, odd.heads, -1).flatten(1)).view(4, odd.heads, -1).tanh() * odd.scale
    h = h if odd.training else h + 1
    return self.after(y.flatten(1) + odd.half()) + h


class Attending(Noting):
    def __init__(self, odd: Any = lambda self, x: x.sin() * self.weight) -> None:
        super().__init__(odd)
        self.heads, self.scale, self.wide = 2, 0.25, None

    def half(self) -> float:
        return self.heads / 2


def test_settings_of_the_submodule_may_be_read() -> None:
    fused = run(model(Attending(), by_heads), inputs())
    assert fused.last_run is not None
    assert [one.op for one in fused.last_run.fallbacks] == ["inner.0"]


@pytest.mark.parametrize("name", ["heads", "scale", "wide", "training"])
def test_a_setting_that_the_user_changes(name: str) -> None:
    module = model(Attending(), by_heads)
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    values = {"heads": (2, 4), "scale": (0.25, 1), "wide": (None, True), "training": (False, True)}[name]
    for number, args in enumerate(inputs(12)):
        for one in (module, expected):
            setattr(one.inner[0], name, values[number // 3 % 2])
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(fused(*args), expected(*args))
    assert fused.last_run is not None
    assert fused.last_run.kernels > 0


@pytest.mark.parametrize(("number", "raises"), [(5, False), (8, False), (7, True)])
@pytest.mark.parametrize("name", ["heads", "wide", "unset"])
def test_a_setting_that_one_call_of_the_submodule_changes(name: str, number: int, raises: bool) -> None:
    def odd(self: Any, x: Tensor) -> Tensor:
        if len(self.seen) == number:
            if name == "unset":
                del self.wide
                type(self).wide = True
            else:
                setattr(self, name, {"heads": 4, "scale": 3, "wide": True}[name])
            if raises:
                raise KeyError(name)
        return x.sin() * self.weight

    def between(self: Any, h: Tensor) -> Any:
        first = by_heads(self, h)
        try:
            return first, by_heads(self, first + 1)
        except KeyError:
            return first * self.inner[0].heads

    class Unset(Attending):
        pass

    run(model(Unset(odd), between), inputs(8), eager=None)


def test_a_setting_that_calls_change_now_and_then_is_captured_once_more_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(self: Any, x: Tensor) -> Tensor:
        self.heads += len(self.seen) % 4 == 0
        return x.sin() * self.weight

    captures = []
    original = pieces.Pieces.cuts
    monkeypatch.setattr(pieces.Pieces, "cuts", lambda self, kind: captures.append(0) or original(self, kind))
    run(
        model(Attending(odd), lambda self, h: self.after(self.inner[0](h)) * self.inner[0].heads),
        inputs(40),
        eager=True,
    )
    assert len(captures) < 15


# ---- what is not cut ------------------------------------------------------------------------------------------------


class Setting:
    flag = False


def test_python_state_that_the_rest_reads() -> None:
    setting = Setting()

    def odd(self: Any, x: Tensor) -> Tensor:
        self.setting.flag = not self.setting.flag
        return x.sin()

    module = model(odd, lambda self, h: self.after(self.inner[0](h)) * (2 if self.setting.flag else 3))
    module.setting = module.inner[0].setting = setting
    run(module, inputs(), eager=True)


def counting(self: Any, x: Tensor) -> Tensor:
    self.steps += 1
    self.big = self.steps % 3 == 0
    return x.sin()


def setting_back(self: Any, h: Tensor) -> Tensor:
    y = self.after(self.inner[0](h))
    self.inner[0].steps = 0
    return y


def asking_if_it_may(self: Any, h: Tensor) -> Tensor:
    y = self.after(self.inner[0](h))
    try:
        return y * self.inner[0].steps
    except Exception:
        return y


@pytest.mark.parametrize(
    "between",
    [
        lambda self, h: self.after(self.inner[0](h)) * self.inner[0].steps,
        lambda self, h: self.after(self.inner[0](h * (self.inner[0].steps + 1))),
        lambda self, h: self.after(self.inner[0](h)) * len(self.inner[0].seen),
        lambda self, h: self.after(self.inner[0](h)) * (2 if self.inner[0].big else 3),
        lambda self, h: self.after(self.inner[0](h)) * (2 if getattr(self.inner[0], "big", False) else 3),
        lambda self, h: self.after(self.inner[0](h)) * vars(self.inner[0])["steps"],
        setting_back,
        asking_if_it_may,
    ],
)
def test_what_the_rest_asks_of_the_submodule(between: Any) -> None:
    module = model(counting, between)
    module.inner[0].steps, module.inner[0].big = 1, False
    run(module, inputs(), eager=True)
    assert type(module.inner[0]) is Noting


def test_a_submodule_that_reaches_the_rest() -> None:
    module = model(lambda self, x: self.others[0].before(x))
    module.inner[0].others = (module,)
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for (x,) in inputs():
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(fused(x), expected(x))
    assert fused.last_run is not None
    assert fused.last_run.launches == 0


def test_tensors_that_the_rest_holds_too() -> None:
    module = model(lambda self, x: x * self.weight, lambda self, h: self.after(self.inner[0](h)) * self.tied)
    module.tied = module.inner[0].weight
    run(module, inputs(), eager=True)
    kept = model(
        lambda self, x: x * self.held[0].mul_(1.1), lambda self, h: self.after(self.inner[0](h)) * self.held[0]
    )
    kept.held = kept.inner[0].held = (torch.ones(16),)
    run(kept, inputs(), eager=True)


@pytest.mark.parametrize(
    "odd",
    [
        written,
        written_by_numpy,
        lambda self, x: x.t(),
        lambda self, x: [x.sin()],
        lambda self, x: nn.Parameter(x.sin()),
        lambda self, x: torch.ones(3).to_sparse(),
    ],
)
def test_what_cannot_stand_between_fused_parts(odd: Any) -> None:
    def between(self: Any, h: Tensor) -> Any:
        y = self.inner[0](h)
        y = y[0] if isinstance(y, list) else y.to_dense() if y.is_sparse else y
        return self.after(h) + y.sum() + h

    run(model(odd, between), inputs(), eager=True)


def test_an_argument_that_can_be_changed() -> None:
    def odd(self: Any, x: Tensor, found: list[Tensor]) -> Tensor:
        found.append(x)
        return x.sin()

    def between(self: Any, h: Tensor) -> Tensor:
        found: list[Tensor] = []
        y = self.inner[0](h, found)
        return self.after(y + found[0])

    run(model(odd, between), inputs(), eager=True)


def test_random_numbers_of_the_rest() -> None:
    between = lambda self, h: self.after(F.dropout(self.inner[0](h), 0.5, True))  # noqa: E731
    run(model(lambda self, x: torch.rand_like(x) + x, between), inputs(), eager=True)


def test_results_that_are_written_afterwards() -> None:
    def odd(self: Any, x: Tensor) -> Tensor:
        self.last = x.sin()
        return self.last

    def between(self: Any, h: Tensor) -> Tensor:
        return self.after(self.inner[0](h).mul_(2))

    module = model(odd, between)
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for (x,) in inputs():
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(fused(x), expected(x))
        same(module.inner[0].last, expected.inner[0].last)


def test_a_result_that_the_next_call_changes() -> None:
    def odd(self: Any, x: Tensor) -> Tensor:
        if len(self.seen) % 2 == 0:
            self.last.mul_(2)
        self.last = x.sin()
        return self.last

    run(
        model(odd, lambda self, h: self.after((a := self.inner[0](h)) + self.inner[0](h * 2) + a)), inputs(), eager=True
    )


def test_a_mode_of_torch_that_it_changes() -> None:
    def odd(self: Any, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64 if len(self.seen) % 2 else torch.float32)
        return x.sin()

    between = lambda self, h: self.after(self.inner[0](h)) * torch.full((16,), 0.3)  # noqa: E731
    module = model(odd, between)
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    try:
        for (x,) in inputs():
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same(fused(x), expected(x))
    finally:
        torch.set_default_dtype(torch.float32)


def test_gradients_modes_and_hooks_within() -> None:
    def between(self: Any, h: Tensor) -> Tensor:
        with torch.enable_grad():
            y = self.inner[0](h)
        return self.after(y.detach())

    run(model(lambda self, x: x.sin(), between), inputs(), eager=True)
    hooked = model()
    hooked.inner[0].register_forward_hook(lambda module, args, result: result * 2)
    expected, fused = copy.deepcopy(hooked), fuse.compile(hooked)
    for (x,) in inputs():
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(fused(x), expected(x))


# ---- at random ------------------------------------------------------------------------------------------------------

ODDS: list[Any] = [
    through_numpy, written, written_by_numpy, raised, lambda self, x: x, lambda self, x: x * self.weight,
    lambda self, x: x[:, :1].expand(4, 16), lambda self, x: torch.rand_like(x) + x, lambda self, x: x.sin(),
]  # fmt: skip


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.sampled_from(range(len(ODDS))), min_size=1, max_size=3),
    st.sampled_from(range(4)),
    st.lists(st.sampled_from(range(len(ODDS))), min_size=0, max_size=4),
)
def test_submodules_at_random(usual: list[int], where: int, unusual: list[int]) -> None:
    """``usual``: what they do in turn, ``unusual``: what they do in calls after the first four."""

    def odd(self: Any, x: Tensor) -> Any:
        count = len(self.seen)
        chosen = unusual[count % len(unusual)] if unusual and count > 8 and count % 3 == 0 else usual[0]
        return ODDS[chosen](self, x)

    def between(self: Any, h: Tensor, t: Tensor) -> Tensor:
        y = h
        for number in usual:
            y = self.inner[0](y) + h if number % 2 else self.after(self.inner[0](y * 2))
            if where == 1 and t.sum() > 0:
                y = y + 1
        try:
            return (y + self.inner[0](t)) if where == 2 else y
        except KeyError:
            return h

    calls = [(*one, torch.full((4, 16), float(i % 2 - 0.5))) for i, one in enumerate(inputs(9))]
    module = model(odd, between)
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for args in calls:
        wanted = copy.deepcopy(args)
        torch.manual_seed(3)
        with torch.no_grad():
            right = outcome(expected, wanted)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(outcome(fused, args), right)
        assert torch.equal(torch.get_rng_state(), state)
        same(args, wanted)
        np.testing.assert_allclose(notes(module)[0], notes(expected)[0], rtol=1e-3, atol=1e-4)


def test_models_that_are_too_small_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SECONDS_OF_CALL", 20e-6)
    fused = run(model(), inputs(), eager=True)
    assert fused.last_run is not None
    assert "would gain less" in fused.last_run.fallbacks[0].reason


# ---- counted --------------------------------------------------------------------------------------------------------


def test_show_counts_the_submodule_as_it_is_and_the_rest_fused() -> None:
    module = model(lambda self, x: (x.sin() + 1).cos() * self.weight)
    with torch.no_grad():
        report = fuse.show(module, inputs()[0])
    assert module.inner[0].seen == []
    (piece,) = report.fallbacks
    assert piece.op == "inner.0"
    assert piece.source in str(report)
    fused = fuse.compile(module)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in inputs():
            fused(*call)
    assert fused.last_run is not None
    noting = 2  # double and sum
    assert report.after.launches == fused.last_run.launches + 4 + noting
    assert report.before.launches > report.after.launches
