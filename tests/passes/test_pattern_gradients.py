"""A pattern's own ``backward``: taken where the pattern is, in loops too, and refused where it is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fuse
from fuse.check.oracle import check
from fuse.check.pattern import verify
from fuse.check.trials import refusal
from fuse.errors import FuseError
from fuse.gradients.differentiating import NAME, OWN, by_loops
from fuse.graph.backward.joint import capture_joint
from fuse.report.report import Report
from fuse.report.show import show
from fuse.rewrite.patterns.definition import define


class Sech:
    """tanh whose gradient is computed from its result by way of a square that autograd does not write."""

    def pattern(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def backward(self, grad: Tensor, x: Tensor, *, result: Tensor) -> Tensor:
        return grad * (1 - result) * (1 + result)


class Bump:
    """exp(-x^2) of a sum; its gradients are made of the operands alone."""

    def pattern(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(-(x + y) * (x + y))

    def backward(self, grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        s = x + y
        slope = grad * -2 * s * torch.exp(-s * s)
        return slope.sum_to_size(x.shape), slope.sum_to_size(y.shape)


class Polar:
    """Two results, one of which a caller may leave out."""

    def pattern(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.hypot(x, y), torch.atan2(y, x)

    def backward(self, grad_r: Tensor, grad_a: Tensor, x: Tensor, y: Tensor, *, result: Any) -> Any:
        radius, _ = result
        square = radius * radius
        return grad_r * x / radius - grad_a * y / square, grad_r * y / radius + grad_a * x / square


class Model(nn.Module):
    """``run(weight, *args)``."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run
        self.weight = nn.Parameter(torch.randn(6, 6) / 2)

    def forward(self, *args: Tensor) -> Any:
        return self.run(self.weight, *args)


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [(torch.randn(shape) + 0.1).requires_grad_() for shape in shapes]


def trains(run: Callable[..., Any], *args: Tensor, fired: dict[str, int]) -> Report:
    """The patterns take ``fired`` gradients, and all gradients are eager's; the report of the training step."""
    model = Model(run)
    report = show(model, args, train=True)
    counts = {one.pattern: one.count for one in report.ledger.fired if one.pass_name == OWN}
    assert counts == fired, str(report)
    assert all(one.launches_saved == 0 for one in report.ledger.fired if one.pass_name == OWN)
    checked = check(model, args, train=True)
    assert checked.passed, str(checked)
    assert checked.fallbacks == ()
    assert report.backward is not None
    assert checked.observed_backward is not None
    assert (checked.observed[1], checked.observed_backward[1]) == (
        report.after.launches,
        report.backward.after.launches,
    )
    return report


def backward_operators(run: Callable[..., Any], *args: Tensor) -> set[str]:
    """The operators of the backward half before any pass, those in loops included."""
    joint = capture_joint(Model(run), args, differentiate=by_loops())
    assert joint.backward is not None
    return {
        str(node.target)
        for module in joint.backward.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
    }


def bump(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    s = x @ w + y
    return torch.exp(-s * s).sum(0)


def cell(w: Tensor, xs: Tensor) -> Tensor:
    h = torch.zeros_like(xs[0])
    for x in xs:
        h = torch.tanh(x + h @ w)
    return h


def test_gradients_are_the_patterns_and_fuse_as_any(registered):
    without = trains(bump, *inputs((4, 6), (4, 6)), fired={})
    registered(Bump)
    report = trains(bump, *inputs((4, 6), (4, 6)), fired={"Bump": 1})
    assert (report.after.launches, report.backward.after.launches) == (
        without.after.launches,
        without.backward.after.launches,
    )


def test_a_result_may_be_used(registered):
    registered(Sech)
    run = lambda w, x: torch.tanh(x @ w) * 2  # noqa: E731
    assert "aten.tanh_backward.default" not in backward_operators(run, *inputs((4, 6)))
    trains(run, *inputs((4, 6)), fired={"Sech": 1})


@pytest.mark.parametrize("leaves", ["both", "the first", "the second"])
def test_several_results(registered, leaves):
    registered(Polar)

    def run(w: Tensor, x: Tensor, y: Tensor) -> Any:
        x = x @ w
        radius, angle = torch.hypot(x, y), torch.atan2(y, x)
        return {"both": (radius, angle), "the first": (radius, angle < 0), "the second": angle * 2}[leaves]

    fired = {} if leaves == "the second" else {"Polar": 1}  # hypot is dead code there
    trains(run, *inputs((4, 6), (4, 6)), fired=fired)


def test_broadcast_operands_and_one_that_needs_no_gradient(registered):
    registered(Bump)
    x, y = torch.randn(4, 6), torch.randn(1, 6, requires_grad=True)
    trains(bump, x, y, fired={"Bump": 1})


def test_one_tensor_in_both_places(registered):
    registered(Bump)
    trains(lambda w, x: torch.exp(-(x + x) * (x + x)) @ w, *inputs((4, 6)), fired={"Bump": 1})


def test_operands_that_the_graph_has_turned(registered):
    @registered
    class Product:
        def pattern(self, x: Tensor, w: Tensor) -> Tensor:
            return torch.sigmoid(x @ w.t())

        def backward(self, grad: Tensor, x: Tensor, w: Tensor, *, result: Tensor) -> Any:
            d = grad * result * (1 - result)
            return d @ w, d.t() @ x

    def turned(w: Tensor, x: Tensor, u: Tensor) -> Tensor:
        return torch.sigmoid(x @ u) + torch.sigmoid(x @ w.t())

    trains(turned, *inputs((4, 6), (6, 6)), fired={"Product": 2})


@pytest.mark.parametrize("steps", [9, 17])
def test_in_a_loop_with_as_many_launches_at_any_length(registered, steps):
    registered(Sech)
    xs = torch.randn(steps, 3, 6, requires_grad=True)
    assert "aten.tanh_backward.default" not in backward_operators(cell, xs)
    report = trains(cell, xs, fired={"Sech": 1})
    assert (report.after.launches, report.backward.after.launches) == (1, 2)


def test_near_misses(registered):
    registered(Bump)

    def two_values(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(-(x + y) * (x - y)) @ w

    def read_between(w: Tensor, x: Tensor, y: Tensor) -> Any:
        s = x + y
        return torch.exp(-s * s) @ w, -s * s

    for run in (two_values, read_between):
        report = trains(run, *inputs((4, 6), (4, 6)), fired={})
        assert [one.pattern for one in report.rejected if one.pass_name == OWN] == ["Bump"], str(report)


def test_a_call_that_keeps_gradients_back_says_why_the_rule_is_not_used(registered):
    registered(Bump)
    run = lambda w, x, y: torch.exp(-(x + y) * (x + y)) @ w * x.detach()  # noqa: E731
    report = trains(run, *inputs((4, 6), (4, 6)), fired={})
    (said,) = [one.reason for one in report.rejected if one.pass_name == NAME]
    assert said == "the call stops gradients of an operand (detach, no_grad)"


def test_gradients_that_do_not_fit_are_declined(registered):
    @registered
    class Halved:
        def pattern(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

        def backward(self, grad: Tensor, x: Tensor, *, result: Tensor) -> Tensor:
            if x.dtype is torch.bfloat16:
                return (grad * (1 - result * result)).float()
            return grad * (1 - result * result)

    x = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True)
    report = trains(lambda w, x: torch.tanh(x) * 2, x, fired={})
    (said,) = [one.reason for one in report.rejected if one.pass_name == OWN]
    assert said.endswith("backward gives float32[4, 6] for x, which is bfloat16[4, 6]")


def test_a_loop_that_needs_no_gradient_stays_rolled(registered):
    registered(Sech)

    def run(w: Tensor, xs: Tensor, y: Tensor) -> Tensor:
        return cell(torch.eye(6), xs) @ w + torch.tanh(y)

    trains(run, torch.randn(9, 3, 6), *inputs((3, 6)), fired={"Sech": 2})


# ---- held to what it says ------------------------------------------------------------------------------------------


def wrong(backward: Callable[..., Any], pattern: Callable[..., Any] = torch.tanh) -> str:
    """What trying a pattern with ``backward`` finds."""

    def function(x: Tensor) -> Tensor:
        return pattern(x)

    parts = {"pattern": staticmethod(function), "backward": staticmethod(backward)}
    made = define(type("Wrong", (), parts))
    found = verify(made, quick=True)
    assert refusal(made) == f"refused: {found.counterexample}"
    return str(found.counterexample)


def test_a_right_gradient_passes_what_is_tried():
    for pattern in (Sech, Bump, Polar):
        found = verify(define(pattern))
        assert found.passed, str(found)
        assert found.gradients > 5


@pytest.mark.parametrize(
    ("backward", "told"),
    [
        (lambda grad, x: grad * (1 - x.tanh()), "backward: gradient of x: error"),
        (lambda grad, x: None, "backward gives no gradient of x, and the pattern has one"),
        (lambda grad, x: (grad, None), "backward gives 2 gradients, and the pattern has 1 parameters"),
        (lambda grad, other, x: grad, "backward takes the gradients of 2 results, and the pattern has 1"),
        (lambda grad, x: grad.sum(), "backward gives float64[] for x, which is float64[8, 8]"),
        (lambda grad, x: grad.mul_(2), "backward writes to one of its arguments"),
        (lambda grad, x: grad @ x[:3], "backward fails, RuntimeError"),
    ],
    ids=["formula", "nothing", "too many", "results", "shape", "writes", "fails"],
)
def test_a_wrong_gradient_is_refused_with_its_counterexample(backward, told):
    assert told in wrong(backward)


def test_a_gradient_of_what_autograd_cannot_differentiate_is_held_to_differences():
    def ramp(x: Tensor) -> Tensor:
        return x * torch.heaviside(x, x)

    assert "Jacobian mismatch" in wrong(lambda grad, x: grad * 2 * torch.heaviside(x, x), ramp)
    parts = {"pattern": lambda self, x: ramp(x), "backward": lambda self, grad, x: grad * torch.heaviside(x, x)}
    assert refusal(define(type("Ramp", (), parts))) is None


def test_a_wrong_gradient_is_not_used(registered):
    @registered
    class Doubled:
        def pattern(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

        def backward(self, grad: Tensor, x: Tensor) -> Tensor:
            return 2 * grad * (1 - torch.tanh(x) ** 2)

    report = trains(lambda w, x: torch.tanh(x @ w), *inputs((4, 6)), fired={})
    assert any("backward: gradient of x: error" in one.reason for one in report.rejected if one.pass_name == OWN)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_verdict_does_not_depend_on_where_it_is_asked(mode, monkeypatch, tmp_path):
    """It is kept: a model is often called without autograd first, and trained later."""
    monkeypatch.setenv("FUSE_CACHE_DIR", str(tmp_path / "cache"))

    class Swish:
        def pattern(self, x: Tensor, w: Tensor) -> Tensor:
            h = x @ w
            return h * torch.sigmoid(h)

        def backward(self, grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            s = torch.sigmoid(x @ w)
            slope = grad * (s + (x @ w) * s * (1 - s))
            return slope @ w.t(), x.t() @ slope

        def examples(self) -> tuple[Tensor, Tensor]:
            return torch.randn(4, 6), torch.randn(6, 6)

    state = torch.random.get_rng_state()
    with mode():
        assert refusal(define(Swish)) is None
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_gradient_is_tried_on_each_class_of_calls(registered):
    """It is right for squares, with which it is tried as a whole."""

    @registered
    class Power:
        def pattern(self, x: Tensor) -> Tensor:
            return torch.tanh(torch.pow(x, fuse.const("n", 2)))

        def backward(self, grad: Tensor, x: Tensor, *, result: Tensor) -> Tensor:
            return grad * (1 - result * result) * fuse.const("n", 2) * x

    report = trains(lambda w, x: torch.tanh((x @ w) ** 2) + torch.tanh(x**3), *inputs((4, 6)), fired={"Power": 1})
    told = "backward is not used for float32[n, n]; n=3.0; wrong: backward: gradient of x: error"
    assert any(told in one.reason for one in report.rejected)


@pytest.mark.parametrize(
    "backward",
    [lambda self, x: x, lambda self, grad, y: y, lambda self, grad, x, *, output: x, lambda self, *all_of_them: 0],
)
def test_other_parameters_are_no_backward(backward):
    with pytest.raises(FuseError, match="backward must take the gradient of each result, then the parameters"):
        define(type("Odd", (), {"pattern": lambda self, x: x.exp(), "backward": backward}))


def test_a_change_of_the_gradient_is_tried_anew():
    def pattern(factor: float) -> Any:
        def backward(self: Any, grad: Tensor, x: Tensor) -> Tensor:
            return grad * torch.exp(x) * factor

        return define(type("Exponential", (), {"pattern": lambda self, x: torch.exp(x), "backward": backward}))

    assert refusal(pattern(1.0)) is None
    assert "gradient of x" in (refusal(pattern(1.5)) or "")


def test_fuse_compile_trains_with_it(registered):
    registered(Sech)
    model = Model(cell)
    eager = copy.deepcopy(model)
    xs = torch.randn(9, 3, 6)
    fused = fuse.compile(model)
    for _ in range(2):
        fused(xs).square().sum().backward()
        eager(xs).square().sum().backward()
    torch.testing.assert_close(model.weight.grad, eager.weight.grad)
    assert fused.last_run.fallbacks == ()
