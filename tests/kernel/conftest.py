"""What the tests of kernels share: lower functions, compile all of them in one go, run them, and hold them to eager."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fuse.check.compare import compare
from fuse.check.inputs import widened
from fuse.graph.capture import capture
from fuse.kernel.cpu.prelude import prelude
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.lower import lower
from fuse.kernel.recipes.reading import computation_of
from fuse.runtime.cpu.compiler import build
from tests.kernel.evaluating import NotEvaluated, evaluated, multiplies_and_adds

Function = Callable[..., Any]
RED_ZONE = 64  # bytes before and after every result that a kernel must not touch
PATTERN = 0xA5


class Returned(nn.Module):
    """A function as a module with a flat tuple of results."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        return tuple(pytree.tree_leaves(self.function(*args)))


@dataclass(frozen=True)
class Case:
    """A function lowered as one region, not yet compiled."""

    function: Function
    args: tuple[Any, ...]
    graph: GraphModule
    kernel: Kernel | Declined

    @property
    def inputs(self) -> list[Tensor]:
        leaves = pytree.tree_leaves(self.args)
        specs = self.graph.meta["signature"].inputs
        return [leaves[s.index] if s.kind == "argument" else s.value for s in specs]


@dataclass(frozen=True)
class Ran:
    """A kernel's results beside eager's; no results where the function was declined."""

    case: Case
    kernel: Kernel | Declined
    results: tuple[Tensor, ...]
    eager: tuple[Tensor, ...]

    def check(self, exact: bool = False) -> None:
        """dtype, shape, stride, and values: equal bits when ``exact``, else as close to float64 as eager is.

        The same is asked of what the recipes say, evaluated without any loops.
        """
        assert isinstance(self.kernel, Kernel), self.kernel
        reference = None if exact else _reference(self.case)
        self._check_recipes(exact, reference)
        for position, (mine, theirs) in enumerate(zip(self.results, self.eager, strict=True)):
            assert (mine.dtype, mine.shape, _steps(mine)) == (theirs.dtype, theirs.shape, _steps(theirs))
            if exact:
                assert torch.equal(bits(mine), bits(theirs)), f"{mine}\ninstead of\n{theirs}\n{self.kernel.source}"
            else:
                wide = reference[position] if reference else None
                problem = compare("", mine, theirs, wide).problem
                assert not problem, f"{problem}\n{self.kernel.source}"

    def _check_recipes(self, exact: bool, reference: tuple[Tensor, ...] | None) -> None:
        computation = computation_of(self.case.graph)
        try:
            own = evaluated(computation, self.case.inputs)
            wide = evaluated(computation, self.case.inputs, widened=True)
        except NotEvaluated:
            return
        for position, (mine, theirs) in enumerate(zip(own, self.eager, strict=True)):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            if exact and not multiplies_and_adds(computation):
                assert torch.equal(bits(mine), bits(theirs)), f"the recipe says {mine}\ninstead of\n{theirs}"
                continue
            for result in (mine, wide[position]):
                given = reference[position] if reference else None
                problem = compare("", _like(result, theirs), theirs, given).problem
                assert not problem, f"the recipe: {problem}"


def _like(value: Tensor, other: Tensor) -> Tensor:
    """``value`` with the dtype and strides of ``other``."""
    return torch.empty_strided(other.shape, other.stride(), dtype=other.dtype).copy_(value)


def _steps(value: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element: the others lead nowhere."""
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]


def bits(value: Tensor) -> Tensor:
    """The tensor as integers, so that 0.0 differs from -0.0; every NaN is the same NaN."""
    if not value.is_floating_point():
        return value
    value = torch.where(value.isnan(), torch.full_like(value, torch.nan), value)
    return value.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])


def _reference(case: Case) -> tuple[Tensor, ...] | None:
    """The function in float64; None where its arguments hold no floats to widen or it fixes a dtype."""
    try:
        args = pytree.tree_map_only(Tensor, widened, copy.deepcopy(case.args))
        results = Returned(case.function)(*args)
    except Exception:
        return None
    return results


@pytest.fixture(scope="session")
def lowered() -> Callable[..., Case]:
    """``lowered(function, *args)``: capture a function of tensors and lower all of it as one region."""

    def run(function: Function, *args: Any) -> Case:
        graph = capture(Returned(function), args)
        return Case(function, args, graph, lower(graph))

    return run


@pytest.fixture(scope="session")
def run_together(lowered: Callable[..., Case]) -> Callable[..., dict[str, Ran]]:
    """``run_together({name: (function, *args)})``: results of every function, from one library."""

    def run(functions: Mapping[str, Sequence[Any]]) -> dict[str, Ran]:
        cases = {name: lowered(*call) for name, call in functions.items()}
        kernels: dict[str, Kernel] = {}
        for case in cases.values():
            if isinstance(case.kernel, Kernel):
                kernels[case.kernel.name] = case.kernel
        library = build("\n".join([prelude(), *(k.source for k in kernels.values())]))
        return {name: _ran(library, case) for name, case in cases.items()}

    return run


@pytest.fixture(scope="session")
def run(run_together: Callable[..., dict[str, Ran]]) -> Callable[..., Ran]:
    """``run(function, *args)``: one function through its kernel."""
    return lambda function, *args: run_together({"it": (function, *args)})["it"]


def _ran(library: ctypes.CDLL, case: Case) -> Ran:
    kernel = case.kernel
    if isinstance(kernel, Declined):
        return Ran(case, kernel, (), ())
    before = [value.clone() for value in case.inputs]
    results = _call(library, kernel, case, {})
    for value, old in zip(case.inputs, before, strict=True):
        assert torch.equal(bits(value), bits(old)), "a kernel wrote to its input"
    for read, written in kernel.in_place:
        again = _call(library, kernel, case, {written: read})
        for one, other in zip(again, results, strict=True):
            assert torch.equal(bits(one), bits(other)), f"differs when result {written} lies in input {read}"
    with torch.no_grad():
        eager = Returned(case.function)(*copy.deepcopy(case.args))
    return Ran(case, kernel, results, eager)


def _call(library: ctypes.CDLL, kernel: Kernel, case: Case, in_place: Mapping[int, int]) -> tuple[Tensor, ...]:
    """Call the kernel on copies of the inputs; ``in_place`` maps results to inputs whose memory they take."""
    inputs = [_copied(value) for value in case.inputs]
    output = next(iter(reversed(case.graph.graph.nodes)))
    memory, results = [], []
    for position, node in enumerate(output.args[0]):
        held = node.meta["val"]
        if position in in_place:
            source = inputs[in_place[position]]
            bytes_of = torch.tensor([], dtype=held.dtype).set_(source.untyped_storage(), 0, held.shape, held.stride())
            results.append(bytes_of)
            continue
        extent = 1 + sum((size - 1) * stride for size, stride in zip(held.shape, held.stride(), strict=True))
        zone = torch.full((extent * held.dtype.itemsize + 2 * RED_ZONE,), PATTERN, dtype=torch.uint8)
        memory.append(zone)
        inner = zone[RED_ZONE : len(zone) - RED_ZONE].view(held.dtype)
        results.append(inner.as_strided(held.shape, held.stride(), inner.storage_offset()))
    pointers = [t.data_ptr() for t in (*inputs, *results)]
    status = getattr(library, kernel.name)((ctypes.c_void_p * len(pointers))(*pointers))
    assert status == 0, "an index is out of range"
    for zone in memory:
        assert (zone[:RED_ZONE] == PATTERN).all(), "a kernel wrote before a result"
        assert (zone[-RED_ZONE:] == PATTERN).all(), "a kernel wrote behind a result"
    return tuple(results)


def _copied(value: Tensor) -> Tensor:
    """A copy with the same strides; the tensor itself where elements share memory."""
    if any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
