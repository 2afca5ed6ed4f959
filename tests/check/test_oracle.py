"""The oracle passes what is right and catches every kind of wrong."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check import oracle
from fuse.check.compare import compare
from fuse.check.inputs import CheckCall, in_float64
from fuse.check.oracle import CheckReport, check
from fuse.graph.structure.result_structure import named_parts
from fuse.kernel.kernel import Kernel
from fuse.kernel.lower import lower
from fuse.runtime.cpu import device
from fuse.runtime.module import Fused
from tests.samples import newer_torch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor, n: int = 2) -> dict[str, Any]:
        h = torch.tanh(self.inner(x))
        self.total += h.sum(0)
        return {"h": h, "view": h[1:], "x": x, "n": n, "which": h.argmax(1)}


X = torch.randn(3, 4)


def test_a_right_program_passes_with_launches_as_predicted() -> None:
    report = check(Net(), (X,))
    assert report.passed, str(report)
    assert report.reference == "float64"
    assert report.observed == report.predicted
    assert report.fallbacks == ()
    assert report.to_dict()["observed"] == {"before": report.observed[0], "after": report.observed[1]}
    assert str(report).endswith("passed")


class Coded(nn.Module):
    """Eager reads the range of the classes back to Python, which launches nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.one_hot(x, 5).float() * 2


class Drawn(nn.Module):
    """A number that it draws and reads decides what it launches."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.randn(()).item() > 0.3 else x.sin().cos() + 1


@pytest.mark.parametrize("seed", range(3))
def test_launches_are_predicted_for_the_numbers_that_the_call_draws(seed: int) -> None:
    torch.manual_seed(99 + seed)  # whatever the caller's state is
    report = check(Drawn(), (X,), seed=seed)
    assert report.passed, report
    assert report.observed[0] == report.predicted[0]


@newer_torch  # older ones launch one more to look at the classes
def test_what_eager_reads_back_is_no_launch() -> None:
    report = check(Coded(), (torch.tensor([0, 4, 2]),))
    assert report.passed, report
    assert report.observed[0] == report.predicted[0]


def test_the_model_and_its_arguments_are_left_alone() -> None:
    model, x = Net(), X.clone()
    check(model, (x,))
    assert torch.equal(model.total, torch.zeros(4))
    assert torch.equal(x, X)


def test_what_eager_draws_is_drawn_in_float64_too() -> None:
    report = check(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).train(), (X,), train=True)
    assert report.passed, str(report)
    assert report.reference == "float64"
    assert all(c.eager_error is None or c.eager_error < 1e-6 for c in report.comparisons)


class HeldTwice(nn.Module):
    """A parameter and a buffer that a dictionary of the module's own holds too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.rand(4))
        self.held = {"weight": self.weight, "scale": self.scale}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.held["weight"]) * self.scale * self.held["scale"]


class Logging(nn.Module):
    """Loggers refer to one another."""

    def __init__(self) -> None:
        super().__init__()
        self.logger = logging.getLogger("model")

    def forward(self, x: Tensor) -> Tensor:
        self.logger.debug("forward")
        return torch.tanh(x)


class RefersToItself(nn.Module):
    def forward(self, x: Tensor) -> SimpleNamespace:
        result = SimpleNamespace(value=torch.tanh(x))
        result.itself = result
        return result


@pytest.mark.filterwarnings("ignore:.*the result holds a SimpleNamespace")
def test_objects_that_refer_to_one_another_are_walked_once() -> None:
    assert check(Logging(), (X,)).passed
    assert check(RefersToItself(), (X,)).passed
    first, second = SimpleNamespace(value=1), SimpleNamespace(value=2)
    first.other, second.other, shared = second, first, [3]
    assert list(named_parts([first, shared, shared])) == [
        "result[0].value", "result[0].other.value", "result[0].other.other", "result[1][0]", "result[2][0]",
    ]  # fmt: skip


def test_one_tensor_in_two_places_is_one_in_float64() -> None:
    model = HeldTwice()
    wide = in_float64(CheckCall(model, (X, model.weight), {}))
    assert wide.model.held["weight"] is wide.model.weight is wide.args[1]
    assert wide.model.held["scale"] is wide.model.scale
    assert {tensor.dtype for tensor in wide.tensors().values()} == {torch.float64}
    report = check(model, (X,), train=True)
    assert report.passed, str(report)
    (gradient,) = [c for c in report.comparisons if c.name == "gradient of parameter weight"]
    assert gradient.eager_error > 0  # against float64, not eager itself


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.normal(x, 1.0)


@pytest.mark.parametrize(
    ("draw", "is_fused"),
    [(random.random, True), (np.random.rand, True), (lambda: random.sample(range(9), 2)[0], False)],
    ids=["random", "rand", "sample"],
)
def test_every_run_draws_the_same_of_python_and_numpy(draw: Callable[[], float], is_fused: bool) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * draw()

    report = check(Noisy(), (X,))
    assert report.passed, str(report)
    assert not report.fallbacks if is_fused else "random" in report.fallbacks[0].reason


def test_methods_of_copies_are_equal() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = self.doubled

        def doubled(self, x: Tensor) -> Tensor:
            return x * 2

        def forward(self, x: Tensor) -> Tensor:
            return self.step(x).tanh()

    assert check(Chosen(), (torch.ones(3),)).passed


def test_models_whose_draws_depend_on_values_are_compared_with_eager() -> None:
    report = check(Noisy(), (X,))
    assert report.passed, str(report)
    assert "draws other numbers" in report.reference


def test_expanded_inputs_are_compared_too() -> None:
    report = check(nn.Tanh(), (torch.randn(3, 1).expand(3, 4),))
    assert report.passed, str(report)


class FixedDtype(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.eye(4, dtype=torch.float32)


class Reading(nn.Module):
    """Reads a value, and assigns an attribute in each call where ``keeps``."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps, self.last = keeps, torch.zeros(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x / x.abs().max().item()
        if self.keeps:
            self.last = scaled + 1
        return scaled.tanh() * 2


@pytest.mark.parametrize("keeps", [False, True])
def test_a_later_call_of_a_model_that_reads_is_compared(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(Reading(keeps), (X,)).passed
    again = oracle._again

    def otherwise(*args: Any) -> Any:
        outcome, launches = again(*args)
        return replace(outcome, results={name: value + 1 for name, value in outcome.results.items()}), launches

    monkeypatch.setattr(oracle, "_again", otherwise)
    assert "second call" in str(check(Reading(keeps), (X,)))


def test_a_model_that_fixes_a_dtype_is_compared_with_eager() -> None:
    report = check(FixedDtype(), (X,))
    assert report.passed, str(report)
    assert "in float64 the model fails" in report.reference


def test_a_model_that_cannot_be_captured_passes_with_its_fallback() -> None:
    class Replaced(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.data = y + 1
            return y

    with pytest.warns(UserWarning, match="assigns the .data"):
        report = check(Replaced(), (X,))
    assert report.passed, str(report)
    assert len(report.fallbacks) == 1
    assert report.predicted == (None, None)


def test_gradients_are_compared_in_training() -> None:
    report = check(nn.Linear(4, 2), (X,), train=True)
    assert report.passed, str(report)
    assert report.fallbacks == ()
    assert report.observed_backward == (2, 2)
    assert "gradient of parameter weight" in {c.name for c in report.comparisons}


def wrong_result(change: Callable[[Any], Any]) -> Callable[..., Any]:
    original = Fused.__call__

    def forward(self: Fused, *args: Any, **kwargs: Any) -> Any:
        return change(original(self, *args, **kwargs))

    return forward


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a value": (lambda r: {**r, "h": r["h"] + 1e-3}, "error"),
    "a NaN": (lambda r: {**r, "h": r["h"].where(r["h"] != r["h"][0, 0], torch.nan)}, "where eager has"),
    "a dtype": (lambda r: {**r, "h": r["h"].double()}, "dtype torch.float64 instead of torch.float32"),
    "a shape": (lambda r: {**r, "h": r["h"][:1]}, "shape (1, 4) instead of (3, 4)"),
    "a stride": (lambda r: {**r, "h": r["h"].t().contiguous().t()}, "stride"),
    "an index": (lambda r: {**r, "which": r["which"] ^ 1}, "values differ"),
    "a plain value": (lambda r: {**r, "n": 3}, "3 instead of 2"),
    "a missing result": (lambda r: {k: v for k, v in r.items() if k != "n"}, "missing"),
    "a copy instead of a view": (lambda r: {**r, "view": r["view"].clone()}, "memory of its own"),
    "a copy instead of the input": (lambda r: {**r, "x": r["x"].clone()}, "memory of its own"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = WRONG[what]
    monkeypatch.setattr(Fused, "__call__", wrong_result(change))
    report = check(Net(), (X,))
    assert not report.passed
    assert any(message in problem for problem in report.problems), report.problems


def test_a_forgotten_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Fused.__call__

    def forward(self: Fused, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        self.total.zero_()
        return result

    monkeypatch.setattr(Fused, "__call__", forward)
    assert any("buffer total" in problem for problem in check(Net(), (X,)).problems)


def test_a_wrong_count_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    count = oracle.count_graph
    monkeypatch.setattr(oracle, "count_graph", lambda *a: replace(count(*a), launches=99))
    assert "99 launches predicted after" in check(Net(), (X,)).problems[-1]


def broken_lower(operator: str) -> Callable[..., Any]:
    """A lowering whose kernels for one operator do nothing."""

    def lowered(region: Any) -> Any:
        kernel = lower(region)
        if isinstance(kernel, Kernel) and kernel.name.startswith(operator):
            name = f"broken_{kernel.name}"
            return replace(kernel, name=name, source=f'extern "C" int {name}(char *const *) {{ return 0; }}\n')
        return kernel

    return lowered


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async(x.isfinite().all())  # a node without a value
        return torch.exp(torch.sin(x + 1) * 2)


def test_the_first_wrong_kernel_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "RUNTIME", replace(device.RUNTIME, lower=broken_lower("sin")))
    report: CheckReport = check(Chain(), (X,), passes=())
    assert not report.passed
    assert report.first_difference.startswith("sin (aten.sin.default) at ")
    assert "test_oracle.py" in report.first_difference


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_rounding_errors_pass_and_larger_ones_do_not(dtype: torch.dtype) -> None:
    exact = torch.linspace(0.5, 2, 50, dtype=torch.float64)
    eager = exact.to(dtype)
    eps = torch.finfo(dtype).eps
    reference = exact if dtype.is_floating_point else None
    assert not compare("y", eager * (1 + eps), eager, reference).problem
    assert compare("y", eager * (1 + 600 * eps), eager, reference).problem


def test_infinities_have_to_stand_where_eagers_stand() -> None:
    eager = torch.tensor([torch.inf, 1.0, torch.nan])
    assert not compare("y", eager.clone(), eager).problem
    assert "where eager has inf" in compare("y", torch.tensor([-torch.inf, 1.0, torch.nan]), eager).problem


def test_an_overflow_that_only_eager_has_is_no_fault() -> None:
    eager = torch.tensor([torch.inf, torch.nan, 1.0])
    exact = torch.tensor([3e30, torch.inf, 1.0], dtype=torch.float64)
    assert not compare("y", torch.tensor([3e30, torch.inf, 1.0]), eager, exact).problem
    assert compare("y", torch.tensor([4e30, torch.inf, 1.0]), eager, exact).problem
    assert compare("y", torch.tensor([3e30, -torch.inf, 1.0]), eager, exact).problem
    assert compare("y", torch.tensor([3e30, 2.0, 1.0]), eager, exact).problem
    assert compare("y", torch.tensor([3e30, torch.inf, torch.nan]), eager, exact).problem


HUGE = {
    "norm": (lambda x: x.norm(dim=0), torch.full((8,), 1e30)),
    "vector_norm": (torch.linalg.vector_norm, torch.full((8,), 1e30)),
    "norm_of_tiny": (lambda x: x.norm(), torch.full((8,), 1e-30)),
    "norm_of_doubles": (lambda x: x.norm(), torch.full((8,), 1e200, dtype=torch.float64)),
    "gelu": (nn.functional.gelu, torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30] * 5)),
    "gelu_tanh": (lambda x: nn.functional.gelu(x, approximate="tanh"), torch.tensor([torch.inf, 1e30, -1e30] * 5)),
    "normalize": (lambda x: nn.functional.normalize(x, dim=0), torch.full((8,), 1e30)),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_overflows_on_the_way_is_eagers_or_nearer_to_the_truth(name: str) -> None:
    function, x = HUGE[name]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    report = check(Model(), (x,))
    assert report.passed, str(report)
    assert report.fallbacks == ()


@pytest.mark.parametrize("name", ["sum", "mean", "cumsum", "prod", "cumprod", "norm"])
def test_a_reduction_in_a_wider_dtype_converts_first(name: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return getattr(torch, name)(x, dim=0, dtype=torch.float64)

    x = 1 + torch.rand(3000, 2) * 1e-4
    with torch.no_grad():
        torch.testing.assert_close(fuse.compile(Model())(x), Model()(x), rtol=1e-13, atol=0)


def test_a_result_finer_than_what_it_was_made_of_may_differ_by_that_rounding() -> None:
    exact = torch.tensor([1.0, 3.0], dtype=torch.float64)
    off = exact + torch.finfo(torch.float32).eps
    rounding = torch.finfo(torch.float32).eps
    assert compare("y", off, exact, exact).problem
    assert not compare("y", off, exact, exact, rounding=rounding).problem
    assert compare("y", exact + 4 * rounding, exact, exact, rounding=rounding).problem


def test_a_module_that_torch_fx_made_is_compared_without_its_graph() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))

        def forward(self, x: Tensor) -> Tensor:
            return self.made(x) + 1

    report = check(Holds(), (torch.randn(2, 3),))
    assert report.passed, report
