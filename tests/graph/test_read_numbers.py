"""Numbers that are read: Python's arithmetic, torch's promotion, and nothing learned but what Python asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Interpreter

import fuse
from fuse.errors import CaptureError
from fuse.graph.capture import capture


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _sum_of_rows(x: Tensor) -> tuple[Tensor, float]:
    total = 0.0
    for value in x.tolist():
        total += value if value > 0 else -value
    return x / total, total


def _division(x: Tensor) -> Tensor:
    try:
        return x * (1 / x[0].item())
    except ZeroDivisionError:
        return x


UNGUARDED: dict[str, Callable[[Tensor], Any]] = {
    "divided_by": lambda x: x / x.abs().max().item(),
    "from_the_left": lambda x: (2.0 - x.sum().item() * x, 3 / x.exp() * x.max().item()),
    "in_place": lambda x: (x * 1).mul_(x.max().item()).sub_(x.min().item()),
    "half_precision": lambda x: (x.half() / x.half().max().item(), x.bfloat16() * x.max().item()),
    "integers_beside_numbers": lambda x: x.long() * x.max().item(),
    "double": lambda x: x.double() * x.sum().item() + x.max().item(),
    "weighed": lambda x: torch.add(x, x.exp(), alpha=x.max().item()) - (x * 1).sub_(x, alpha=x.sum().item()),
    "between": lambda x: x.lerp(x.exp(), x.max().item()) + torch.lerp(x.double(), x.double(), weight=x.min().item()),
    "between_by_an_integer": lambda x: x.lerp(x.exp(), x.argmax().item()),
    "where": lambda x: torch.where(x > 0, x, x.min().item()),
    "clamped": lambda x: x.clamp(min=x.mean().item()),
    "masked": lambda x: x.masked_fill(x > 0, x.min().item()),
    "returned": lambda x: {"loss": x.sum().item(), "place": x.argmax().item(), "y": x * 2},
    "computed": lambda x: (2 * x.sum().item() - 1, -x.max().item(), abs(x.min().item()), x + 0.5 * x.max().item()),
    "summed": lambda x: sum(x.tolist()) * x,
    "stored": lambda x: (y := x * 1).__setitem__(0, x.max().item()) or y,
    "an_instance": lambda x: x * 2 if isinstance(x.max().item(), float) else x,
}
GUARDED: dict[str, tuple[Callable[[Tensor], Any], set[str]]] = {
    "compared": (lambda x: x if x.max().item() * 2 + 1 > 3 else -x, {"truth"}),
    "the_larger": (lambda x: x * max(x[0].item(), x[1].item()), {"truth"}),
    "sorted": (lambda x: [x * value for value in sorted(x.tolist())], {"truth"}),
    "rows": (_sum_of_rows, {"truth"}),
    "a_division": (_division, {"truth"}),
    "integers": (lambda x: x * (x.long().sum().item() * 3 - 1), {"truth"}),
    "a_remainder": (lambda x: x * (x.long().sum().item() % 5 - x.long().min().item() // 3), {"truth"}),
    "a_remainder_of_a_real": (lambda x: x * (x.sum().item() % 5), {"number"}),
    "a_function": (lambda x: x * math.exp(x.mean().item()), {"number"}),
    "a_text": (lambda x: x * len(f"{x.max().item():.1f}"), {"number"}),
    "a_key": (lambda x: {round(x.max().item()): x * 2}, {"number"}),
    "a_tensor": (lambda x: x + torch.tensor(x.max().item()), {"number"}),
    "a_length": (lambda x: x[: x.argmax().item() + 1] * 2, {"truth", "number"}),
    "float": (lambda x: x * float(x.max()), {"number"}),
    "int": (lambda x: x * int(x.max()), {"number"}),
    "weighed_by_what_may_overflow": (
        lambda x: x.add(x, alpha=-x.sum().item()).lerp(x, x.double()[0].item()),
        {"truth"},
    ),
    "weighed_in_half_precision": (lambda x: x.half().add(x.half(), alpha=x.max().item()), {"number"}),
    "array": (lambda x: x * x.numpy().max().item(), {"values"}),
    "equality": (lambda x: x if torch.equal(x, x * 1) else -x, {"truth"}),
    "closeness": (lambda x: x if torch.allclose(x, x + 1e-9) else -x, {"truth"}),
    "any_and_all": (lambda x: x if any(x > 0) and not all(x > 5) else -x, {"truth"}),
    "contained": (lambda x: x if 77.0 in x else -x, {"truth"}),
}


def replayed(graph: Any, x: Tensor) -> Any:
    """What the captured operators compute, as the model's result: the numbers in it as tensors."""
    with torch.no_grad():
        return Interpreter(graph).run(x, *(s.value for s in graph.meta["signature"].inputs if s.value is not None))


@pytest.mark.parametrize("name", UNGUARDED)
def test_nothing_is_learned_of_numbers_that_go_back_to_tensors(name: str) -> None:
    x = torch.randn(6)
    graph = capture(Calls(UNGUARDED[name]), (x,))
    learning = graph.meta["signature"].learning
    assert learning.learned == ()
    assert {line.guard for line in learning.lines} == {"none"}


@pytest.mark.parametrize("name", GUARDED)
def test_what_python_asks_is_learned_and_no_more(name: str) -> None:
    function, guards = GUARDED[name]
    x = torch.randn(6)
    graph = capture(Calls(function), (x,))
    learning = graph.meta["signature"].learning
    assert {one.guard for one in learning.learned} == guards
    values = replayed(graph, x)
    assert learning.difference(values) is None


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3),
    operations=st.lists(st.sampled_from(["+", "-", "*", "/", "r-", "abs", "neg"]), min_size=1, max_size=5),
    integers=st.booleans(),
)
def test_arithmetic_is_pythons_to_the_bit(values: list[float], operations: list[str], integers: bool) -> None:
    def function(x: Tensor) -> tuple[Any, bool]:
        a, b, c = (x.long() if integers else x).tolist()
        for name in operations:
            if name == "abs":
                a = abs(a)
            elif name == "neg":
                a = -a
            elif name == "/":
                a = a / c if c != 0 else a
            else:
                a = {"+": a + b, "-": a - 3, "*": a * b, "r-": 2 - a}[name]
        return a, a > b

    x = torch.tensor(values)
    graph = capture(Calls(function), (x,))
    signature = graph.meta["signature"]
    number, truth = function(x)
    outputs = signature.outputs[signature.learning.leaves :]
    assert outputs[1].value is truth
    if outputs[0].kind == "number":
        found = replayed(graph, x)[signature.outputs[outputs[0].index].index].item()
    else:
        found = outputs[0].value
    assert type(found) is type(number)
    assert found == number or (found != found and number != number)


@pytest.mark.parametrize("function", [lambda x, n: x.add(x, alpha=n), lambda x, n: x.lerp(x * 2, n)])
def test_a_weight_beyond_the_dtype_raises_as_in_eager_mode(function: Callable[[Tensor, Any], Tensor]) -> None:
    fused = fuse.compile(Calls(lambda pair: function(pair[0], pair[1].item())))
    x = torch.randn(6)
    for weight in (0.5, 1e40, -1e300, float("inf"), 3.0):
        try:
            expected = function(x, weight)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="overflow"):
                fused((x, torch.tensor(weight, dtype=torch.float64)))
        else:
            found = fused((x, torch.tensor(weight, dtype=torch.float64)))
            torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_value_that_cannot_be_computed_is_no_answer_even_if_forward_catches_the_error() -> None:
    def function(x: Tensor) -> Tensor:
        try:
            return x if torch.ones(4)[x.long()].sum() > 0 else -x
        except Exception:
            return x * 2

    with pytest.raises(CaptureError, match=r"raises IndexError"):
        capture(Calls(function), (torch.tensor([9.0]),))


def test_a_read_in_the_backward_pass_is_refused() -> None:
    from fuse.graph.backward.joint import capture_joint

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2 if gradient.sum() > 0 else gradient

    with pytest.raises(CaptureError, match=r"depends on the values|read in the backward pass"):
        capture_joint(Calls(lambda x: Reads.apply(x)), (torch.ones(3, requires_grad=True),))
