"""The kernels' mathematics against float64, long double and eager PyTorch, through loops compiled as kernels are."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fuse.kernel.cpu.prelude import prelude
from fuse.runtime.cpu import compiler, toolchain

Function = Callable[..., Tensor]

REAL: dict[str, Function] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
}
EXACT: dict[str, Function] = {
    "abs": torch.abs,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "frac": torch.frac,
    "sign": torch.sign,
    "relu": torch.relu,
    "neg": torch.neg,
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
}
ACTIVATIONS: dict[str, Function] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "mish": functional.mish,
    "logsigmoid": functional.logsigmoid,
}
PARAMETRISED: dict[str, tuple[str, Function]] = {
    "elu": ("1.5f, 1.25f, 0.5f", lambda x: torch.ops.aten.elu(x, 1.5, 1.25, 0.5)),
    "leaky_relu": ("0.01f", lambda x: functional.leaky_relu(x, 0.01)),
    "softplus": ("2, 20", lambda x: functional.softplus(x, 2.0, 20.0)),
    "clamp": ("-1, 2", lambda x: torch.clamp(x, -1.0, 2.0)),
}
BINARY: dict[str, Function] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "copysign": torch.copysign,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "floor_divide": torch.floor_divide,
}
INTEGER: dict[str, Function] = {
    "floor_divide": torch.floor_divide,
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
}
TESTS: dict[str, Function] = {"isnan": torch.isnan, "isinf": torch.isinf, "isfinite": torch.isfinite}
CASTS = [
    (torch.float32, torch.int8),
    (torch.float32, torch.int64),
    (torch.float32, torch.uint8),
    (torch.float32, torch.bool),
    (torch.float64, torch.uint8),
    (torch.int64, torch.float32),
    (torch.int32, torch.bool),
]
DOUBLE: dict[str, Callable[..., Any]] = {  # with references in long double
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sigmoid": lambda x: np.where(x < 0, np.exp(np.minimum(x, 0)), 1) / (1 + np.exp(-np.abs(x))),
}
C_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.bool: "bool",
}
# fmt: off
SPECIAL = torch.tensor([
    0.0, -0.0, 1.0, -1.0, 0.1, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 6.0, 7.0, 20.0, -20.0, 88.0, -88.0, 89.0, 90.0,
    -105.0, 128.0, 129.0, -149.0, -151.0, 1e-45, -1e-45, 1e-39, 1e-38, -1e-38, 1e-20, 1e30, -1e30, 3.4e38, -3.4e38,
    16777215.0, 33554432.0, math.inf, -math.inf, math.nan,
])
# fmt: on


def loop(name: str, expression: str, result: str, *arguments: str) -> str:
    """A function of arrays that stores ``expression`` of elements ``a``, ``b`` of the argument types."""
    letters = "ab"[: len(arguments)]
    inputs = ", ".join(f"const {t} *__restrict {n}s" for t, n in zip(arguments, letters, strict=True))
    reads = " ".join(f"{t} {n} = {n}s[i];" for t, n in zip(arguments, letters, strict=True))
    return (
        f'extern "C" void {name}({inputs}, {result} *__restrict out, int64_t n) {{\n'
        f"    for (int64_t i = 0; i < n; i++) {{ {reads} out[i] = {expression}; }}\n}}\n"
    )


def loops() -> str:
    """One loop for each function and type under test."""
    parts = []
    for name in (*REAL, *EXACT, *ACTIVATIONS):
        parts.append(loop(f"{name}_float", f"fuse_{name}(a)", "float", "float"))
    for name in DOUBLE:
        parts.append(loop(f"{name}_double", f"fuse_{name}(a)", "double", "double"))
    for name, (parameters, _) in PARAMETRISED.items():
        parts.append(loop(f"{name}_float", f"fuse_{name}(a, {parameters})", "float", "float"))
    for name in TESTS:
        parts.append(loop(f"{name}_float", f"fuse_{name}(a)", "bool", "float"))
    for name in (*BINARY, "pow", "atan2"):
        parts.append(loop(f"{name}_float", f"fuse_{name}(a, b)", "float", "float", "float"))
    for integer in ("int8_t", "uint8_t", "int32_t"):
        for name in (*INTEGER, "pow"):
            parts.append(loop(f"{name}_{integer}", f"fuse_{name}(a, b)", integer, integer, integer))
    for source, target in CASTS:
        s, t = C_TYPES[source], C_TYPES[target]
        parts.append(loop(f"cast_{s}_{t}", f"fuse_cast<{t}>(a)", t, s))
    for half in ("bf16", "f16"):
        parts.append(loop(f"to_{half}", f"fuse_to_{half}(a)", f"fuse_{half}", "float"))
        parts.append(loop(f"from_{half}", "fuse_to_float(a)", "float", f"fuse_{half}"))
        parts.append(loop(f"round_{half}", f"fuse_round_{half}(a)", "float", "float"))
    return "".join(parts)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return compiler.build(prelude() + loops(), flags=("-lm",))


def call(function: Callable[..., object], result: torch.dtype, *arguments: Tensor) -> Tensor:
    """Run a compiled loop over contiguous tensors of one size."""
    out = torch.empty(arguments[0].shape, dtype=result)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*arguments, out)]
    function(*pointers, ctypes.c_int64(out.numel()))
    return out


def activation(name: str) -> Function:
    return ACTIVATIONS[name] if name in ACTIVATIONS else PARAMETRISED[name][1]


def any_floats(count: int) -> Tensor:
    """Floats of uniformly random bits: every exponent, subnormal numbers, infinities and quiet NaN."""
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32).view(torch.float32) * 1


def samples() -> Tensor:
    """Random bits, the ranges where functions bend, and every special value."""
    torch.manual_seed(0)
    ranges = [torch.empty(150_000).uniform_(-bound, bound) for bound in (0.01, 1.0, 4.0, 20.0, 110.0, 1e4)]
    near_one = torch.empty(150_000).uniform_(0.5, 2.0)
    return torch.cat([any_floats(500_000), *ranges, near_one, SPECIAL])


def worst_ulps(got: Tensor, exact: Tensor) -> float:
    """The largest error of float32 results in units of the last place of the exact float64 ones.

    Infinite where one side is NaN or infinite and the correctly rounded other side is not.
    """
    rounded = exact.float()
    spacing = (rounded.abs().nextafter(torch.tensor(math.inf)) - rounded.abs()).double()
    spacing = spacing.where(spacing.isfinite(), 2.0**104)
    error = ((got.double() - exact).abs() / spacing).nan_to_num(math.inf, math.inf)
    agree = (got.isnan() & exact.isnan()) | ((got == rounded) & ~rounded.isfinite())
    return float(error.where(~agree, 0.0).max())


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Equal values, signs of zeros and places of NaN."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    if got.is_floating_point():
        real = ~expected.isnan()
        assert torch.equal(got.signbit()[real], expected.signbit()[real])


@pytest.mark.sampled
@pytest.mark.parametrize("name", REAL)
def test_float_functions_are_within_two_ulps_of_float64(library: ctypes.CDLL, name: str) -> None:
    x = samples()
    assert worst_ulps(call(library[f"{name}_float"], torch.float32, x), REAL[name](x.double())) <= 2


@pytest.mark.parametrize("name", REAL)
def test_signs_infinities_and_nans_are_those_of_eager(library: ctypes.CDLL, name: str) -> None:
    got, expected = call(library[f"{name}_float"], torch.float32, SPECIAL), REAL[name](SPECIAL.double()).float()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf(), expected.isinf())
    real = ~expected.isnan()
    assert torch.equal(got.signbit()[real], expected.signbit()[real])


@pytest.mark.parametrize("name", ["pow", "atan2"])
def test_functions_of_two_floats_are_within_two_ulps_of_float64(library: ctypes.CDLL, name: str) -> None:
    torch.manual_seed(0)
    table = torch.cartesian_prod(SPECIAL, SPECIAL)
    bits = any_floats(400_000).view(2, -1)
    plain = torch.empty(2, 200_000).uniform_(-30, 30)
    whole = torch.stack([plain[0], plain[1].round()])
    a, b = torch.cat([table.T, bits, plain, plain.abs(), whole], dim=1).contiguous()
    got = call(library[f"{name}_float"], torch.float32, a, b)
    exact = getattr(torch, name)(a.double(), b.double())
    assert worst_ulps(got, exact) <= 2
    real = ~exact.isnan()
    assert torch.equal(got.signbit()[real], exact.signbit()[real])


@pytest.mark.skipif(np.finfo(np.longdouble).nmant <= 52, reason="long double is no wider than double here")
@pytest.mark.parametrize("name", DOUBLE)
def test_double_functions_are_within_two_ulps_of_long_double(library: ctypes.CDLL, name: str) -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**64, 60_000, dtype=np.uint64).view(np.float64)
    x = np.concatenate([bits, *(random.uniform(-b, b, 20_000) for b in (0.01, 2.0, 40.0, 750.0)), SPECIAL.double()])
    got = call(library[f"{name}_double"], torch.float64, torch.from_numpy(x)).numpy()
    with np.errstate(all="ignore"):
        exact = DOUBLE[name](x.astype(np.longdouble))
        rounded = exact.astype(np.float64)
        error = np.abs(got - exact) / np.spacing(np.abs(rounded)).astype(np.longdouble)
    agree = (np.isnan(got) & np.isnan(exact)) | ((got == rounded) & ~np.isfinite(rounded))
    assert np.all(agree | (error <= 2))
    assert np.array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(rounded)[~np.isnan(got)])


@pytest.mark.parametrize("name", EXACT)
def test_exact_functions_give_the_bits_of_eager(library: ctypes.CDLL, name: str) -> None:
    x = samples()
    assert_same_bits(call(library[f"{name}_float"], torch.float32, x), EXACT[name](x))


@pytest.mark.parametrize("name", TESTS)
def test_questions_about_floats_have_the_answers_of_eager(library: ctypes.CDLL, name: str) -> None:
    x = samples()
    assert torch.equal(call(library[f"{name}_float"], torch.bool, x), TESTS[name](x))


@pytest.mark.parametrize("name", [*ACTIVATIONS, *PARAMETRISED])
def test_activations_are_as_close_to_float64_as_eager(library: ctypes.CDLL, name: str) -> None:
    reference = activation(name)
    x = torch.cat([torch.empty(500_000).uniform_(-100, 100), torch.empty(500_000).uniform_(-5, 5)])
    exact = reference(x.double())
    allowed = 2 * (reference(x).double() - exact).abs().max() + 1e-7
    assert (call(library[f"{name}_float"], torch.float32, x).double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("name", [*ACTIVATIONS, *PARAMETRISED])
def test_activations_of_special_values_are_those_of_eager(library: ctypes.CDLL, name: str) -> None:
    reference = activation(name)
    got = call(library[f"{name}_float"], torch.float32, SPECIAL)
    # In float64: gelu in float32 is oneDNN's on some machines, which makes NaN of infinity.
    torch.testing.assert_close(got, reference(SPECIAL.double()).float(), rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("name", BINARY)
def test_choices_and_divisions_of_floats_give_exact_results(library: ctypes.CDLL, name: str) -> None:
    torch.manual_seed(0)
    table = torch.cartesian_prod(SPECIAL, SPECIAL)
    plain = torch.empty(2, 100_000).uniform_(-30, 30)
    whole = plain.round()
    a, b = torch.cat([table.T, any_floats(100_000).view(2, -1), plain, whole], dim=1).contiguous()
    # In float64 the remainders are exact; eager's vectorised fmod in float32 gives NaN where the quotient overflows.
    exact = BINARY[name](a, b) if name == "floor_divide" else BINARY[name](a.double(), b.double()).float()
    got = call(library[f"{name}_float"], torch.float32, a, b)
    torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("name", [*INTEGER, "pow"])
def test_integer_arithmetic_gives_eagers_value_for_every_pair_of_bytes(
    library: ctypes.CDLL, name: str, dtype: torch.dtype
) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    a, b = (side.contiguous() for side in torch.cartesian_prod(every, every).T)
    if "divide" in name or name in ("remainder", "fmod"):
        a, b = a[b != 0], b[b != 0]  # eager raises
    got = call(library[f"{name}_{C_TYPES[dtype]}"], dtype, a, b)
    assert torch.equal(got, INTEGER.get(name, torch.pow)(a, b))


@pytest.mark.parametrize("name", ["floor_divide", "trunc_divide", "remainder", "fmod"])
def test_division_of_the_smallest_integer_does_not_trap(library: ctypes.CDLL, name: str) -> None:
    a = torch.tensor([-(2**31), -(2**31), 2**31 - 1, 5, 0], dtype=torch.int32)
    b = torch.tensor([-1, 0, -1, 0, 0], dtype=torch.int32)
    got = call(library[f"{name}_int32_t"], torch.int32, a, b)
    assert got[:3:2].tolist() == ([-(2**31), 1 - 2**31] if "divide" in name else [0, 0])


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts_give_the_numbers_of_eager(library: ctypes.CDLL, source: torch.dtype, target: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 0.3, -0.3, 1.0, -1.0, 2.9, -2.9, 127.0, -128.0, 126.5, 100.0])
    x = values.to(source)
    if source is torch.float32 and target is torch.bool:
        x = torch.cat([x, SPECIAL])
    got = call(library[f"cast_{C_TYPES[source]}_{C_TYPES[target]}"], target, x)
    assert torch.equal(got, x.to(target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_becomes_the_same_float_as_in_eager(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    got = call(library["from_bf16" if dtype is torch.bfloat16 else "from_f16"], torch.float32, halves)
    assert_same_bits(got, halves.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floats_round_to_the_same_half_as_in_eager(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    name = "bf16" if dtype is torch.bfloat16 else "f16"
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    between = ((halves.double() + halves.roll(-1).double()) / 2).float()  # ties, where neighbours are adjacent
    infinity = torch.tensor(math.inf)
    x = torch.cat([samples(), halves, between, between.nextafter(infinity), between.nextafter(-infinity)])
    assert_same_bits(call(library[f"to_{name}"], dtype, x).float(), x.to(dtype).float())
    assert_same_bits(call(library[f"round_{name}"], torch.float32, x), x.to(dtype).float())


def test_a_nan_becomes_the_canonical_half(library: ctypes.CDLL) -> None:
    payloads = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7FA12345], dtype=torch.int32).view(torch.float32)
    assert call(library["to_bf16"], torch.bfloat16, payloads).view(torch.int16).tolist() == [0x7FC0] * 4
    assert call(library["to_f16"], torch.float16, payloads).view(torch.int16).tolist() == [0x7E00] * 4


def assembly(source: str) -> dict[str, str]:
    """The assembly of each ``extern "C"`` function, compiled with the options that kernels get."""
    found = toolchain.find()
    options = [o for o in toolchain.REQUIRED_OPTIONS if o != "-shared"]
    command = [*found.command, *options, *toolchain.tuning_options(found), "-S", "-x", "c++", "-", "-o", "-"]
    text = subprocess.run(command, input=source, capture_output=True, text=True, check=True, timeout=60).stdout
    pieces = re.split(r"^_?(\w+):\s*(?:[#/@].*)?$", text, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


HOT = ["exp", "tanh", "sigmoid", "erf", "log", "log1p", "expm1", "sin", "pow"]


@pytest.fixture(scope="module")
def hot_assembly() -> dict[str, str]:
    parts = [loop(name, f"fuse_{name}(a{', 0.7f' * (name == 'pow')})", "float", "float") for name in HOT]
    for half in ("bf16", "f16"):
        parts.append(loop(f"to_{half}", f"fuse_to_{half}(a)", f"fuse_{half}", "float"))
        parts.append(loop(f"from_{half}", "fuse_to_float(a)", "float", f"fuse_{half}"))
    functions = assembly(prelude() + "".join(parts))
    if "fmaf" in functions["exp"]:
        pytest.skip("this processor has no fused multiply-add: it is a library call, right but slow")
    return functions


@pytest.mark.parametrize("name", [*HOT, "to_bf16", "from_bf16", "to_f16", "from_f16"])
def test_loops_run_on_whole_vectors_and_call_nothing(hot_assembly: dict[str, str], name: str) -> None:
    packed = r"\bv?(?:mul|add|sub|fm\w+)p[sd]\b|\bv?p(?:add|sll|srl|or)[wdq]\b|\.(?:4s|2d|8h)\b|\bz\d+\.[sdh]\b"
    body = hot_assembly[name]
    assert re.search(packed, body)
    assert not re.search(r"^\s+(?:call\w*|bl)\s", body, re.MULTILINE)
