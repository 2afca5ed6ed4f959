"""Bodies written by hand, compiled and run: what each part of the kernel IR does."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from fuse.kernel.arithmetic.expressions import Variable, position
from fuse.kernel.arithmetic.index import Affine
from fuse.kernel.cpu.emit import emit
from fuse.kernel.cpu.prelude import prelude
from fuse.kernel.cpu.work import PARALLEL_WORK, is_parallel
from fuse.kernel.ir import (
    Accumulate,
    Accumulator,
    Buffer,
    Comment,
    Fail,
    For,
    Indirect,
    KernelBody,
    Let,
    Load,
    Scope,
    Store,
)
from fuse.runtime.cpu.compiler import build

AT_I, AT_J = Affine.of("i"), Affine.of("j")
A, B = Variable(torch.float32, "a"), Variable(torch.float32, "b")
X = Buffer("x", torch.float32, "input")
OUT = Buffer("out", torch.float32, "output")


def call(body: KernelBody, *tensors: Tensor) -> int:
    library = build(prelude() + emit(body, "kernel_by_hand"))
    pointers = [t.data_ptr() for t in tensors]
    status: int = library.kernel_by_hand((ctypes.c_void_p * len(pointers))(*pointers))
    return status


def test_a_vector_loop_loads_computes_and_stores() -> None:
    loop = For("i", 10, (Load("a", X, AT_I * 2), Let("b", A + 1), Store(OUT, AT_I, B)), "vector")
    x, out = torch.randn(20), torch.zeros(10)
    assert call(KernelBody((X,), (OUT,), (loop,), ("model.py:7  add",)), x, out) == 0
    assert torch.equal(out, x[::2] + 1)


def test_the_users_lines_stand_above_the_kernel() -> None:
    text = emit(KernelBody((X,), (OUT,), (Comment("nothing to do"),), ("model.py:7  add",)), "empty")
    assert text.startswith("// model.py:7  add\n")
    assert "    // nothing to do\n" in text


def test_a_guarded_load_does_not_touch_memory_where_the_guard_is_false() -> None:
    inside = Let("inside", position("i") < 1)
    body = (inside, Load("a", X, AT_I * 10**9, guard=inside.variable), Store(OUT, AT_I, A))
    x, out = torch.ones(1), torch.full((5,), 7.0)
    call(KernelBody((X,), (OUT,), (For("i", 5, body),)), x, out)
    assert out.tolist() == [1, 0, 0, 0, 0]


def test_an_indirect_load_looks_its_row_up() -> None:
    rows = Buffer("rows", torch.int64, "input")
    inner = For(
        "j",
        4,
        (Load("a", X, AT_J, (Indirect(Variable(torch.int64, "row"), 4, 5),)), Store(OUT, AT_I * 4 + AT_J, A)),
        "vector",
    )
    loop = For("i", 3, (Load("row", rows, AT_I), inner))
    x, positions, out = torch.randn(5, 4), torch.tensor([4, 0, 4]), torch.zeros(3, 4)
    call(KernelBody((X, rows), (OUT,), (loop,)), x, positions, out)
    assert torch.equal(out, x[positions])


def test_a_kernel_that_fails_says_so_and_writes_nothing() -> None:
    check = (Load("a", X, Affine()), Let("negative", A < 0), Fail("negative"))
    body = KernelBody((X,), (OUT,), (*check, Store(OUT, Affine(), A)))
    out = torch.full((1,), 7.0)
    assert call(body, torch.tensor([-1.0]), out) == 1
    assert out.item() == 7
    assert call(body, torch.tensor([2.0]), out) == 0
    assert out.item() == 2


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", torch.sum), ("prod", torch.prod), ("max", torch.amax), ("min", torch.amin)]
)
def test_accumulators_start_from_their_identity(op: str, expected: object) -> None:
    so_far = Accumulator("so_far", torch.float64, op)
    wide, result = Buffer("x", torch.float64, "input"), Buffer("out", torch.float64, "output")
    loop = For("i", 33, (Load("a", wide, AT_I), Accumulate(so_far, Variable(torch.float64, "a"))), "vector", (so_far,))
    x, out = torch.randn(33, dtype=torch.float64) - 5, torch.zeros(1, dtype=torch.float64)
    call(KernelBody((wide,), (result,), (so_far, loop, Store(result, Affine(), so_far.result))), x, out)
    torch.testing.assert_close(out[0], expected(x))


def test_scopes_side_by_side_may_use_the_same_names() -> None:
    scopes = tuple(Scope((Load("a", X, Affine((), k)), Store(OUT, Affine((), 1 - k), A))) for k in (0, 1))
    out = torch.zeros(2)
    call(KernelBody((X,), (OUT,), scopes), torch.tensor([1.0, 2.0]), out)
    assert out.tolist() == [2, 1]


def test_only_a_long_loop_asks_for_threads() -> None:
    def body(extent: int) -> KernelBody:
        return KernelBody((X,), (OUT,), (For("i", extent, (Load("a", X, AT_I), Store(OUT, AT_I, A)), "vector"),))

    assert not is_parallel(body(64))
    assert is_parallel(body(PARALLEL_WORK))
    assert "parallel for simd" in emit(body(PARALLEL_WORK), "long_one")


@pytest.mark.parametrize("count", [1, 15, 63, 64, 65, 127, 128, 200])
def test_truths_beside_numbers_are_stored_a_block_at_a_time_and_no_further(count: int) -> None:
    large, small = Buffer("large", torch.bool, "output"), Buffer("small", torch.bool, "output")
    first, last = position("j") * 0 + 3, position("j") * 0 + 3 + count
    loop = For(
        "i",
        count,
        (Load("a", X, AT_I), Store(OUT, AT_I, A + 1), Store(large, AT_I + 2, A > 1), Store(small, AT_I, A < -1)),
        "vector",
        bounds=(first, last),
    )
    text = emit(body := KernelBody((X,), (OUT, large, small), (For("j", 1, (loop,), "serial"),)), "kernel_by_hand")
    assert text.count("fuse_store_truths(") == 2
    x, out = torch.randn(count + 8), torch.zeros(count + 8)
    out_large, out_small = torch.ones(2, count + 8, dtype=torch.bool)
    assert call(body, x, out, out_large, out_small) == 0
    inside = slice(3, 3 + count)
    assert torch.equal(out_large[5 : 5 + count], x[inside] > 1)
    assert torch.equal(out_small[inside], x[inside] < -1)
    assert torch.equal(out[inside], x[inside] + 1)
    assert out_large[:5].all()
    assert out_large[5 + count :].all()
    assert out_small[:3].all()
    assert out_small[3 + count :].all()


def test_truths_made_of_truths_stay_bytes() -> None:
    mask, out = Buffer("mask", torch.bool, "input"), Buffer("out", torch.bool, "output")
    loop = For("i", 20, (Load("m", mask, AT_I), Store(out, AT_I, Variable(torch.bool, "m"))), "vector")
    assert "fuse_store_truths" not in emit(KernelBody((mask,), (out,), (loop,)), "kernel_by_hand")
