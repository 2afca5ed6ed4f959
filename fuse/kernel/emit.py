"""Print a kernel body as C++ that a person can read.

One ``extern "C"`` function a kernel, scalar code in plain loops: the compiler vectorises it (``#pragma omp simd``), and
OpenMP splits the outer loops over threads where there is enough work. The user's lines stand above it as a comment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, cast

from fuse.kernel.extents import divides
from fuse.kernel.index import Affine
from fuse.kernel.ir import (
    Accumulate,
    Accumulator,
    Barrier,
    Comment,
    Contract,
    Declare,
    Fail,
    KernelBody,
    Let,
    Load,
    Loop,
    Scope,
    Statement,
    Store,
)
from fuse.kernel.values import ReduceOp

PARALLEL_WORK = 65_536
"""Statements executed from which a loop is split over threads; below, waking them costs more.

ATen's grain is half of it.
"""
EARLY_WORK = PARALLEL_WORK // 2
"""The same where waking them is to be tried."""
FEW_ROWS = 4
"""Iterations for each processor below which it matters that they are not shared out evenly."""

CHUNKS = 64
"""Parts of a sum that threads share out: always as many, so that its bits do not depend on the number of threads."""

_INDENT = "    "
_IDENTITY = {"sum": "0", "prod": "1", "any": "false", "all": "true"}
_LIMITS = {
    "float": ("-__builtin_inff()", "__builtin_inff()"),
    "double": ("-__builtin_inf()", "__builtin_inf()"),
    "int64_t": ("INT64_MIN", "INT64_MAX"),
    "int32_t": ("INT32_MIN", "INT32_MAX"),
    "int16_t": ("INT16_MIN", "INT16_MAX"),
    "int8_t": ("INT8_MIN", "INT8_MAX"),
    "uint8_t": ("0", "UINT8_MAX"),
    "bool": ("false", "true"),
}
_COMBINE = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "fuse_maximum({0}, {1})",
    "min": "fuse_minimum({0}, {1})",
    "largest": "fuse_larger({0}, {1})",
    "any": "{0} || {1}",
    "all": "{0} && {1}",
}
_CLAUSE = {
    "sum": "+",
    "prod": "*",
    "max": "fuse_max",
    "min": "fuse_min",
    "largest": "fuse_larger",
    "any": "||",
    "all": "&&",
}
_IN_LANES = ("sum", "prod", "max", "min", "largest")
_LANES = 16
_INTEGER_CLAUSE = _CLAUSE | {"max": "max", "min": "min"}


Threads = Literal["one", "if worth it", "early", "inside", "asked in the call"]
"""Whether an outer loop is split over threads: where its work, known now or in the call, is worth waking them.
``early``: for less work, too. ``inside``: where a loop cannot be split, or not evenly, those inside it are, and loops
that all add to the same sums."""


def emit(body: KernelBody, name: str, threads: Threads = "if worth it") -> str:
    """The C++ text of one kernel: ``extern "C" int name(char *const *args)``, arguments in order, inputs then outputs.

    It returns 0, or 1 where it found an index out of range and wrote nothing.
    """
    lines = [f"// {line}" for line in body.lines]
    lines.append(f'extern "C" int {name}(char *const *args) {{')
    for position, buffer in enumerate((*body.inputs, *body.outputs)):
        qualifier = "const " if buffer.role == "input" else ""
        lines.append(
            f"{_INDENT}{qualifier}{buffer.ctype} *{buffer.name} = ({qualifier}{buffer.ctype} *)args[{position}];"
        )
    for statement in body.statements:
        lines += _statement(statement, 1, threads)
    lines += [f"{_INDENT}return 0;", "}"]
    return "\n".join(lines) + "\n"


def text_of(statements: Iterable[Statement], depth: int) -> list[str]:
    """The lines of statements inside a function of the caller's, ``depth`` levels in; no loop is split over threads."""
    return [line for statement in statements for line in _statement(statement, depth)]


def is_parallel(body: KernelBody, threads: Threads = "if worth it") -> bool:
    """Whether the kernel asks for threads."""
    if threads == "asked in the call":
        return bool(works(body))
    return threads != "one" and any(loop_work >= _least_work(threads) for loop_work in works(body))


def works(body: KernelBody) -> list[int]:
    """The work of each loop that stands in no other."""
    stack, found = list(body.statements), []
    while stack:
        statement = stack.pop()
        if isinstance(statement, Scope):
            stack.extend(statement.body)
        elif isinstance(statement, Loop):
            found.append(work(statement))
    return found


def _least_work(threads: Threads) -> int:
    """Work from which a loop is split."""
    return EARLY_WORK if threads == "early" else PARALLEL_WORK


def work(statement: Statement) -> int:
    """Statements executed, arithmetic counted by the length of its text: a rough measure of time."""
    match statement:
        case Loop():
            return statement.extent * sum(work(s) for s in statement.body)
        case Scope():
            return sum(work(s) for s in statement.body)
        case Let():
            return 8 if "fuse_" in statement.text else 1
        case Contract():
            return statement.rows * statement.columns * statement.depth
        case _:
            return 1


def _statement(statement: Statement, depth: int, threads: Threads = "one") -> list[str]:
    pad = _INDENT * depth
    match statement:
        case Load():
            return [f"{pad}const {statement.ctype} {statement.name} = {_load(statement)};"]
        case Let():
            return [f"{pad}const {statement.ctype} {statement.name} = {_unwrapped(statement.text)};"]
        case Store():
            value = _to_storage(statement.buffer.ctype, statement.text)
            return [f"{pad}{statement.buffer.name}[{statement.offset}] = {value};"]
        case Accumulator():
            return [pad + line for line in _accumulator(statement)]
        case Accumulate():
            return [pad + _accumulate(statement)]
        case Declare():
            return [f"{pad}alignas(64) {statement.buffer.ctype} {statement.buffer.name}[{statement.buffer.extent}];"]
        case Fail():
            return [f"{pad}if ({statement.condition}) return 1;"]
        case Comment():
            return [f"{pad}// {statement.text}"]
        case Barrier():
            return []  # outside of a partition there is one thread, which waits for nobody
        case Contract():
            return [pad + line for line in _contract(statement)]
        case Scope():
            inner = [line for s in statement.body for line in _statement(s, depth + 1, threads)]
            return [f"{pad}{{", *inner, f"{pad}}}"]
        case Loop() if statement.kind == "partition":
            return _partition(statement, depth)
        case Loop():
            return _loop(statement, depth, threads)


def _loop(loop: Loop, depth: int, threads: Threads) -> list[str]:
    pad = _INDENT * depth
    lines = []
    if _reduces_in_lanes(loop, threads):
        return [pad + line for line in _in_lanes(loop)]
    if sums := _sums_to_share_out(loop, threads):
        return [pad + line for line in _in_chunks(loop, sums, threads)]
    pragma = _pragma(loop, threads)
    if pragma:
        lines.append(f"{pad}#pragma omp {pragma}")
    lines.append(f"{pad}{_heading(loop)}")
    within: Threads = "inside" if threads == "inside" and not pragma.startswith("parallel") else "one"
    for statement in loop.body:
        lines += _statement(statement, depth + 1, within)
    lines.append(f"{pad}}}")
    return lines


def _splits(loop: Loop, threads: Threads) -> bool:
    """Whether the loop may be split over threads."""
    splits = threads == "asked in the call" or (threads != "one" and work(loop) >= _least_work(threads))
    splits = splits and not (threads == "inside" and _uneven(loop))
    return splits and loop.kind in ("parallel", "vector") and loop.extent > 1


def _uneven(loop: Loop) -> bool:
    """Whether some processors would have more of few iterations than others."""
    processors, iterations = os.cpu_count() or 1, loop.extent
    for _ in range(_perfectly_nested(loop) - 1):
        loop = cast(Loop, loop.body[0])
        iterations *= loop.extent
    return loop.kind == "parallel" and iterations < FEW_ROWS * processors and iterations % processors > 0


def _reduces_in_lanes(loop: Loop, threads: Threads) -> bool:
    """Whether a vector loop keeps its sums in lanes of our own."""
    whole = loop.kind == "vector" and loop.bounds is None and divides(_LANES, loop.extent)
    known = all(a.op in _IN_LANES and a.ctype in ("float", "double") for a in loop.reduces)
    return bool(whole and known and loop.reduces and not _splits(loop, threads))


def _in_lanes(loop: Loop) -> list[str]:
    """A vector at a time, a partial result in every lane of it, and what the lanes come to."""
    first = f"{loop.atom}_first"
    lines, after, before, body = [], [], [], []
    for accumulator in loop.reduces:
        name, lanes = accumulator.name, f"{accumulator.name}_lanes"
        start = identity(accumulator.op, accumulator.ctype)
        lines.append(f"alignas(64) {accumulator.ctype} {lanes}[{_LANES}];")
        lines.append(f"fuse_start_lanes<{_LANES}>({lanes}, {start});")
        both = f"[](auto a, auto b) {{ return {combined(accumulator.op, 'a', 'b')}; }}"
        across = f"fuse_across<{_LANES // 2}>({lanes}, {both})"
        after.append(f"{name} = {combined(accumulator.op, name, across)};")
    for statement in loop.body:
        if isinstance(statement, Accumulate):
            lane = f"{statement.accumulator.name}_lanes[{loop.atom} - {first}]"
            body.append(f"{lane} = {combined(statement.accumulator.op, lane, statement.text)};")
        elif isinstance(statement, Load) and _reads_truths(statement, loop.atom):
            lanes = f"{statement.name}_lanes"
            where = statement.offset.without(loop.atom) + Affine.of(first)
            before.append(f"alignas(64) int32_t {lanes}[{_LANES}];")
            before.append(f"fuse_truths({lanes}, {statement.buffer.name} + {where});")
            body.append(f"const bool {statement.name} = {lanes}[{loop.atom} - {first}] != 0;")
        else:
            body += _statement(statement, 0)
    return [
        *lines,
        f"for (int64_t {first} = 0; {first} < {loop.extent}; {first} += {_LANES}) {{",
        *(_INDENT + line for line in before),
        f"{_INDENT}#pragma omp simd",
        f"{_INDENT}for (int64_t {loop.atom} = {first}; {loop.atom} < {first} + {_LANES}; ++{loop.atom}) {{",
        *(2 * _INDENT + line for line in body),
        f"{_INDENT}}}",
        "}",
        *after,
    ]


def _sums_to_share_out(loop: Loop, threads: Threads) -> list[Accumulator]:
    """What a loop that is split over threads adds up, where the order of rounding matters."""
    common = _common_sums(loop) if threads == "inside" else None
    sums = list(loop.reduces) if common is None and _splits(loop, threads) else common or []
    rounded = any(a.op in ("sum", "prod") and a.ctype in ("float", "double") for a in sums)
    in_order = any(a.op in ("argmax", "argmin") for a in sums)
    return sums if rounded and not in_order else []


def _in_chunks(loop: Loop, sums: Sequence[Accumulator], threads: Threads) -> list[str]:
    """Each chunk of the iterations comes to sums of its own, which are added up in order."""
    chunk = f"{loop.atom}_chunk"
    inside = replace(
        loop,
        kind="vector" if loop.kind == "vector" else "serial",
        bounds=(f"{loop.extent} * {chunk} / {CHUNKS}", f"{loop.extent} * ({chunk} + 1) / {CHUNKS}"),
    )
    condition = f" if(parallel : {work(loop)} >= {PARALLEL_WORK})" if threads == "asked in the call" else ""
    heading = f"for (int64_t {chunk} = 0; {chunk} < {CHUNKS}; ++{chunk}) {{"
    own = [f"{a.ctype} {a.name} = {identity(a.op, a.ctype)};" for a in sums]
    kept = [f"{a.name}_parts[{chunk}] = {a.name};" for a in sums]
    added = [f"{a.name} = {combined(a.op, a.name, f'{a.name}_parts[{chunk}]')};" for a in sums]
    return [
        *(f"{a.ctype} {a.name}_parts[{CHUNKS}];" for a in sums),
        f"#pragma omp parallel for{condition}",
        heading,
        *(_INDENT + line for line in [*own, *_loop(inside, 0, "one"), *kept]),
        "}",
        heading,
        *(_INDENT + line for line in added),
        "}",
    ]


def _reads_truths(load: Load, atom: str) -> bool:
    """Whether a loop over ``atom`` loads bools that lie side by side: with these among floats, compilers give up."""
    return (
        load.ctype == load.buffer.ctype == "bool"
        and not (load.guard or load.indirect)
        and load.offset.step(atom) == Affine((), 1)
    )


def _pragma(loop: Loop, threads: Threads) -> str:
    asked = threads == "asked in the call"
    splits = _splits(loop, threads)
    sequential = any(a.op in ("argmax", "argmin") for a in loop.reduces)
    simd = loop.kind == "vector" and not sequential
    if sequential:
        return ""
    if threads == "inside" and (sums := _common_sums(loop)) is not None:
        return "parallel for" + "".join(f" reduction({_clause(a)} : {a.name})" for a in sums)
    clauses = f" if(parallel : {work(loop)} >= {PARALLEL_WORK})" if splits and asked else ""
    clauses += "".join(f" reduction({_clause(a)} : {a.name})" for a in loop.reduces)
    if splits and loop.kind == "parallel":
        levels = _perfectly_nested(loop)
        return "parallel for" + (f" collapse({levels})" if levels > 1 else "") + clauses
    if splits and simd:
        return "parallel for simd" + clauses
    return "simd" + clauses if simd else ""


def _partition(loop: Loop, depth: int) -> list[str]:
    """Shares at the same time, whatever the number of threads: what stands between two barriers is one loop over the
    shares, of which a static schedule gives each thread the same ones every time."""
    pad = _INDENT * depth
    worthwhile = int(work(loop) >= PARALLEL_WORK)
    team = f"{pad}#pragma omp parallel num_threads({loop.extent}) if({worthwhile})"
    return [team, f"{pad}{{", *_shares(loop, loop.body, depth + 1), f"{pad}}}"]


def _shares(partition: Loop, statements: Sequence[Statement], depth: int) -> list[str]:
    pad = _INDENT * depth
    lines: list[str] = []
    between: list[Statement] = []

    def finish() -> None:
        if between:
            share = Loop(partition.atom, partition.extent, tuple(between))
            lines.extend([f"{pad}#pragma omp for schedule(static) nowait", *_loop(share, depth, "one")])
            between.clear()

    for statement in statements:
        if isinstance(statement, Barrier):
            finish()
            lines.append(f"{pad}#pragma omp barrier")
        elif isinstance(statement, Loop) and statement.kind == "sequential" and _waits(statement):
            finish()
            lines.append(f"{pad}{_heading(statement)}")
            lines += [*_shares(partition, statement.body, depth + 1), f"{pad}}}"]
        else:
            between.append(statement)
    finish()
    return lines


def _waits(loop: Loop) -> bool:
    return any(isinstance(s, Barrier) or (isinstance(s, Loop) and _waits(s)) for s in loop.body)


def _heading(loop: Loop) -> str:
    first, last = loop.bounds or ("0", str(loop.extent))
    return f"for (int64_t {loop.atom} = {first}; {loop.atom} < {last}; ++{loop.atom}) {{"


def _common_sums(loop: Loop) -> list[Accumulator] | None:
    """What the iterations of a serial loop reduce together; None where one has more to do with another."""
    if loop.kind != "serial" or loop.bounds is not None or work(loop) < PARALLEL_WORK:
        return None
    inside = list(_statements(loop))
    own = any(isinstance(s, (Accumulator, Declare)) or (isinstance(s, Loop) and s.kind == "sequential") for s in inside)
    loaded = {s.buffer.name for s in inside if isinstance(s, Load)}
    stored = {s.buffer.name for s in inside if isinstance(s, Store)}
    sums = {a.name: a for s in inside if isinstance(s, Loop) for a in s.reduces}
    in_order = any(a.op in ("argmax", "argmin") for a in sums.values())
    return None if own or in_order or loaded & stored else list(sums.values())


def _statements(loop: Loop) -> Iterator[Statement]:
    """All statements inside ``loop``, at any depth."""
    for statement in loop.body:
        yield statement
        if isinstance(statement, Loop):
            yield from _statements(statement)
        elif isinstance(statement, Scope):
            yield from _statements(Loop("", 1, statement.body))


def _perfectly_nested(loop: Loop) -> int:
    """How many parallel loops stand directly inside one another, from ``loop`` on."""
    levels = 1
    while len(loop.body) == 1 and isinstance(loop.body[0], Loop) and loop.body[0].kind == "parallel":
        loop = loop.body[0]
        levels += 1
    return levels


def _clause(accumulator: Accumulator) -> str:
    table = _CLAUSE if accumulator.ctype in ("float", "double") else _INTEGER_CLAUSE
    return table[accumulator.op]


def identity(op: ReduceOp, ctype: str) -> str:
    """The value that a reduction starts from, as C++ text."""
    lowest, highest = _LIMITS[ctype]
    return {"max": lowest, "min": highest, "largest": lowest, "argmax": "0", "argmin": "0"}.get(op) or _IDENTITY[op]


def combined(op: ReduceOp, so_far: str, element: str) -> str:
    """``op(so_far, element)`` as C++ text; not for arg-reductions."""
    return _COMBINE[op].format(so_far, element)


def _accumulator(accumulator: Accumulator) -> list[str]:
    lines = [f"{accumulator.ctype} {accumulator.name} = {identity(accumulator.op, accumulator.ctype)};"]
    if accumulator.op in ("argmax", "argmin"):
        lines.append(f"int64_t {accumulator.name}_at = -1;")
    return lines


def _accumulate(statement: Accumulate) -> str:
    name, text = statement.accumulator.name, statement.text
    op = statement.accumulator.op
    if op in ("argmax", "argmin"):
        symbol = ">" if op == "argmax" else "<"
        better = f"{name}_at < 0 || {text} {symbol} {name} || ({text} != {text} && {name} == {name})"
        return f"if ({better}) {{ {name} = {text}; {name}_at = {statement.position}; }}"
    return f"{name} = {combined(op, name, text)};"


def _load(load: Load) -> str:
    where = str(load.offset)
    for term in load.indirect:
        where += f" + {term.variable} * {term.stride}" if term.stride != 1 else f" + {term.variable}"
    text = f"{load.buffer.name}[{where}]"
    if load.buffer.ctype in ("fuse_bf16", "fuse_f16"):
        text = f"fuse_to_float({text})"
    return f"{load.guard} ? {text} : {load.ctype}(0)" if load.guard else text


def _to_storage(ctype: str, text: str) -> str:
    return {"fuse_bf16": f"fuse_to_bf16({text})", "fuse_f16": f"fuse_to_f16({text})"}.get(ctype, text)


def _unwrapped(text: str) -> str:
    """``(a + b)`` without its outer pair of parentheses."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and position < len(text) - 1:
            return text
    return text[1:-1]


def _contract(statement: Contract) -> list[str]:
    """A product with packed right operand: over the whole depth, ``panel`` columns of one row stay in registers."""
    out, left, right = statement.out.name, statement.left.name, statement.right.name
    panels = -(-statement.columns // statement.panel)
    element = f"{left}[{statement.left_offset} + m * {statement.left_stride} + k]"
    first = f"{out}[{statement.out_offset} + m * {statement.out_stride} + p * {statement.panel} + lane]"
    start = first if statement.accumulate else "0"
    lanes = f"for (int64_t lane = 0; lane < {statement.panel}; ++lane)"
    return [
        f"for (int64_t p = 0; p < {panels}; ++p) {{",
        f"    for (int64_t m = 0; m < {statement.rows}; ++m) {{",
        f"        {statement.out.ctype} sums[{statement.panel}];",
        f"        {lanes} sums[lane] = {start};",
        f"        for (int64_t k = 0; k < {statement.depth}; ++k) {{",
        f"            const {statement.left.ctype} a = {element};",
        f"            const {statement.right.ctype} *b = {right} + (p * {statement.depth} + k) * {statement.panel};",
        f"            {lanes} sums[lane] = fuse_fma(a, b[lane], sums[lane]);",
        "        }",
        f"        {lanes} {first} = sums[lane];",
        "    }",
        "}",
    ]
