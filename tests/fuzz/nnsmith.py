"""Random networks of NNSmith (arXiv:2207.13066), where it is installed: convolutions, pools, casts, mixed dtypes.

``pip install nnsmith`` brings the generator. Its graphs are sound by construction: a solver finds the sizes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fuse.check import oracle
from tests.fuzz.drawing import Draw, Inputs, Program, copies

MOST_ELEMENTS = 4096
NUDGES = 8
TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Network(Program):
    """A program whose model is a graph of NNSmith. ``text`` shows it."""

    graph: Any = None

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Instructions(self.graph).train(self.train)


def told_by_rounding(program: Program) -> bool:
    """Whether values a few roundings away have eager give others than it may: ``acos(cos(x))``, ``floor(x - x * y)``.

    NNSmith draws such networks. Where one differs from eager, that says nothing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return any(_moved(program, inputs) for inputs in program.calls)


def _moved(program: Program, inputs: Inputs) -> bool:
    first = _outcome(program, inputs, None)
    for seed in range(NUDGES):
        found = _outcome(program, inputs, torch.Generator().manual_seed(seed))
        for a, b in zip(first, found, strict=True):
            if not torch.allclose(a, b, rtol=program.tolerance, atol=program.tolerance, equal_nan=True):
                return True
    return False


def _outcome(program: Program, inputs: Inputs, nudges: torch.Generator | None) -> list[Tensor]:
    """The results of a call, and the gradients of its inputs where it is trained."""
    given, model = copies(inputs), program.model()
    assert isinstance(model, Instructions)
    model.nudges = nudges
    with torch.set_grad_enabled(program.train):
        returned = model(*given)
        results = [t.detach() for t in returned]
        if program.train:
            oracle._backward(returned)
            results += [t.grad for t in given if t.grad is not None]
    return [t if t.is_floating_point() or t.is_complex() else t.double() for t in results]


def _nudged(value: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor whose elements are a rounding of its largest one away."""
    if not value.is_floating_point() or not value.numel():
        return value
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
    largest = value.detach().nan_to_num(0, 0, 0).abs().max()
    return value + (noise * torch.finfo(value.dtype).eps * largest).to(value.dtype)


class Instructions(nn.Module):
    """Runs a graph of NNSmith, one instruction after the other. Results that nothing reads are returned."""

    def __init__(self, graph: Any) -> None:
        from nnsmith.materialize.torch.symbolnet import SymbolNet

        super().__init__()
        net = SymbolNet(graph)
        self.calls = nn.ModuleList(_called(call) for call, *_ in net.instructions)
        self.names = [(tuple(given), tuple(made)) for _, given, made, _ in net.instructions]
        self.inputs = tuple(graph.input_var())
        self.results = tuple(graph.leaf_var())
        self.nudges: torch.Generator | None = None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.inputs, inputs, strict=True))
        for call, (given, made) in zip(self.calls, self.names, strict=True):
            result = call(*[values[name] for name in given])
            results = result if isinstance(result, (list, tuple)) else [result]
            if self.nudges is not None:
                results = [_nudged(t, self.nudges) for t in results]
            values.update(zip(made, results, strict=True))
        return tuple(values[name] for name in self.results)


class _Function(nn.Module):
    """A function as a module, so that two models of one graph hold equal things."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def _called(call: Callable[..., Any]) -> nn.Module:
    return call if isinstance(call, nn.Module) else _Function(call)


def program(seed: int) -> Program:
    """The network of a seed: 1 to 20 operators, one call or two of the same sizes, trained where its inputs are floats.

    Raises:
        ModuleNotFoundError: NNSmith is not installed.
    """
    from nnsmith.error import ConstraintError, InternalError
    from nnsmith.graph_gen import model_gen

    draw = Draw(seed)
    operators, size = _operators(), draw.number(1, 20)
    for attempt in range(100):
        with contextlib.suppress(ConstraintError, InternalError, RuntimeError, AssertionError):
            generator = model_gen(
                opset=operators, method="symbolic-cinit", seed=seed + 1_000_003 * attempt, max_nodes=size,
                timeout_ms=10_000, max_elem_per_tensor=MOST_ELEMENTS,
            )  # fmt: skip
            graph = generator.make_concrete()
            break
    else:
        raise RuntimeError(f"NNSmith finds no graph for seed {seed}")
    torch.manual_seed(seed)
    kinds = [graph.vars[name] for name in graph.input_var()]
    floating = [t.dtype.torch() for t in graph.vars.values() if t.dtype.torch().is_floating_point]
    train = bool(floating) and all(dtype in (torch.float32, torch.float64) for dtype in floating) and draw.once_in(3)
    calls = tuple(_inputs(draw, kinds, train) for _ in range(draw.number(1, 2)))
    tolerance = max([TOLERANCES.get(dtype, 1e-4) for dtype in floating], default=1e-4)
    return Network(seed, graph.pretty(), calls, tolerance, train, shared_out=draw.once_in(3), graph=graph)


@functools.cache
def _operators() -> list[Any]:
    """What of NNSmith's operators runs here with which dtypes. It tries them, and says so at length."""
    from nnsmith.abstract.extension import activate_ext
    from nnsmith.materialize import Model
    from nnsmith.narrow_spec import auto_opset

    with contextlib.redirect_stdout(io.StringIO()):
        found = auto_opset(Model.init("torch", backend_target="cpu"), None, vulops=True)
    activate_ext(opset=found, factory=None)
    return list(found)


def _inputs(draw: Draw, kinds: list[Any], train: bool) -> Inputs:
    base, spread = draw.pick((0.0, 0.0, 2.0, 5.0)), draw.pick((1.0, 4.0))
    made = []
    for kind in kinds:
        dtype = kind.dtype.torch()
        value = base + (torch.rand(kind.shape, dtype=torch.float64) - 0.5) * spread
        if dtype == torch.bool:
            made.append(value > base)
        elif dtype.is_floating_point or dtype.is_complex:
            made.append(value.to(dtype).requires_grad_(train and dtype.is_floating_point))
        else:
            made.append(value.round().to(dtype))
    return tuple(made)
