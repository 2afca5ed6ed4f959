"""The work of a loop, and whether threads share it.

``threads`` says how: ``"one"`` never splits a loop, ``"if worth it"`` decides by the work, and ``"decided in each
call"`` makes code that compares the work of each call.
"""

from __future__ import annotations

from fuse.kernel.arithmetic.extents import is_one, unless_below
from fuse.kernel.config import Threads
from fuse.kernel.cpu.printer import calls
from fuse.kernel.ir import For, KernelBody, Let, Rank, Scope, Solve, Statement
from fuse.kernel.sizes.members import Members

PARALLEL_WORK = 65_536
"""Least work (:func:`work`) of a loop that is split over threads; for less, waking them costs more. ATen's grain size
is half of it."""


def is_parallel(body: KernelBody, threads: Threads = "if worth it", members: Members | None = None) -> bool:
    """Whether the kernel uses several threads."""
    if threads == "decided in each call":
        return bool(works(body))
    most = members.count * sum(works(body)) if members else max(works(body), default=0)
    return threads != "one" and most >= PARALLEL_WORK


def works(body: KernelBody) -> list[int]:
    """The work of each outermost loop."""
    stack, found = list(body.statements), []
    while stack:
        statement = stack.pop()
        if isinstance(statement, Scope):
            stack.extend(statement.body)
        elif isinstance(statement, For):
            found.append(work(statement))
    return found


def work(statement: Statement) -> int:
    """A rough measure of time: the number of statements executed, where a statement with a function call counts as
    8."""
    match statement:
        case For():
            return statement.extent * sum(work(s) for s in statement.body)
        case Scope():
            return sum(work(s) for s in statement.body)
        case Rank():
            return 8 * statement.row.extent
        case Solve():
            return statement.rows**2 * statement.columns
        case Let():
            return 8 if calls(statement.value) else 1
        case _:
            return 1


def splits(loop: For, threads: Threads) -> bool:
    """Whether the loop may be split over threads."""
    shared = threads == "decided in each call" or (threads != "one" and work(loop) >= PARALLEL_WORK)
    if not shared or loop.kind not in ("parallel", "vector") or is_one(loop.extent):
        return False
    # A size that varies may be one in a call. Then a loop with work for threads needs another kernel, which splits it.
    alone = threads == "decided in each call" and perfectly_nested(loop) == 1
    return not alone or unless_below(work(loop), PARALLEL_WORK, 2, loop.extent) > 1


def perfectly_nested(loop: For) -> int:
    """Number of perfectly nested parallel loops, from ``loop`` inwards."""
    levels = 1
    while len(loop.body) == 1 and isinstance(loop.body[0], For) and loop.body[0].kind == "parallel":
        loop = loop.body[0]
        levels += 1
    return levels
