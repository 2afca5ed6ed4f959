"""Merge (collapse) nested loops that access memory like a single loop.

    for i in 4:                            for i in 32:
        for j in 8:                 ->         out[i] = x[i]
            out[8*i + j] = x[8*i + j]

Two nested loops become one if every offset inside is the same function of ``inner_extent * outer + inner``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuse.kernel.arithmetic.expressions import names_in
from fuse.kernel.arithmetic.index import Affine
from fuse.kernel.ir import Accumulate, For, Let, Load, Scope, Statement, Store


def collapse(statements: Sequence[Statement]) -> list[Statement]:
    """``statements`` with nested loops merged where possible, innermost first."""
    result: list[Statement] = []
    for statement in statements:
        if isinstance(statement, For):
            statement = merged(replace(statement, body=tuple(collapse(statement.body))))
        elif isinstance(statement, Scope):
            statement = Scope(tuple(collapse(statement.body)))
        result.append(statement)
    return result


def merged(loop: For) -> For:
    """The loop merged with the loop that is its only statement; the loop itself if they cannot be merged."""
    if len(loop.body) != 1 or not isinstance(loop.body[0], For):
        return loop
    inner = loop.body[0]
    if loop.bounds or inner.bounds:  # parts of a range are not consecutive iterations of the merged loop
        return loop
    if loop.reduces or not all(_mergeable(s, loop.atom, inner) for s in inner.body):
        return loop
    body = tuple(_without(s, loop.atom) for s in inner.body)
    return replace(inner, extent=loop.extent * inner.extent, body=body)


def _offsets(statement: Statement) -> list[Affine]:
    match statement:
        case Load() | Store():
            return [statement.offset]
        case Accumulate():
            return [statement.position]
        case _:
            return []


def _mergeable(statement: Statement, outer: str, inner: For) -> bool:
    if isinstance(statement, Let):
        return not {outer, inner.atom} & names_in(statement.value)
    if isinstance(statement, Accumulate) and {outer, inner.atom} & names_in(statement.value):
        return False
    if not isinstance(statement, (Load, Store, Accumulate)):
        return False
    if isinstance(statement, Load):
        asked = (*(term.position for term in statement.indirect), statement.guard)
        if any({outer, inner.atom} & names_in(expression) for expression in asked if expression is not None):
            return False
    return all(o.step(outer).is_always(o.step(inner.atom) * inner.extent) for o in _offsets(statement))


def _without(statement: Statement, atom: str) -> Statement:
    if isinstance(statement, (Load, Store)):
        return replace(statement, offset=statement.offset.without(atom))
    if isinstance(statement, Accumulate):
        return replace(statement, position=statement.position.without(atom))
    return statement
