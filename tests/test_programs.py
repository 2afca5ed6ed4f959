"""Random small models, fused and held to eager's values, layouts, aliases, mutations and launches.

A program is Python text, drawn line by line and run as it is drawn, so that only lines that eager accepts stay in it
and a failure prints a model that can be pasted. ``FUSE_PROGRAMS=2000 pytest tests/test_programs.py`` looks longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor, nn

from fuse.check.oracle import check

EXAMPLES = int(os.environ.get("FUSE_PROGRAMS", "60"))
LARGEST = 1e3  # values beyond would drown an error elsewhere, or overflow in half precision
MOST_ELEMENTS = 4096

UNARY = (
    "{a}.tanh()", "{a}.sigmoid()", "{a}.relu()", "-{a}", "({a} * 0.25).exp()", "{a} * 2", "{a} + 0.5", "1 - {a}",
    "({a}.abs() + 0.5).rsqrt()", "({a}.abs() + 1).log()", "torch.nn.functional.gelu({a})", "{a} ** 2",
    "{a}.clamp(-1, 1)", "torch.nn.functional.silu({a})", "{a}.cos()", "torch.where({a} > 0.3137, {a}, -0.5)",
    "{a}.masked_fill({a} < 0.1618, 0.0)",
)  # fmt: skip
BINARY = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b}.abs() + 1)", "torch.maximum({a}, {b})",
    "torch.lerp({a}, {b}, 0.3)", "torch.where({a} > 0.3137, {a}, {b})", "torch.addcmul({a}, {a}, {b}, value=0.5)",
)  # fmt: skip
REDUCTIONS = (
    "{a}.sum({d})", "{a}.mean({d}, keepdim=True)", "{a}.amax({d})", "{a}.softmax({d})", "{a}.log_softmax({d})",
    "{a}.logsumexp({d})", "{a}.var({d}, keepdim=True)", "{a}.sum()",
    "{a}.mean(({d}, 0)) if {a}.dim() > 1 and {d} not in (0, -{a}.dim()) else {a}.mean(0)",
    "torch.nn.functional.layer_norm({a}, {a}.shape[-1:])", "{a}.cumsum({d})", "{a}.max({d}).values",
    "{a}.norm(dim={d})",
)  # fmt: skip
VIEWS = (
    "{a}.transpose({d}, -1)", "{a}[..., {i}:]", "{a}[{i}:]", "{a}.select({d}, {i})", "{a}.unsqueeze({d})",
    "{a}.reshape(-1)", "{a}.flatten(0, 1)", "{a}.unflatten(-1, (2, -1))", "{a}[..., ::2]", "{a}.chunk(2, {d})[1]",
    "{a}.unbind({d})[0]", "{a}.squeeze({d})", "{a}.expand(3, *{a}.shape)", "{a}.movedim({d}, 0)",
    "{a}.diagonal(0, 0, 1)", "{a}.narrow({d}, {i}, 1)",
)  # fmt: skip
MOVEMENT = (
    "torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})", "torch.cat([{a}, {a}, {b}], {d})",
    "{a}.contiguous()", "{a}.clone()", "torch.cat([{a}[..., {i}:], {b}], -1)",
    "torch.nn.functional.pad({a}, (1, {i}))", "{a}.flip({d})", "{a}.roll({i}, {d})",
    "torch.stack([{a}, {a} * 2, {b} + 1], {d})", "{a}.repeat(2, *[1] * ({a}.dim() - 1))", "{a}.tril()",
    "{a} + torch.zeros_like({b})", "torch.cat([{a}, torch.ones_like({a})], {d})", "torch.zeros({a}.shape) + {a}",
    "{a}.mT.contiguous()", "{a}[torch.arange({a}.shape[0]).flip(0)]", "torch.full_like({a}, 0.5)",
    "torch.cat([{a}.t(), {b}.t()], {d})",
)  # fmt: skip
PRODUCTS = (
    "{a}.reshape({a}.shape[0], -1)[:, :3] @ self.narrow",
    "torch.nn.functional.linear({a}[..., :4], self.square, self.bias)", "{a}[..., :4] @ self.square.t()",
    "{a} @ {b}.mT", "{a} @ {b}",
)  # fmt: skip
WRITES = (
    "{a}.mul_(0.5)", "{a}.add_({b})", "{a}[{i}].copy_({b}[0])", "{a}[..., {i}] = {b}[..., 0]", "{a}[{i}:] = 0.5",
    "{a}.copy_({b})", "{a}[{i}] = {b}.sum()", "{a}[0].tanh_()", "{a}.zero_()", "{a}[:, {i}:] *= 2",
    "{a}.masked_fill_({a} < 0.1618, 0.25)", "{a}[..., ::2] = {b}[..., ::2]", "{a}.t().add_(1)",
)  # fmt: skip
LOOPS = (
    "for t in range({a}.shape[0]): {a}[t] = {a}[t - 1].tanh() * 0.5",
    "for t in range({a}.shape[0]): {a}[t] = {b}[min(t, {b}.shape[0] - 1)] + t",
    "for t in range({a}.shape[-1]): {a}[..., t] = {b}[..., 0].sigmoid() * t",
    "{v} = torch.stack([({a} * t).tanh() for t in range(3)], {d})",
    "{v} = torch.cat([h.tanh() + {a}.sum() for h in {a}.unbind(0)])",
    "{v} = torch.zeros({a}.shape).contiguous()",
    "{v} = {a}.new_zeros({a}.shape); {v}[0] = {a}[0]; {v}[1:] = {a}[1:].exp() * 0.1",
    "{v} = torch.empty({a}.shape); {v}[...] = 0.5",
    "{v} = {a}.split(1, {d})[-1] + {a}.split(1, {d})[0]",
    "{v} = {a}.max({d})[0] + {a}.min({d})[0]",
)
CASTS = (
    "{a}.double()",
    "{a}.float()",
    "({a} > 0.3137).float()",
    "({a} > 0.3137).to(torch.int64) + 1",
    "{a}.to(torch.{half})",
)
GROUPS = (UNARY, UNARY, BINARY, BINARY, REDUCTIONS, VIEWS, VIEWS, MOVEMENT, PRODUCTS, WRITES, LOOPS, CASTS)
SHAPES = ((4,), (3, 4), (4, 4), (2, 3, 4), (4, 1), (1, 4), (5, 6), (2, 1, 3, 4), (), (4, 17))


@dataclass(frozen=True)
class Drawn:
    """A model as text, its inputs, and the tolerance that its dtypes ask for."""

    text: str
    inputs: tuple[Tensor, ...]
    tolerance: float

    def __repr__(self) -> str:
        made = ", ".join(f"v{i}: {t.dtype}{tuple(t.shape)} strides {t.stride()}" for i, t in enumerate(self.inputs))
        return f"\n# {made}\n{self.text}"


class Model(nn.Module):
    """Runs the text of a program as its forward."""

    def __init__(self, text: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.square = nn.Parameter(torch.randn(4, 4, generator=generator) * 0.5)
        self.narrow = nn.Parameter(torch.randn(3, 4, generator=generator) * 0.5)
        self.bias = nn.Parameter(torch.randn(4, generator=generator))
        self.text = text

    def forward(self, *inputs: Tensor) -> Any:
        space = {"torch": torch, "self": self}
        exec(compiled(self.text), space)
        function: Callable[..., Any] = space["forward"]
        return function(*inputs)


def compiled(text: str) -> Any:
    return compile(text, "<program>", "exec")


@st.composite
def programs(draw: DrawFn) -> Drawn:
    inputs = [draw(tensors()) for _ in range(draw(st.integers(1, 3)))]
    model = Model("")
    values = {f"v{i}": _copied(t) for i, t in enumerate(inputs)}
    half = draw(st.sampled_from(["float16", "bfloat16"])) if draw(st.integers(0, 4)) == 0 else "float64"
    lines: list[str] = []
    for number in range(draw(st.integers(4, 30))):
        line = draw(lines_of(list(values), f"v{len(inputs) + number}", half))
        if _accepted(line, values, model):
            lines.append(line)
    results = draw(st.lists(st.sampled_from(list(values)), min_size=1, max_size=4, unique=True))
    distinct = {(t.data_ptr(), t.shape, t.stride()): name for name in results for t in [values[name]]}
    used = f"[{', '.join(distinct.values())}]"
    arguments = ", ".join(f"v{i}" for i in range(len(inputs)))
    text = "\n    ".join([f"def forward({arguments}):", "v = None", *lines, f"return {used}"])
    coarse = any(t.dtype in (torch.float16, torch.bfloat16) for t in values.values())
    return Drawn(text, tuple(inputs), 0.1 if coarse else 2e-4)


@st.composite
def tensors(draw: DrawFn) -> Tensor:
    """An input: mostly contiguous, sometimes transposed or with gaps."""
    shape = draw(st.sampled_from(SHAPES))
    layout = draw(st.sampled_from(["contiguous", "contiguous", "transposed", "gaps"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 5)))
    if layout == "transposed" and len(shape) > 1:
        return torch.randn(*shape[:-2], shape[-1], shape[-2], generator=generator).mT
    if layout == "gaps" and shape:
        return torch.randn(*shape[:-1], shape[-1] * 2, generator=generator)[..., ::2]
    return torch.randn(shape, generator=generator)


@st.composite
def lines_of(draw: DrawFn, names: list[str], new: str, half: str) -> str:
    """One line of a program; the names drawn are more often late ones."""
    template = draw(st.sampled_from(draw(st.sampled_from(GROUPS))))
    recent = st.sampled_from(names[-4:]) | st.sampled_from(names)
    line = template.format(
        a=draw(recent), b=draw(recent), d=draw(st.sampled_from([0, -1, 1])), i=draw(st.integers(0, 2)), v=new, half=half
    )
    is_statement = template in WRITES or template in LOOPS
    return line if is_statement else f"{new} = {line}"


def _copied(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride()).copy_(value)


def _accepted(line: str, values: dict[str, Tensor], model: Model) -> bool:
    """Run the line; undo what it wrote where eager refuses it, or where values grow large, many or not finite."""
    space: dict[str, Any] = {"torch": torch, "self": model, **values}
    before = {id(t): t.clone() for t in values.values()}
    try:
        with torch.no_grad():
            exec(line, space)
        made = {n: v for n, v in space.items() if n.startswith("v") and isinstance(v, Tensor)}
        good = all(_tame(t) for t in made.values())
    except (RuntimeError, IndexError, ValueError, TypeError):
        good = False
    if good:
        values.update(made)
        return True
    for tensor in values.values():
        if not any(s == 0 and e > 1 for s, e in zip(tensor.stride(), tensor.shape, strict=True)):
            tensor.copy_(before[id(tensor)])
    return False


def _tame(value: Tensor) -> bool:
    if not 0 < value.numel() <= MOST_ELEMENTS or value.dim() > 5:
        return False
    return bool(value.isfinite().all()) and value.abs().max().item() <= LARGEST


@given(programs())
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == 60,
    suppress_health_check=list(HealthCheck),
    database=None,
)
def test_a_random_program_runs_fused_as_eager_does(program):
    report = check(Model(program.text), program.inputs, atol=program.tolerance, rtol=program.tolerance)
    assert report.passed, f"{program}\n{report}"
