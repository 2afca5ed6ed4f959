"""Independent rows of a batch, which threads of a loop kernel share out.

    for i0 in 8:                                  for i0 in first_row ... last_row:
        for i1 in 4:                      ->          for i1 in 4:
            next[4*i0 + i1] = h[4*i0 + i1]                next[4*i0 + i1] = h[4*i0 + i1]

A row is an equal part of every state and of every stage's result. The outer loop of each nest must run over rows, and
may access that memory only in its current row.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from fuse.kernel.arithmetic.expressions import position
from fuse.kernel.arithmetic.extents import is_one
from fuse.kernel.arithmetic.index import Affine
from fuse.kernel.ir import Accumulate, Accumulator, Declare, Fail, For, Load, Scope, Statement, Store
from fuse.kernel.loops.loop_nests import Frame, elements
from fuse.kernel.loops.loop_stages import StepProduct


def rows_of_batch(frame: Frame, nests: Sequence[Sequence[Statement]]) -> int:
    """The number of independent rows: the largest product of leading dimensions of the states that works; at least
    1."""
    sizes: list[int] = list(itertools.accumulate(frame.states[0].shape, operator.mul))
    for batch in sorted({s for s in sizes if not is_one(s)}, reverse=True):
        own = _own_rows(frame, batch)
        if own and all(_row_by_row(s, batch, own) for statements in nests for s in statements):
            return batch
    return 1


def share_of_rows(statements: Sequence[Statement], batch: int) -> list[Statement]:
    """The nests with outer loops restricted to rows ``first_row`` to ``last_row`` (excluded) of the batch."""
    return [_share(statement, batch) for statement in statements] if not is_one(batch) else list(statements)


def _share(statement: Statement, batch: int) -> Statement:
    match statement:
        case Scope():
            return Scope(tuple(_share(s, batch) for s in statement.body))
        case For():
            trips = statement.extent // batch
            first, last = (position(Affine.of(name) * trips) for name in ("first_row", "last_row"))
            return replace(statement, bounds=(first, last))
        case _:
            return statement


def _own_rows(frame: Frame, batch: int) -> dict[str, int]:
    """Elements of one row in the memory of states and stages, by name; empty if some memory is no multiple of rows."""
    own: dict[str, int] = {}
    for state in frame.states:
        own |= dict.fromkeys(
            (frame.name(state) + suffix for suffix in ("", "_next", "_memory")), elements(state) // batch
        )
    for stage in frame.step.stages:
        own[frame.name(stage.result)] = elements(stage.result) // batch
    shared = [elements(v) for v in (*frame.states, *(s.result for s in frame.step.stages))]
    multiplied = [p.left.shape[0] for p in frame.step.stages if isinstance(p, StepProduct)]
    return {} if any(size % batch for size in (*shared, *multiplied)) else own


def _row_by_row(statement: Statement, batch: int, own: Mapping[str, int], checks: Set[str] = frozenset()) -> bool:
    """Whether a nest's outer loop runs over rows of the batch, and accesses the memory ``own`` only in its own row.

    ``checks`` are accumulators that decide whether the kernel fails; each thread may compute them for its own rows.
    """
    match statement:
        case Scope():
            scratch = [s.buffer for s in statement.body if isinstance(s, Declare)]
            if any(buffer.extent % batch for buffer in scratch):
                return False
            own = {**own, **{buffer.name: buffer.extent // batch for buffer in scratch}}
            checks = {s.condition for s in statement.body if isinstance(s, Fail)}
            return all(_row_by_row(s, batch, own, checks) for s in statement.body)
        case For():
            return _loop_over_rows(statement, batch, own, checks)
        case Load() | Store():
            return statement.buffer.name not in own
        case _:
            return True


def _loop_over_rows(loop: For, batch: int, own: Mapping[str, int], checks: Set[str]) -> bool:
    if loop.extent % batch or not _reduced_outside(loop) <= checks:
        return False
    trips = loop.extent // batch
    for access, extents in _accesses(loop, {}):
        row = own.get(access.buffer.name)
        if row is None:
            continue
        step = access.offset.coefficient(loop.atom)
        low, high = _range(access, loop.atom, extents)
        if step * trips != row or low < 0 or high + step * (trips - 1) >= row:
            return False
    return True


def _reduced_outside(loop: For) -> set[str]:
    """The accumulators declared outside of the loop that it updates, and that thereby combine all rows."""
    inside, added, stack = set(), set(), list(loop.body)
    while stack:
        statement = stack.pop()
        if isinstance(statement, (For, Scope)):
            stack += statement.body
        elif isinstance(statement, Accumulator):
            inside.add(statement.name)
        elif isinstance(statement, Accumulate):
            added.add(statement.accumulator.name)
    return added - inside


def _accesses(statement: For | Scope, outside: Mapping[str, int]) -> Iterator[tuple[Load | Store, Mapping[str, int]]]:
    """All loads and stores inside, with the extents of the loops around them."""
    extents = {**outside, statement.atom: statement.extent} if isinstance(statement, For) else outside
    for inner in statement.body:
        if isinstance(inner, (For, Scope)):
            yield from _accesses(inner, extents)
        elif isinstance(inner, (Load, Store)):
            yield inner, extents


def _range(access: Load | Store, row: str, extents: Mapping[str, int]) -> tuple[int, int]:
    """The smallest and largest offset of an access relative to its row."""
    start = access.offset.constant
    reach = [c * (extents[a] - 1) for a, c in access.offset.terms if a != row]
    for term in access.indirect if isinstance(access, Load) else ():
        assert isinstance(term.stride, int), "memory of the kernel's own has strides of its own"
        reach.append(term.stride * (term.extent - 1))
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0)
