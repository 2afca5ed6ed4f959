"""Calls that cannot be captured whole: submodules run fused one by one, with eager's effects and gradients."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuse
from fuse.check.oracle import check
from fuse.runtime import making, parts
from fuse.runtime.module import Fused
from fuse.runtime.variants.in_vain import LARGEST_ALIKE, LEAST_WAIT


class Odd(nn.Module):
    """Python that a graph cannot hold: it notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.detach().double().sum()))
        return x.sin() * self.weight


def block(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), *more)


class Around(nn.Module):
    """Blocks around Python; ``between`` says what happens there."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        self.before, self.after, self.norm = block(nn.Dropout(0.1)), block(), nn.LayerNorm(16)
        self.inner = nn.ModuleList([Odd()])
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, self.before(x))


def usual(self: Any, h: Tensor) -> Tensor:
    return self.after(self.inner[0](h + 1)) + h


@pytest.fixture(autouse=True)
def _costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submodules as small as these are parts, too."""
    monkeypatch.setattr(parts, "SECONDS_OF_STEP", -1.0)
    monkeypatch.setattr(parts, "SECONDS_OF_CALL", -1.0)


def model(between: Callable[..., Tensor] = usual) -> Around:
    torch.manual_seed(0)
    return Around(between)


def step(module: nn.Module, x: Tensor) -> Tensor:
    module.zero_grad()
    result: Tensor = module(x)
    result.square().sum().backward()
    return result.detach()


def held(module: nn.Module, between_calls: Callable[[nn.Module, int], None] = lambda one, number: None) -> Fused:
    """Every step beside eager's: results, gradients, what was noted, random numbers."""
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for number in range(6):
        between_calls(module, number)
        between_calls(expected, number)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
        given, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.manual_seed(number)
        right = step(expected, theirs)
        state = torch.get_rng_state()
        torch.manual_seed(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(step(fused, given), right, rtol=1e-4, atol=1e-4)
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(given.grad, theirs.grad, rtol=1e-3, atol=1e-3)
        for (name, one), other in zip(module.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3, msg=name)
        noted = [one.seen for one in module.modules() if isinstance(one, Odd)]
        for mine, its in zip(noted, [one.seen for one in expected.modules() if isinstance(one, Odd)], strict=True):
            assert mine == pytest.approx(its, rel=1e-3, abs=1e-3)
    assert not any("forward" in one.__dict__ for one in (module.get_submodule("before"), module.get_submodule("after")))
    return fused


def fused_parts(fused: Fused) -> set[str]:
    return set(fused._own()._parts._parts or {})


def test_what_lies_around_the_python_is_fused_forward_and_backward() -> None:
    fused = held(model())
    run = fused.last_run
    assert run is not None
    assert fused_parts(fused) >= {"before", "after"}
    assert run.kernels > 0
    assert run.backward is not None
    assert run.backward.kernels > 0
    assert run.fallbacks[0].op == "Around"
    assert "Odd.seen" in run.fallbacks[0].reason


def test_python_deeper_inside() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner, self.after = block(), model(), block()

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.inner(self.before(x)))

    fused = held(Outer())
    run = fused.last_run
    assert run is not None
    assert fused_parts(fused) == {"before", "inner", "after"}
    assert [fallback.op for fallback in run.fallbacks][:2] == ["Outer", "Around"]


def test_python_of_the_model_itself_and_parts_that_are_called_several_times() -> None:
    told: list[int] = []

    def between(self: Any, h: Tensor) -> Tensor:
        told.append(1)
        for _ in range(3):
            h = self.after(h) + self.after(h * 2)
        return h

    fused = held(model(between))
    assert len(told) == 12
    assert fused_parts(fused) >= {"before", "after"}


def test_values_that_differ_in_every_call() -> None:
    def between(self: Any, h: Tensor) -> Tensor:
        return self.after(h * 2) * (1 + hash(int(8 * h.abs().sum().item())) % 7)

    held(model(between))


def written(self: Any, h: Tensor) -> Tensor:
    y = self.inner[0](h * 2)
    h.add_(1)
    return self.after(y) + h


def written_afterwards(self: Any, h: Tensor) -> Tensor:
    y = self.after(self.inner[0](h))
    y += 1
    return y


def written_past_autograd(self: Any, h: Tensor) -> Tensor:
    y = self.inner[0](self.norm(h))
    h.data.mul_(0.5)
    return self.after(y) + h


def differentiated(self: Any, h: Tensor) -> Tensor:
    y = self.after(self.inner[0](h))
    (slope,) = torch.autograd.grad(y.sum(), h, create_graph=True)
    return y + slope.square()


@pytest.mark.parametrize(
    ("between", "left"),
    [
        (written, {"after"}),
        (written_afterwards, {"before"}),
        (written_past_autograd, {"after"}),
        (differentiated, set()),
    ],
)
def test_near_misses_run_eager(between: Callable[..., Tensor], left: set[str]) -> None:
    fused = held(model(between))
    assert fused_parts(fused) & {"before", "after"} == left


def checkpointed(self: Any, h: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda z: self.after(z) * 2, self.inner[0](h), use_reentrant=False) + h
    return result


def checkpointed_in_backward(self: Any, h: Tensor) -> Tensor:
    result: Tensor = checkpoint(self.after, self.inner[0](h), use_reentrant=True) + h
    return result


def compiled_by_dynamo(self: Any, h: Tensor) -> Tensor:
    h = self.inner[0](h)
    result: Tensor = torch.compile(lambda z: self.after(z) * 2, backend="eager")(h)
    return result


def with_saved_tensors_packed(self: Any, h: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        result: Tensor = self.after(self.inner[0](h))
    return result


def partly_without_gradients(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.after(h)
    result: Tensor = self.after(self.inner[0](h)) * scale + self.norm(h).detach()
    return result


@pytest.mark.parametrize(
    "between",
    [checkpointed, checkpointed_in_backward, compiled_by_dynamo, with_saved_tensors_packed, partly_without_gradients],
)
def test_parts_within_what_changes_how_they_are_run(between: Callable[..., Tensor]) -> None:
    held(model(between))


def test_what_the_model_looks_at() -> None:
    def between(self: Any, h: Tensor) -> Tensor:
        assert list(inspect.signature(self.after.forward).parameters) == ["input"]
        assert self.after.forward.__self__ is self.after
        assert self.after.forward.__func__ is nn.Sequential.forward
        return self.after.forward(self.inner[0](h))

    assert "after" in fused_parts(held(model(between)))


def replaced(module: nn.Module, number: int) -> None:
    if number == 4:
        torch.manual_seed(7)
        module.after = block()


def hooked(module: nn.Module, number: int) -> None:
    if number == 4:
        module.get_submodule("after").register_forward_hook(lambda one, args, result: result * 2)


def weighed(module: nn.Module, number: int) -> None:
    if number == 4:
        module.get_submodule("after.0").weight = nn.Parameter(torch.eye(16))


def frozen(module: nn.Module, number: int) -> None:
    module.get_submodule("after").requires_grad_(number % 2 == 0)


def evaluated(module: nn.Module, number: int) -> None:
    module.train(number % 3 > 0)


@pytest.mark.parametrize("between_calls", [replaced, hooked, weighed, frozen, evaluated])
def test_what_is_changed_between_calls_is_seen(between_calls: Callable[[nn.Module, int], None]) -> None:
    held(model(), between_calls)


def test_a_forward_that_is_assigned_stays() -> None:
    module = model()
    fused = fuse.compile(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            step(fused, torch.randn(4, 16))
        module.after.forward = own = lambda x: x * 3  # type: ignore[method-assign]
        result = step(fused, torch.zeros(4, 16))
    assert module.after.__dict__["forward"] is own
    torch.manual_seed(0)
    assert result.shape == (4, 16)


def test_an_error_leaves_the_model_as_it_was() -> None:
    def between(self: Any, h: Tensor) -> Tensor:
        if len(self.inner[0].seen) > 3:
            raise ValueError("enough")
        return usual(self, h)

    module = model(between)
    fused = fuse.compile(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            step(fused, torch.randn(4, 16))
        with pytest.raises(ValueError, match="enough"):
            fused(torch.randn(4, 16))
    assert not any("forward" in one.__dict__ for one in module.modules())


def test_threads() -> None:
    module = model()
    module.before[3].p = 0.0
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for number in range(8):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * seed + number)).requires_grad_()
            (mine,) = torch.autograd.grad(fused(x).square().sum(), x)
            (its,) = torch.autograd.grad(expected(x).square().sum(), x)
            if not torch.allclose(mine, its, rtol=1e-3, atol=1e-3):
                wrong.append(f"{seed} {number}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12):  # a capture would put back what other threads note meanwhile
            step(fused, torch.randn(4, 16).requires_grad_())
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(module.inner[0].seen) == 36
    assert not any("forward" in one.__dict__ for one in module.modules())


def test_parts_that_gain_less_than_they_cost_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SECONDS_OF_STEP", 1.0)
    fused = held(model())
    assert not fused_parts(fused) & {"before", "after"}


# ---- without gradients ----------------------------------------------------------------------------------------------


def inferred(module: nn.Module, calls: int = 6, outcome: Callable[..., Any] = lambda one, x: one(x)) -> Fused:
    """Every call beside eager's, without gradients: results, arguments, what was noted, random numbers."""
    expected, fused = copy.deepcopy(module), fuse.compile(module)
    for number in range(calls):
        given = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
        theirs = given.clone()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(number)
            right = outcome(expected, theirs)
            state = torch.get_rng_state()
            torch.manual_seed(number)
            torch.testing.assert_close(outcome(fused, given), right, rtol=1e-4, atol=1e-4)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(given, theirs)
        assert module.get_submodule("inner.0").seen == pytest.approx(expected.get_submodule("inner.0").seen, rel=1e-3)
    return fused


def through_numpy(self: Any, h: Tensor) -> Tensor:
    return self.after(torch.from_numpy(self.inner[0](h).numpy() * 2)) + h


def asking(self: Any, h: Tensor) -> Tensor:
    return self.after(self.inner[0](h)) * (2 if len(self.inner[0].seen) % 2 else 3)


def branching(self: Any, h: Tensor) -> Tensor:
    y = self.inner[0](h)
    return self.after(y) if y.sum() > 0 else self.after(torch.rand_like(y)) - y


@pytest.mark.parametrize("between", [usual, written, written_past_autograd, through_numpy, asking, branching])
def test_what_lies_around_the_python_is_fused_without_gradients(between: Callable[..., Tensor]) -> None:
    fused = inferred(model(between))
    assert fused_parts(fused) & {"before", "after"}
    assert fused.last_run is not None
    assert fused.last_run.kernels > 0
    assert fused.last_run.backward is None
    assert "Odd.seen" in fused.last_run.fallbacks[0].reason


def test_an_error_in_some_calls_is_eagers() -> None:
    def between(self: Any, h: Tensor) -> Tensor:
        y = self.inner[0](h)
        if len(self.inner[0].seen) % 4 == 3:
            raise KeyError("now")
        return self.after(y)

    def outcome(one: Callable[..., Tensor], x: Tensor) -> Tensor:
        try:
            return one(x)
        except KeyError:
            return x

    inferred(model(between), 9, outcome)


def test_a_call_that_never_can_be_captured_is_not_tried_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes the model's state in each call, but that is not why."""
    captures: list[int] = []
    original = making.captured
    monkeypatch.setattr(making, "captured", lambda *given: captures.append(0) or original(*given))

    def between(self: Any, h: Tensor) -> Tensor:
        return self.after(self.inner[0](h)) + torch.ones(3).to_sparse().to_dense().sum()

    fused = inferred(model(between), 20)
    assert len(captures) <= LARGEST_ALIKE + 8  # the parts are captured, too
    assert fused.last_run is not None
    assert fused.last_run.kernels > 0


def test_a_call_that_can_be_captured_later_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first calls warm up: they change the state, and fail for a reason that then is gone."""
    captures: list[int] = []
    original = making.captured
    monkeypatch.setattr(making, "captured", lambda *given: captures.append(0) or original(*given))

    class WarmsUp(nn.Module):
        step = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.step < 10:
                self.step += 1
                x = x.to_sparse().to_dense()
            return x.tanh() * 2

    fused, x = fuse.compile(WarmsUp()), torch.randn(4)
    for call in range(LARGEST_ALIKE + LEAST_WAIT + 2):
        torch.testing.assert_close(fused(x), x.tanh() * 2)
        assert (fused.last_run.fallbacks == ()) == (call >= LARGEST_ALIKE + LEAST_WAIT)
    assert len(captures) == LARGEST_ALIKE + 1


def test_inference_mode_and_show() -> None:
    fused = fuse.compile(module := model())
    module.eval()
    x = torch.randn(4, 16)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [fused(x) for _ in range(4)]
        torch.testing.assert_close(results[-1], module(x), rtol=1e-4, atol=1e-4)
        report = fuse.show(module, (x,))
    assert results[-1].is_inference()
    assert fused.last_run is not None
    assert fused.last_run.kernels > 0
    assert len(module.inner[0].seen) == 5
    assert report.before == report.after
    assert "Odd.seen" in report.fallbacks[0].reason


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("make", [block, Counting])
def test_what_lies_around_torchscript_is_fused(make: Callable[[], nn.Module], train: bool) -> None:
    module, expected = (nn.Sequential(block(), torch.jit.script(make()), block()) for _ in range(2))
    expected.load_state_dict(module.state_dict())
    fused = fuse.compile(module)
    for _ in range(4):
        x = torch.randn(4, 16)
        with torch.set_grad_enabled(train), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(fused(x), expected(x), rtol=1e-4, atol=1e-4)
    assert fused.last_run is not None
    assert fused.last_run.kernels > 0
    assert "ScriptModule" in fused.last_run.fallbacks[0].reason


class Neighbours(nn.Module):
    """Layers, and a sparse matrix that only ``mixes`` makes them read."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.before, self.after, self.mixes = block(), block(), mixes
        self.register_buffer("adjacency", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        return self.after(torch.sparse.mm(self.adjacency, h) if self.mixes else h)


def test_a_sparse_buffer_that_is_not_read_is_no_obstacle() -> None:
    assert check(Neighbours(mixes=False), (torch.randn(4, 16),), train=True).passed
    fused = fuse.compile(Neighbours(mixes=False))
    fused(torch.randn(8, 16))
    assert fused.last_run is not None
    assert not fused.last_run.fallbacks


@pytest.mark.filterwarnings("ignore:Neighbours runs eager")
def test_what_lies_around_a_sparse_buffer_is_fused() -> None:
    fused = held(Neighbours(mixes=True))
    assert fused_parts(fused) == {"before", "after"}
    assert fused.last_run is not None
    reason = fused.last_run.fallbacks[0].reason
    assert reason.startswith("adjacency has layout torch.sparse_coo, and is read at test_parts.py:")


def test_a_call_that_raises_in_eager_gives_no_warning_before_its_error() -> None:
    fused = fuse.compile(block(nn.Linear(16, 16)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            fused(torch.ones(2, 15))
