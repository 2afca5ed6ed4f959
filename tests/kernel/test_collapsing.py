"""Nested loops that walk memory as one become one; reductions among them."""

from __future__ import annotations

import pytest
import torch

from fuse.kernel.arithmetic.expressions import Variable, position
from fuse.kernel.arithmetic.index import Affine
from fuse.kernel.ir import Accumulate, Accumulator, Buffer, For, Load, Statement
from fuse.kernel.nests.collapsing import merged

X = Buffer("x", torch.float32, "input")
SUM = Accumulator("total", torch.float32, "sum")
LAST = Accumulator("best", torch.float32, "argmax")
ROW, AT = Affine.of("i"), Affine.of("j")


def nest(where: Affine, *more: Statement, reduces: tuple[Accumulator, ...] = (SUM,)) -> For:
    """Eight rows of four elements of ``x``."""
    return For("i", 8, (For("j", 4, (Load("at", X, where), *more), "vector", reduces),))


@pytest.mark.parametrize(
    ("accumulated", "of"),
    [
        (Accumulate(SUM, Variable(torch.float32, "at")), SUM),
        (Accumulate(LAST, Variable(torch.float32, "at"), ROW * 4 + AT), LAST),
    ],
)
def test_a_reduction_over_rows_that_follow_one_another_has_one_loop(accumulated: Accumulate, of: Accumulator) -> None:
    loop = merged(nest(ROW * 4 + AT, accumulated, reduces=(of,)))
    assert (loop.atom, loop.extent, loop.kind, loop.reduces) == ("j", 32, "vector", (of,))
    assert loop.body[0] == Load("at", X, AT)


@pytest.mark.parametrize(
    "loop",
    [
        nest(ROW * 5 + AT, Accumulate(SUM, Variable(torch.float32, "at"))),
        nest(ROW * 4 + AT, Accumulate(LAST, Variable(torch.float32, "at"), AT), reduces=(LAST,)),
        nest(ROW * 4 + AT, Accumulate(SUM, position(ROW))),
    ],
    ids=["rows apart", "positions in a row", "a row's number is summed"],
)
def test_near_misses_stay(loop: For) -> None:
    assert merged(loop) is loop
