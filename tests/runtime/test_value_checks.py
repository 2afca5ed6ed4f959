"""Values that an operator refuses raise eager's error in every call, whether the operator's result is read or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.nn.functional import one_hot

import fuse
from fuse.check.oracle import check
from fuse.graph.checks.value_checks import values_checked

CHECKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cholesky": lambda x, k: torch.linalg.cholesky(x - k[0]) + 1,
    "inverse": lambda x, k: torch.linalg.inv(x * (k[1] == 1)) + 1,
    "solve": lambda x, k: torch.linalg.solve(x * (k[1] == 1), x + 1).tanh(),
    "factors": lambda x, k: torch.linalg.lu_factor(x * (k[1] == 1))[0],
    "power": lambda x, k: torch.linalg.matrix_power(x * (k[1] == 1), -1),
    "nobody reads it": lambda x, k: (torch.linalg.inv(x * (k[1] == 1)), x.tanh() * 2)[1],
    "assertion": lambda x, k: (torch._assert_async((k < 4).all()), x.exp() + 1)[1],
    "classes": lambda x, k: one_hot(k, 4).float() @ x,
    "classes, inference": lambda x, k: torch.inference_mode()(functional.one_hot)(k, 4).float() @ x,
    "classes as many as there are": lambda x, k: one_hot(k + 0).sum(0) + k[:1],
    "quantiles": lambda x, k: torch.quantile(x, k[:1].float() / 3),
    "quantiles without NaN": lambda x, k: torch.nanquantile(x, k[1:2].float() / 3),
    "probabilities": lambda x, k: functional.binary_cross_entropy(x * 0 + k[0] / 3, x * 0 + 0.5),
    "targets": lambda x, k: functional.cross_entropy(x, k, label_smoothing=0.1),
    "positions": lambda x, k: x.index_select(0, k) * 2,
    "rates": lambda x, k: torch.poisson(k.float()[:, None] * x) * 0,
    "divisors": lambda x, k: 7 // (k - 5) // (k + 1),
}


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return self.function(x, k)


def outcome(call: Callable[..., Tensor], *args: Tensor) -> Tensor | str:
    """The result, or eager's error by its first words."""
    torch.manual_seed(0)
    try:
        return call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:40]}"


@pytest.mark.parametrize("name", CHECKS)
def test_values_that_eager_refuses_are_refused_in_every_call(name: str) -> None:
    model = Calls(CHECKS[name])
    fused = fuse.compile(model)
    x, raised = torch.eye(4) * 2, 0
    for k in (0, 5, -1, 0):
        classes = torch.tensor([0, 1, 0, 1]) + k
        expected = outcome(model, x, classes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*runs eager: an operator raised")
            result = outcome(fused, x, classes)
        if isinstance(expected, str):
            raised += 1
            assert result == expected
        else:
            assert isinstance(result, Tensor)
            torch.testing.assert_close(result, expected)
            assert fused.last_run is not None
            assert fused.last_run.fallbacks == ()
    assert raised


class Inverts(nn.Module):
    """A loop with a check in each step, of what does not depend on the step before, or of what does."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.weight = nn.Parameter(torch.eye(2))

    def forward(self, xs: Tensor) -> Tensor:
        h = xs.new_zeros(2, 2)
        for x in xs:
            h = torch.linalg.inv(x if self.apart else h * 0.1 + x) @ self.weight + h.tanh()
        return h


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_a_check_in_a_loop_raises_for_any_step(apart: bool, train: bool) -> None:
    model = Inverts(apart)
    fused = fuse.compile(model)
    xs = torch.eye(2).repeat(8, 1, 1)
    bad = xs.clone()
    bad[0] = 0
    with torch.set_grad_enabled(train):
        torch.testing.assert_close(fused(xs), model(xs))
        for _ in range(2):
            with pytest.raises(torch.linalg.LinAlgError):
                fused(bad)
        torch.testing.assert_close(fused(xs), model(xs))
        if train:
            mine, theirs = (torch.autograd.grad(m(xs).sum(), model.weight)[0] for m in (fused, model))
            torch.testing.assert_close(mine, theirs)
    assert fused.last_run is not None
    assert fused.last_run.fallbacks == ()


@pytest.mark.parametrize("turned", [False, True])
def test_classes_are_contiguous_as_eagers_are(turned: bool) -> None:
    index = torch.arange(6).view(2, 3) % 4
    report = check(Calls(lambda x, k: one_hot(k.t() + 0 if turned else k + 0, 4)), (torch.ones(1), index))
    assert not any(one.problem for one in report.comparisons), report  # launches differ between torch versions


def test_the_functions_of_torch_are_as_they_were_after_a_capture() -> None:
    fused = fuse.compile(Calls(CHECKS["classes"]))
    fused(torch.eye(4), torch.tensor([0, 1]))
    for name in ("one_hot", "quantile", "nanquantile"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutogradCPU")


def test_a_recording_within_another_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries: list[str] = []
    make = torch.library._scoped_library
    monkeypatch.setattr(torch.library, "_scoped_library", lambda *given: libraries.append(given[0]) or make(*given))
    asked: list[str] = []
    classes = torch.tensor([0, 1])
    with FakeTensorMode() as fake:
        fakes = fake.from_tensor(classes)
        with values_checked(lambda *call: asked.append("outer")):
            with values_checked(lambda *call: asked.append("inner")):
                one_hot(fakes, 2)
            one_hot(fakes, 2)
            with unset_fake_temporarily():
                assert torch.equal(one_hot(classes, 2), torch.eye(2, dtype=torch.int64))
    assert asked == ["inner", "outer"]
    assert libraries == ["aten"]  # torch warns of a kernel in the place of another
