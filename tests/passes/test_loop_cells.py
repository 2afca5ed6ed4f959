"""Loops as people write them, some for each thing that the prover understands, and near misses of each.

A cell must be right by the oracle at three lengths, without fallback, and its launches must not grow with the length
but where a step calls a library. The same loop with one step unlike the others must not roll, and be right.
"""

from __future__ import annotations

import pytest
import torch

from fuse.check.oracle import check
from tests.passes.cells import bodies, results, states
from tests.passes.cells.table import BATCH, CELLS, CLAUSES, LENGTHS, ODD, SHORT, WIDTH, Cell, Model, rolled

CELLS_OF = (states, results, bodies)
"""Where the cells are: importing these files fills the table."""


def test_every_clause_has_a_cell() -> None:
    assert {clause for cell in CELLS for clause in cell.clauses} == set(CLAUSES)
    assert len({cell.name for cell in CELLS}) == len(CELLS)


@pytest.mark.sampled
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_loop_is_right_and_its_launches_do_not_grow(cell: Cell) -> None:
    model = Model(cell).eval()
    for length in LENGTHS:
        x = torch.randn(length, BATCH, WIDTH)
        report = check(model, (x,))
        assert report.passed, report
        assert not report.fallbacks
        assert report.observed[1] == cell.launches + cell.each * length, report
    assert rolled(model, x) == cell.loops


NEAR_MISSES = [(cell, odd) for cell in CELLS for odd in ODD]


@pytest.mark.sampled
@pytest.mark.parametrize(("cell", "odd"), NEAR_MISSES, ids=lambda part: part if part in ODD else part.name)
def test_a_loop_with_steps_that_do_not_correspond_stays(cell: Cell, odd: str) -> None:
    assert rolled(Model(cell, ODD[odd]).eval(), torch.randn(SHORT, BATCH, WIDTH)) == 0


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(len(CELLS)), ids=[cell.name for cell in CELLS])
def test_what_stays_is_right(number: int) -> None:
    """One near miss of each cell, the four kinds in turn: kernels of unrolled steps take long to compile."""
    cell, odd = NEAR_MISSES[len(ODD) * number + number % len(ODD)]
    report = check(Model(cell, ODD[odd]).eval(), (torch.randn(SHORT, BATCH, WIDTH),))
    assert report.passed, report
