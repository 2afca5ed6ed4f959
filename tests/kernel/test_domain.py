from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.kernel.domain import MAX_INLINED, Domain, domain_of, join
from fuse.kernel.kernel import Declined

X = torch.zeros(4, 6)


def last_call(function: Callable[[Tensor], Tensor], x: Tensor = X) -> Domain | Declined:
    graph = capture(Function(function), (x,))
    return domain_of([node for node in graph.graph.nodes if node.op == "call_function"][-1])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x + 1, Domain(24, None, True, 1)),
        (lambda x: x.tanh(), Domain(24, None, False, 1)),
        (lambda x: x.sum(1), Domain(24, 4, False, 1, reductions=1)),
        (lambda x: x.softmax(0), Domain(24, 6, False, 1, reductions=2)),
        (lambda x: torch.stack([x, x]), Domain(48, None, False, 1, "apart", cuts=2)),
    ],
)
def test_a_domain_says_what_the_loops_run_over(function, expected):
    assert last_call(function) == expected


@pytest.mark.parametrize(
    ("function", "x", "reason"),
    [
        (lambda x: x @ x.t(), X, "aten.mm.default is a product, which has loops of its own"),
        (lambda x: x + 1j, X, "dtype torch.complex64 is not supported in kernels"),
    ],
)
def test_operators_without_kernels_say_why(function, x, reason):
    assert last_call(function, x) == Declined(reason)


CHEAP, COSTLY = Domain(24, None, True, 1), Domain(24, None, False, 1)
ROWS, COLUMNS = Domain(24, 4, False, 1), Domain(24, 6, False, 1)
PER_ROW, WIDER = Domain(4, None, True, 1), Domain(96, None, True, 1)
COLLECTION = Domain(96, None, False, 1, "apart")
OVER_ROWS = Domain(4, 1, False, 1)
LEVELS = Domain(24, 4, False, 2, rows_again=1)
ONE = Domain(1, None, True, 1)
MANY_ROWS, ALL_OF_THEM = Domain(10**6, 4096, False, 1, reductions=1), Domain(4096, 1, False, 1, reductions=1)


@pytest.mark.parametrize(
    ("earlier", "later", "joined"),
    [
        (CHEAP, COSTLY, Domain(24, None, False, 2)),
        (CHEAP, ROWS, Domain(24, 4, False, 2)),
        (ROWS, CHEAP, Domain(24, 4, False, 2)),
        (ROWS, PER_ROW, Domain(24, 4, False, 2)),
        (PER_ROW, ROWS, Domain(24, 4, False, 2)),
        (CHEAP, WIDER, Domain(96, None, True, 2)),
        (WIDER, CHEAP, Domain(24, None, True, 2)),
        (COSTLY, COLLECTION, Domain(96, None, False, 2, "inside")),
        (CHEAP, COLLECTION, Domain(96, None, False, 2, "apart")),
        (ROWS, OVER_ROWS, LEVELS),
        *((LEVELS, one, replace(LEVELS, size=3)) for one in (PER_ROW, OVER_ROWS, ONE)),
        *((one, LEVELS, replace(LEVELS, size=3)) for one in (ROWS, CHEAP, PER_ROW, OVER_ROWS)),
        (LEVELS, LEVELS, replace(LEVELS, size=4)),
        (MANY_ROWS, ALL_OF_THEM, replace(MANY_ROWS, size=2, rows_again=1, reductions=2)),
    ],
)
def test_domains_that_fit_become_one(earlier, later, joined):
    assert join(earlier, later) == joined


@pytest.mark.parametrize(
    ("earlier", "later", "reason"),
    [
        (ROWS, COLUMNS, "their reductions leave different numbers of rows"),
        (COSTLY, WIDER, "a costly value would be computed again for every element it is broadcast to"),
        (Domain(24, None, True, MAX_INLINED + 1), WIDER, "a costly value would be computed again for every element"),
        (Domain(96, None, False, 1), CHEAP, "a costly value would be computed in the kernels that read parts of it"),
        (ROWS, WIDER, "their loops run over different numbers of elements"),
        *((LEVELS, one, "their loops run over different numbers of elements") for one in (ROWS, CHEAP, COLUMNS, WIDER)),
        *((one, LEVELS, "their loops run over different numbers of elements") for one in (COLUMNS, WIDER)),
        (LEVELS, replace(OVER_ROWS, looks_up=True), "their loops run over different numbers of elements"),
        (LEVELS, replace(LEVELS, rows_again=2), "their loops run over different numbers of elements"),
        (Domain(10**6, 5000, False, 1), Domain(5000, 1, False, 1), "more than 4096 results of a reduction"),
        (replace(MANY_ROWS, reductions=32), ALL_OF_THEM, "more than 4096 results of a reduction, or 131072 of several"),
        (join(COSTLY, COLLECTION), WIDER, "a costly piece of a concatenation would be computed again"),
    ],
)
def test_domains_that_do_not_fit_say_why(earlier, later, reason):
    assert str(join(earlier, later)).startswith(reason)
