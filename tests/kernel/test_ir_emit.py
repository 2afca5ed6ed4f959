"""Bodies written by hand, compiled and run: what each part of the kernel IR does."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from fuse.kernel.emit import PARALLEL_WORK, emit, is_parallel
from fuse.kernel.index import Affine
from fuse.kernel.ir import (
    Accumulate,
    Accumulator,
    Barrier,
    Buffer,
    Comment,
    Contract,
    Declare,
    Fail,
    Indirect,
    KernelBody,
    Let,
    Load,
    Loop,
    Scope,
    Store,
)
from fuse.kernel.prelude import prelude
from fuse.runtime.compiler import build

AT_I, AT_J, AT_T = Affine.of("i"), Affine.of("j"), Affine.of("t")
X, Y = Buffer("x", "float", "input"), Buffer("y", "float", "input")
OUT = Buffer("out", "float", "output")


def call(body: KernelBody, *tensors: Tensor) -> int:
    library = build(prelude() + emit(body, "kernel_by_hand"))
    pointers = [t.data_ptr() for t in tensors]
    status: int = library.kernel_by_hand((ctypes.c_void_p * len(pointers))(*pointers))
    return status


def test_a_vector_loop_loads_computes_and_stores() -> None:
    loop = Loop(
        "i", 10, (Load("a", "float", X, AT_I * 2), Let("b", "float", "(a + 1.0f)"), Store(OUT, AT_I, "b")), "vector"
    )
    x, out = torch.randn(20), torch.zeros(10)
    assert call(KernelBody((X,), (OUT,), (loop,), ("model.py:7  add",)), x, out) == 0
    assert torch.equal(out, x[::2] + 1)


def test_the_users_lines_stand_above_the_kernel() -> None:
    text = emit(KernelBody((X,), (OUT,), (Comment("nothing to do"),), ("model.py:7  add",)), "empty")
    assert text.startswith("// model.py:7  add\n")
    assert "    // nothing to do\n" in text


def test_a_guarded_load_does_not_touch_memory_where_the_guard_is_false() -> None:
    body = (
        Let("inside", "bool", "i < 3", ("i",)),
        Load("a", "float", X, AT_I * 10**9, guard="inside"),
        Store(OUT, AT_I, "a"),
    )
    x, out = torch.ones(1), torch.full((5,), 7.0)
    body = (Let("inside", "bool", "i < 1", ("i",)), *body[1:])
    call(KernelBody((X,), (OUT,), (Loop("i", 5, body),)), x, out)
    assert out.tolist() == [1, 0, 0, 0, 0]


def test_an_indirect_load_looks_its_row_up() -> None:
    rows = Buffer("rows", "int64_t", "input")
    inner = Loop(
        "j", 4, (Load("a", "float", X, AT_J, (Indirect("row", 4, 5),)), Store(OUT, AT_I * 4 + AT_J, "a")), "vector"
    )
    loop = Loop("i", 3, (Load("row", "int64_t", rows, AT_I), inner))
    x, positions, out = torch.randn(5, 4), torch.tensor([4, 0, 4]), torch.zeros(3, 4)
    call(KernelBody((X, rows), (OUT,), (loop,)), x, positions, out)
    assert torch.equal(out, x[positions])


def test_a_kernel_that_fails_says_so_and_writes_nothing() -> None:
    check = (Load("a", "float", X, Affine()), Let("negative", "bool", "a < 0"), Fail("negative"))
    body = KernelBody((X,), (OUT,), (*check, Store(OUT, Affine(), "a")))
    out = torch.full((1,), 7.0)
    assert call(body, torch.tensor([-1.0]), out) == 1
    assert out.item() == 7
    assert call(body, torch.tensor([2.0]), out) == 0
    assert out.item() == 2


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", torch.sum), ("prod", torch.prod), ("max", torch.amax), ("min", torch.amin)]
)
def test_accumulators_start_from_their_identity(op: str, expected: object) -> None:
    so_far = Accumulator("so_far", "double", op)
    wide, result = Buffer("x", "double", "input"), Buffer("out", "double", "output")
    loop = Loop("i", 33, (Load("a", "double", wide, AT_I), Accumulate(so_far, "a")), "vector", (so_far,))
    x, out = torch.randn(33, dtype=torch.float64) - 5, torch.zeros(1, dtype=torch.float64)
    call(KernelBody((wide,), (result,), (so_far, loop, Store(result, Affine(), "so_far"))), x, out)
    torch.testing.assert_close(out[0], expected(x))


def test_scopes_side_by_side_may_use_the_same_names() -> None:
    scopes = tuple(Scope((Load("a", "float", X, Affine((), k)), Store(OUT, Affine((), 1 - k), "a"))) for k in (0, 1))
    out = torch.zeros(2)
    call(KernelBody((X,), (OUT,), scopes), torch.tensor([1.0, 2.0]), out)
    assert out.tolist() == [2, 1]


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 16, 1), (5, 48, 7), (6, 32, 16)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_contraction_multiplies_by_a_packed_operand(rows: int, columns: int, depth: int, accumulate: bool) -> None:
    left, right = torch.randn(rows, depth), torch.randn(depth, columns)
    packed = right.view(depth, columns // 16, 16).transpose(0, 1).contiguous()
    out = torch.randn(rows, columns)
    expected = left.double() @ right.double() + (out.double() if accumulate else 0)
    product = Contract(OUT, X, Y, rows, columns, depth, left_stride=depth, out_stride=columns, accumulate=accumulate)
    call(KernelBody((X, Y), (OUT,), (product,)), left, packed, out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_sequential_loop_carries_its_state_from_step_to_step() -> None:
    state = Buffer("state", "float", "carried", 8)
    start = Loop("i", 8, (Store(state, AT_I, "0.0f"),), "vector")
    update = Loop(
        "i", 8,
        (
            Load("h", "float", state, AT_I),
            Load("a", "float", X, AT_T * 8 + AT_I),
            Let("next", "float", "h * 0.5f + a"),
            Store(state, AT_I, "next"),
            Store(OUT, AT_T * 8 + AT_I, "next"),
        ),
        "vector",
    )  # fmt: skip
    x, out = torch.randn(6, 8), torch.zeros(6, 8)
    call(KernelBody((X,), (OUT,), (Declare(state), start, Loop("t", 6, (update,), "sequential"))), x, out)
    h, expected = torch.zeros(8), []
    for row in x:
        h = h * 0.5 + row
        expected.append(h)
    assert torch.equal(out, torch.stack(expected))


def shares(width: int, steps: int) -> Loop:
    """Each of four shares owns a part of the state, and reads what its neighbour wrote one step before."""
    other = Buffer("other", "float", "carried", 4 * width)
    state = Buffer("state", "float", "carried", 4 * width)
    mine, next_to = Affine.of("p") * width + AT_I, Affine(((("i"), -1), ("p", -width)), 4 * width - 1)
    neighbours, row = Load("h", "float", state, next_to), AT_T * (4 * width)
    step = (neighbours, Load("a", "float", X, row + mine), Store(other, mine, "h + a"))
    read = Loop("i", width, step, "vector")
    write = Loop(
        "i", width, (Load("h", "float", other, mine), Store(state, mine, "h"), Store(OUT, mine, "h")), "vector"
    )
    loop = Loop("t", steps, (read, Barrier(), write, Barrier()), "sequential")
    return Loop("p", 4, (loop,), "partition")


@pytest.mark.parametrize("width", [2, 500])
def test_shares_of_a_partition_wait_for_one_another_at_a_barrier(width: int) -> None:
    steps, total = 50, 4 * width
    buffers = tuple(Declare(Buffer(name, "float", "carried", total)) for name in ("state", "other"))
    start = Loop("i", total, (Store(Buffer("state", "float", "carried", total), AT_I, "0.0f"),), "vector")
    body = KernelBody((X,), (OUT,), (*buffers, start, shares(width, steps)))
    assert is_parallel(body) == (steps * total * 6 >= PARALLEL_WORK)
    x, out = torch.randn(steps, total), torch.zeros(total)
    call(body, x, out)
    h = torch.zeros(total)
    for row in x:
        h = h.flip(0) + row
    assert torch.equal(out, h)


def test_only_a_long_loop_asks_for_threads() -> None:
    def body(extent: int) -> KernelBody:
        return KernelBody(
            (X,), (OUT,), (Loop("i", extent, (Load("a", "float", X, AT_I), Store(OUT, AT_I, "a")), "vector"),)
        )

    assert not is_parallel(body(64))
    assert is_parallel(body(PARALLEL_WORK))
    assert "parallel for simd" in emit(body(PARALLEL_WORK), "long_one")
