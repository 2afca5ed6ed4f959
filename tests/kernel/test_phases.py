"""Loops with long bodies as short loops: the same bits, whatever is cut where."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fuse.check.oracle import check
from fuse.kernel.cpu import phases
from fuse.kernel.cpu.emit import emit
from fuse.kernel.cpu.phases import in_phases
from fuse.kernel.ir import For, KernelBody, Scope, Statement, Store
from tests.kernel.python_target import run
from tests.kernel.test_python_target import CASES, Function, loops_of


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def loops_in(statements: tuple[Statement, ...]) -> Iterator[For]:
    for statement in statements:
        if isinstance(statement, For):
            yield statement
        if isinstance(statement, (For, Scope)):
            yield from loops_in(statement.body)


def parted(body: KernelBody, short: int, block: int) -> KernelBody:
    """A body with each loop in parts that can be."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("SHORT", short), ("BLOCK", block), ("LONG_BODY", 0)):
            patched.setattr(phases, name, value)
        return KernelBody(body.inputs, body.outputs, tuple(in_phases(body.statements)), body.lines)


def results_of(body: KernelBody, inputs: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    out = [torch.full_like(result, 7) for result in results]
    assert run(body, [*inputs, *out])
    return out


@given(name=st.sampled_from(sorted(CASES)), short=st.sampled_from([1, 3, 20]), block=st.sampled_from([1, 2, 5, 64]))
@settings(max_examples=60, deadline=None)
def test_parts_compute_the_same_bits(name: str, short: int, block: int) -> None:
    function, *args = CASES[name]
    body, inputs = loops_of(function, *args)
    results = torch.utils._pytree.tree_leaves(function(*args))
    whole = results_of(body, inputs, results)
    for mine, theirs in zip(results_of(parted(body, short, block), inputs, results), whole, strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        assert torch.equal(mine.isnan(), theirs.isnan())


@given(
    steps=st.lists(st.sampled_from(["exp", "cut", "join", "truth", "int", "again"]), min_size=1, max_size=12),
    short=st.integers(1, 40),
    block=st.integers(1, 9),
    count=st.integers(1, 20),
)
@settings(max_examples=80, deadline=None)
def test_random_chains_compute_the_same_bits(steps: list[str], short: int, block: int, count: int) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        known = [x]
        for step in steps:
            last = known[-1]
            made: dict[str, Callable[[], Tensor]] = {
                "exp": lambda last=last: torch.exp(-last.abs()),
                "cut": lambda last=last: last.clamp(-1, 0.5) * y,
                "join": lambda last=last: last + known[len(known) // 2],
                "truth": lambda last=last: torch.where((last > y) & (known[0] < 1), last, y),
                "int": lambda last=last: (last * 3).to(torch.int64).remainder(3) + last,
                "again": lambda last=last: last * x,
            }
            known.append(made[step]())
        return known[-1], known[len(known) // 2] > 0

    x, y = torch.randn(count), torch.randn(count)
    body, inputs = loops_of(function, x, y)
    results = list(function(x, y))
    whole = results_of(body, inputs, results)
    for mine, theirs in zip(results_of(parted(body, short, block), inputs, results), whole, strict=True):
        assert torch.equal(mine, theirs)


def test_an_output_may_lie_in_the_memory_of_an_input() -> None:
    x, y = torch.randn(9), torch.randn(9)
    body, inputs = loops_of(lambda x, y: (torch.exp(x) + y, torch.exp(x) * y * torch.exp(y)), x, y)
    apart = [torch.empty(9), torch.empty(9)]
    assert run(body, [*inputs, *apart])
    body = parted(body, 1, 4)
    a, b = inputs[0].clone(), inputs[1].clone()
    assert run(body, [a, b, a, b])
    assert torch.equal(a, apart[0])
    assert torch.equal(b, apart[1])
    for loop in loops_in(body.statements):
        stored = [isinstance(s, Store) and s.buffer.role == "output" for s in loop.body]
        assert any(stored) <= (loop is list(loops_in(body.statements))[-1])


def chain(length: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        for number in range(length):
            x = torch.exp(-x * x) * (0.5 + 0.01 * number)
        return (x,)

    return function


def test_arrays_are_used_again_and_bodies_are_short() -> None:
    body, _ = loops_of(chain(40), torch.randn(512))
    (whole,) = (loop for loop in loops_in(body.statements) if loop.kind == "vector")
    assert sum(map(phases.weight, whole.body)) > 600
    text = emit(KernelBody(body.inputs, body.outputs, tuple(in_phases(body.statements))), "chained")
    assert "fuse_kept0" in text
    assert "fuse_kept3" not in text
    inner = [loop for loop in loops_in(tuple(in_phases(body.statements))) if loop.kind == "vector"]
    assert len(inner) > 20
    assert all(sum(map(phases.weight, loop.body)) <= 2 * phases.SHORT for loop in inner)


def test_short_chains_short_rows_and_reductions_stay_whole() -> None:
    for function, x in (
        (chain(2), torch.randn(512)),
        (chain(6), torch.randn(63)),
        (lambda x: (chain(6)(x)[0].sum(),), torch.randn(512)),
    ):
        body, _ = loops_of(function, x)
        assert tuple(in_phases(body.statements)) == body.statements


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("count", [64, 255, 256, 257, 1000])
def test_compiled_kernels_are_right(dtype: torch.dtype, count: int) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        for number in range(12):
            x = torch.where(x > y, x - number, x * 2) + (torch.sin(x).to(dtype) if number % 3 == 0 else y)
        return x

    x = (torch.randn(3, count) * 3).to(dtype)
    report = check(Function(function), (x, x.flip(1).contiguous()))
    assert report.passed, report
    assert report.regions == 1


def test_what_is_written_to_an_input_is_read_before() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = chain(6)(x)[0] + x
            x.copy_(y)
            return y.t()

    report = check(InPlace(), (torch.randn(7, 300),))
    assert report.passed, report
