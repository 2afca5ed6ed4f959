"""Elementwise operators as kernels: eager's bits, dtypes and edge cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

Cases = dict[str, tuple[Any, ...]]
INF, NAN = float("inf"), float("nan")
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 3.0, 1e-40, -1e-40, 1e30, -1e30, INF, -INF, NAN]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FIRST = torch.tensor([a for a, _ in itertools.product(EDGES, EDGES)])
SECOND = torch.tensor([b for _, b in itertools.product(EDGES, EDGES)])


def of_dtype(dtype: torch.dtype, count: int = 37, seed: int = 0) -> Tensor:
    """Numbers of every size the dtype holds, edges of its range included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) > 0.5
    if dtype.is_floating_point:
        return (torch.randn(count, generator=generator) * 3).to(dtype)
    limits = torch.iinfo(dtype)
    values = torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=dtype)
    values[:3] = torch.tensor([limits.min, limits.max, 0], dtype=dtype)
    return values


ARITHMETIC: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "copysign": torch.copysign,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "floor_divide": torch.floor_divide,
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "logical_and": torch.logical_and,
    "logical_xor": torch.logical_xor,
    "where": lambda a, b: torch.where(a > b, a, b),
    "add_scaled": lambda a, b: torch.add(a, b, alpha=0.3),
    "sub_scaled": lambda a, b: torch.sub(a, b, alpha=0.3),
    "rsub_scaled": lambda a, b: torch.rsub(a, b, alpha=0.3),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b, value=0.3),
}
UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "neg": torch.neg,
    "relu": torch.relu,
    "relu6": functional.relu6,
    "sign": torch.sign,
    "ceil": torch.ceil,
    "floor": torch.floor,
    "round": torch.round,
    "trunc": torch.trunc,
    "frac": torch.frac,
    "reciprocal": torch.reciprocal,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
    "logical_not": torch.logical_not,
    "clamp": lambda x: torch.clamp(x, 0, 1),
    "clamp_min": lambda x: torch.clamp_min(x, 0),
    "clamp_max": lambda x: torch.clamp(x, max=-0.5),
    "crossed_clamp": lambda x: torch.clamp(x, 2, 1),
    "nan_to_num": torch.nan_to_num,
    "nan_to_given": lambda x: torch.nan_to_num(x, 1.0, posinf=2.0, neginf=3.0),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
    "threshold": lambda x: functional.threshold(x, 0.1, 5.0),
    "hardtanh": functional.hardtanh,
    "hardsigmoid": functional.hardsigmoid,
    "masked_fill": lambda x: x.masked_fill(x > 0, -INF),
    "where_number": lambda x: torch.where(x > 0, x, 0.1),
    "to_bool": lambda x: x.bool(),
    "pow_2": lambda x: x**2,
    "pow_3": lambda x: x**3,
    "pow_half": lambda x: x**0.5,
    "pow_minus_1": lambda x: x**-1,
    "equals_number": lambda x: x == 0.1,
    "above_number": lambda x: x > 0.1,
    "reversed_minus": lambda x: 1 - x,
    "times_number": lambda x: x * 0.1,
    "over_number": lambda x: x / 3,
    "number_over": lambda x: 3 / x,
    "remainder_of_number": lambda x: x % -3,
    "floor_of_number": lambda x: x // 0.3,
}


LOOSE_IN_HALVES = ("pow_3", "add_scaled", "sub_scaled", "rsub_scaled")
"""Operators that eager rounds in between in some of its loops (the last few elements, say); a kernel rounds once."""

QUOTIENTS: Mapping[str, Callable[[Tensor, Any], Tensor]] = {
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "floor_divide": torch.floor_divide,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "mul": torch.mul,
    "div": torch.div,
}
"""Operators whose second operand eager reads in float, beside halves, where it is one number."""


GRADIENTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid_backward": lambda g, y: torch.ops.aten.sigmoid_backward(g, y),
    "tanh_backward": lambda g, y: torch.ops.aten.tanh_backward(g, y),
    "threshold_backward": lambda g, x: torch.ops.aten.threshold_backward(g, x, 0.5),
}


def edge_cases() -> Cases:
    cases: Cases = {}
    for name, f in GRADIENTS.items():
        cases |= {f"{name} {d}": (f, FIRST.to(d), SECOND.to(d)) for d in (torch.float32, torch.float64)}
    for name, f in ARITHMETIC.items():
        # by a subnormal divisor eager's vectorised fmod gives NaN, where the remainder is a number
        normal = SECOND.where(SECOND.abs() != 1e-40, 7.0) if name in ("remainder", "fmod") else SECOND
        cases |= {f"{name} {d}": (f, FIRST.to(d), normal.to(d)) for d in (torch.float32, torch.float64)}
    cases |= {f"{name} float32": (f, FIRST) for name, f in UNARY.items()}
    return cases


def half_cases() -> Cases:
    cases: Cases = {}
    for dtype in (torch.bfloat16, torch.float16):
        short = str(dtype).removeprefix("torch.")
        a, b = torch.cat([of_dtype(dtype), torch.tensor(EDGES[:-1]).to(dtype)]), of_dtype(dtype, 52, seed=1)
        near = torch.full((40,), 0.1).to(dtype)
        gradients = GRADIENTS if dtype is torch.bfloat16 else ["threshold_backward"]  # eager rounds more in float16
        cases |= {f"{name} {short}": (GRADIENTS[name], a, b) for name in gradients}
        cases |= {f"{name} {short}": (f, a, b) for name, f in ARITHMETIC.items() if name not in LOOSE_IN_HALVES}
        cases |= {
            f"{name} {short}": (f, torch.cat([a, near])) for name, f in UNARY.items() if name not in LOOSE_IN_HALVES
        }
        cases[f"rounds after every operator {short}"] = (lambda x, y: (x * y + x) * y - x, a, b)
        normal = a.where((a == 0) | (a.abs() > 1e-30), 7.0)  # the evaluated recipe has a vectorised fmod, too
        multiples = torch.cat([torch.arange(-40, 40) * 0.7, torch.arange(-1000, 1000, 9), normal]).to(dtype)
        for name, f in QUOTIENTS.items():
            for number in (0.7, -3, 2051):
                cases[f"{name} by {number} {short}"] = (lambda x, f=f, n=number: f(x, n), multiples)
            for kind in (torch.float32, torch.int64, dtype):
                for shape in ((), (1,)) if kind is not torch.float32 else ((),):
                    divisor = torch.full(shape, 0.7 if kind.is_floating_point else -2051, dtype=kind)
                    cases[f"{name} by {len(shape)}-d {kind} {short}"] = (f, multiples, divisor)
                    cases[f"{name} of {len(shape)}-d {kind} {short}"] = (f, divisor, multiples)
            cases[f"{name} by tensor {short}"] = (f, multiples, torch.full_like(multiples, 0.7))
        positive = multiples.abs()
        cases[f"pow of number {short}"] = (lambda x: x**0.7, positive)
        cases[f"pow of odd number {short}"] = (lambda x: x**2051, multiples)
        cases[f"pow of 0-d {short}"] = (torch.pow, positive, torch.tensor(0.7))
        cases[f"addcmul of 0-d {short}"] = (lambda x, y: torch.addcmul(x, y, x, value=0.5), positive, torch.tensor(0.7))
        cases[f"an integer tensor {short}"] = (lambda x, y: x * y, a, torch.arange(52) * 37 + 1)
        cases[f"a scalar tensor {short}"] = (lambda x, y: x * y + y, a, torch.tensor(0.1))
        cases[f"a float tensor {short}"] = (lambda x, y: x * y, a, torch.randn(52))
    return cases


def integer_cases() -> Cases:
    cases: Cases = {}
    plain = ("add", "sub", "mul", "maximum", "minimum", "eq", "lt", "where", "logical_and", "div")
    for dtype in (*INTEGERS, torch.bool):
        short = str(dtype).removeprefix("torch.")
        a, b = of_dtype(dtype), of_dtype(dtype, seed=1)
        for name in plain:
            if not (dtype is torch.bool and name == "sub"):
                cases[f"{name} {short}"] = (ARITHMETIC[name], a, b)
        for name, op in {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}.items():
            cases[f"{name} {short}"] = (op, a, b)
        cases[f"not {short}"] = (torch.bitwise_not, a)
        cases[f"logical not {short}"] = (torch.logical_not, a)
        cases[f"is nan {short}"] = (torch.isnan, a)
        cases[f"is finite {short}"] = (torch.isfinite, a)
        cases[f"plus int {short}"] = (lambda x: x + 3, a)
        cases[f"plus float {short}"] = (lambda x: x + 0.5, a)
        cases[f"above float {short}"] = (lambda x: x > 0.5, a)
        for other in (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool):
            if other is not dtype:
                cases[f"{short} to {other}"] = (lambda x, d=other: x.to(d), a)
            cases[f"{short} times {other}"] = (torch.mul, a, of_dtype(other, seed=2))
        if dtype is not torch.bool:
            cases[f"remainder {short}"] = (lambda x: x % 7, a)
            cases[f"fmod {short}"] = (lambda x: torch.fmod(x, 7), a)
            cases[f"floor {short}"] = (lambda x: x // 7, a)
            for divisor in (7, -3) if dtype.is_signed else (7,):
                for mode in ("floor", "trunc"):
                    name = f"{mode} of quotient by {divisor} {short}"
                    cases[name] = (lambda x, y=divisor, m=mode: torch.div(x, y, rounding_mode=m), a)
            cases[f"scaled {short}"] = (lambda x, y: torch.add(x, y, alpha=3), a, b)
            cases[f"abs {short}"] = (torch.abs, a)
            cases[f"sign {short}"] = (torch.sign, a)
            cases[f"neg {short}"] = (torch.neg, a)
            cases[f"square {short}"] = (lambda x: x**2, a)
            cases[f"clamp {short}"] = (lambda x: torch.clamp(x, 1, 5), a)
            cases[f"round {short}"] = (torch.round, a)
    for source, target in itertools.permutations(FLOATS, 2):
        cases[f"{source} to {target}"] = (lambda x, d=target: x.to(d), of_dtype(source))
    for target in INTEGERS:
        cases[f"float32 to {target}"] = (lambda x, d=target: x.to(d), of_dtype(torch.float32))
    return cases


TRANSCENDENTAL: Mapping[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1", "log",
        "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "tan", "tanh",
    )
} | {
    "mish": functional.mish,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": lambda x: functional.softplus(x, 2, 10),
    "logsigmoid": functional.logsigmoid,
    "elu": lambda x: functional.elu(x, 0.5),
    "selu": functional.selu,
    "celu": lambda x: functional.celu(x, 2.0),
    "hardswish": functional.hardswish,
    "pow": lambda x: x**1.7,
    "number_to_the": lambda x: 1.7**x,
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
}  # fmt: skip


def transcendental_cases() -> Cases:
    cases: Cases = {}
    for dtype in FLOATS:
        short = str(dtype).removeprefix("torch.")
        edges = torch.tensor(EDGES).to(dtype)
        values = torch.cat([of_dtype(dtype, 90) / 2, edges])
        cases |= {f"{name} {short}": (f, values) for name, f in TRANSCENDENTAL.items() if name != "gelu"}
        cases[f"gelu {short}"] = (functional.gelu, values.nan_to_num(posinf=40.0))  # of infinity eager's loop makes NaN
        cases[f"atan2 {short}"] = (torch.atan2, values, values.flip(0))
        cases[f"logaddexp {short}"] = (torch.logaddexp, values, values.flip(0))
        cases[f"logaddexp of equals {short}"] = (torch.logaddexp, values, values)
        cases[f"hypot {short}"] = (torch.hypot, values, values.flip(0))
    cases |= {
        f"{name} int32": (TRANSCENDENTAL[name], torch.arange(-5, 30)) for name in ("exp", "log", "tanh", "sigmoid")
    }
    return cases


@pytest.fixture(scope="module")
def exact(run_together: Callable[..., Any]) -> Any:
    return run_together({**edge_cases(), **half_cases(), **integer_cases()})


@pytest.fixture(scope="module")
def close(run_together: Callable[..., Any]) -> Any:
    return run_together(transcendental_cases())


@pytest.mark.parametrize("name", [*edge_cases(), *half_cases(), *integer_cases()])
def test_exact_operators_have_eagers_bits(exact: Any, name: str) -> None:
    exact[name].check(exact=True)


@pytest.mark.parametrize("name", list(transcendental_cases()))
def test_transcendental_functions_are_as_close_to_float64_as_eager(close: Any, name: str) -> None:
    close[name].check()
