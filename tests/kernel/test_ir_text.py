"""The kernel IR as text: how each statement reads."""

from __future__ import annotations

import pytest
import torch

from fuse.kernel.arithmetic.expressions import Variable, position
from fuse.kernel.arithmetic.index import Affine
from fuse.kernel.ir import (
    Accumulate,
    Accumulator,
    Buffer,
    Comment,
    Declare,
    Fail,
    For,
    Indirect,
    KernelBody,
    Let,
    Load,
    Pointer,
    Rank,
    Scope,
    Solve,
    Statement,
    Store,
)
from fuse.kernel.ir_text import text_of_body

X, OUT = Buffer("x", torch.float32, "input"), Buffer("out", torch.bool, "output")
I, A = Affine.of("i"), Variable(torch.float32, "a")  # noqa: E741  (the loop variable)
FIRST, LAST = Variable(torch.int64, "first"), Variable(torch.int64, "last")
TOTAL = Accumulator("total", torch.float32, "sum")
BEST = Accumulator("best", torch.float32, "argmax")
STATEMENTS: dict[str, Statement] = {
    "a = load x[2 * i + 1]": Load("a", X, I * 2 + 1),
    "a = load x[i + 4 * row]": Load("a", X, I, (Indirect(Variable(torch.int64, "row"), 4, 5),)),
    "a = load x[i] if i < 3 else 0": Load("a", X, I, guard=position("i") < 3),
    "b = (a + 1.0) * a": Let("b", (A + 1) * A),
    "sums = tile from element 3 * i on": Pointer("sums", "tile", I * 3),
    "store out[i] = a > 0.0": Store(OUT, I, A > 0),
    "total = 0.0": TOTAL,
    "total = total + a": Accumulate(TOTAL, A),
    "best = 0.0, best_at = -1": BEST,
    "best, best_at = a, i if best_at < 0 || a > best || a != a && best == best": Accumulate(BEST, A, I),
    "memory held: 64 of float64": Declare(Buffer("held", torch.float64, "scratch", 64)),
    "best = positions of the largest of row, in order": Rank(
        Buffer("best", torch.int64, "scratch", 2), Buffer("row", torch.float32, "scratch", 8), True, "topk"
    ),
    "x = solution of a, b; fail if it may not exist": Solve(
        "solution",
        Buffer("x", torch.float32, "scratch", 8),
        (Buffer("a", torch.float32, "scratch", 16), Buffer("b", torch.float32, "scratch", 8)),
        4,
        2,
    ),
    "fail if outside": Fail("outside"),
    "# a remark": Comment("a remark"),
    "for i in 8 (vector, reduces total):": For("i", 8, (), "vector", (TOTAL,)),
    "for i in first ... last - 1:": For("i", 8, (), bounds=(FIRST, LAST)),
    "nest:": Scope(()),
}


@pytest.mark.parametrize("line", list(STATEMENTS))
def test_a_statement_reads_like_this(line: str) -> None:
    text = text_of_body(KernelBody((X,), (OUT,), (STATEMENTS[line],)), "example")
    assert text.splitlines() == ["kernel example(x: float32) -> (out: bool)", f"    {line}"]


def test_what_loops_and_nests_hold_is_indented() -> None:
    loop = For("i", 4, (Scope((Comment("inside"),)),))
    text = text_of_body(KernelBody((), (), (loop,), ("model.py:7  add",)), "example")
    assert text.splitlines() == [
        "# model.py:7  add",
        "kernel example() -> ()",
        "    for i in 4:",
        "        nest:",
        "            # inside",
    ]
