"""Print a kernel body as readable C++.

A kernel is one ``extern "C"`` function of scalar code in plain loops. The compiler vectorises it (``#pragma omp
simd``), and OpenMP splits outer loops over threads if there is enough work. The user's lines stand above it as a
comment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch

from fuse.kernel.arithmetic.expressions import Expression, Variable, position
from fuse.kernel.arithmetic.extents import is_multiple, varies
from fuse.kernel.arithmetic.index import ZERO, Affine
from fuse.kernel.config import Threads
from fuse.kernel.cpu import cpp_types
from fuse.kernel.cpu.printer import text
from fuse.kernel.cpu.work import PARALLEL_WORK, perfectly_nested, splits, work, works
from fuse.kernel.ir import (
    Accumulate,
    Accumulator,
    Buffer,
    Comment,
    Declare,
    Fail,
    For,
    KernelBody,
    Let,
    Load,
    Pointer,
    Rank,
    Scope,
    Solve,
    Statement,
    Store,
    better,
    combined,
    identity,
)
from fuse.kernel.recipes.registry import Unsupported
from fuse.kernel.sizes.members import Members

CHUNKS = 64
"""Parts of a sum that is split over threads. The number is fixed, so that the result does not depend on the threads."""

_INDENT = "    "
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
_BLOCK = 64
"""Bools stored together: the widest register holds 64 bytes."""
SHORT = 1024
"""Longest loop whose time depends noticeably on the iterations after the last whole vector."""
_INTEGER_CLAUSE = _CLAUSE | {"max": "max", "min": "min"}


def emit(body: KernelBody, name: str, threads: Threads = "if worth it", members: Members | None = None) -> str:
    """The C++ source of a kernel ``extern "C" int name(char *const *args)``; ``args`` are inputs, then outputs, or
    those of all ``members``, which run ``body``.

    The kernel returns 0; or 1, without writing anything, if an index is out of range.
    """
    lines = [f"// {line}" for line in body.lines]
    lines.append(f'extern "C" int {name}(char *const *args) {{')
    if members is not None:
        lines += _loop_over(members, body, threads)
    else:
        for number, buffer in enumerate((*body.inputs, *body.outputs)):
            lines.append(_INDENT + argument(buffer, number))
        for statement in body.statements:
            lines += _statement(statement, 1, threads)
    lines += [f"{_INDENT}return 0;", "}"]
    return "\n".join(lines) + "\n"


def _loop_over(members: Members, body: KernelBody, threads: Threads) -> list[str]:
    """The lines of a loop over members, which is split over threads where those of one member are not."""
    if any(isinstance(statement, Fail) for statement in _all(body.statements)):
        raise Unsupported("one of several members may fail after others have written their results")
    each = sum(works(body))
    condition = ""
    if threads == "decided in each call":
        condition = f"if(parallel : {each} < {PARALLEL_WORK} && {members.count * each} >= {PARALLEL_WORK})"
    elif threads == "if worth it" and each < PARALLEL_WORK <= members.count * each:
        condition, threads = " ", "one"
    lines = [f"#pragma omp parallel for {condition}".rstrip()] if condition else []
    lines.append(f"for (int64_t member = 0; member < {members.count}; ++member) {{")
    for buffer, at in zip((*body.inputs, *body.outputs), members.places, strict=True):
        number, element = (
            Affine.of("member") * step + first for first, step in ((at.first, at.step), (0, at.elements))
        )
        lines.append(_INDENT + argument(buffer, number, element))
    for statement in body.statements:
        lines += _statement(statement, 1, threads)
    return [_INDENT + line for line in [*lines, "}"]]


def _all(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Statements, and those inside them."""
    for statement in statements:
        yield statement
        if isinstance(statement, (For, Scope)):
            yield from _all(statement.body)


def with_sizes(source: str, names: Sequence[str], arguments: int, reals: Sequence[str] = ()) -> str:
    """The source of a kernel that reads sizes ``names`` from the argument after ``arguments`` others.

    Sizes among ``reals`` are passed as the bits of a double.
    """
    head, opening, rest = source.partition("(char *const *args) {")
    lines = [f"    const int64_t *sizes = (const int64_t *)args[{arguments}];"]
    for number, name in enumerate(names):
        kind, value = (
            ("double", f"((const double *)sizes)[{number}]") if name in reals else ("int64_t", f"sizes[{number}]")
        )
        lines.append(f"    const {kind} {name} = {value};")
    return "\n".join([f"{head}{opening}", *lines, rest.removeprefix("\n")])


def argument(buffer: Buffer, number: int | Affine, element: Affine = ZERO) -> str:
    """The C++ declaration of a kernel's argument, by its number, from this element on."""
    pointer = f"{'const ' if buffer.role == 'input' else ''}{cpp_types.storage(buffer.dtype)} *"
    from_there = "" if element == ZERO else f" + {element}"
    return f"{pointer}{buffer.name} = ({pointer})args[{number}]{from_there};"


def text_of(statements: Iterable[Statement], depth: int) -> list[str]:
    """The C++ lines of statements, indented by ``depth`` levels; no loop is split over threads."""
    return [line for statement in statements for line in _statement(statement, depth)]


def _statement(statement: Statement, depth: int, threads: Threads = "one") -> list[str]:
    pad = _INDENT * depth
    match statement:
        case Load():
            return [f"{pad}const {_typed(statement.variable)} = {_load(statement)};"]
        case Let():
            return [f"{pad}const {_typed(statement.variable)} = {text(statement.value)};"]
        case Pointer():
            where = f"{statement.base} + {statement.offset}".replace("+ -", "- ")
            return [f"{pad}const auto {statement.name} = {where};"]
        case Store():
            value = cpp_types.stored(statement.buffer.dtype, text(statement.value))
            return [f"{pad}{statement.buffer.name}[{statement.offset}] = {value};"]
        case Accumulator():
            return [pad + line for line in _accumulator(statement)]
        case Accumulate():
            return [pad + _accumulate(statement)]
        case Declare():
            buffer = statement.buffer
            return [f"{pad}alignas(64) {cpp_types.storage(buffer.dtype)} {buffer.name}[{buffer.extent}];"]
        case Rank():
            how = f"{str(statement.largest).lower()}, Order::{statement.order}"
            row, best = statement.row, statement.best
            return [f"{pad}fuse_rank<{how}>({row.name}, {row.extent}, {best.extent}, {best.name});"]
        case Solve():
            size = f"{statement.rows}, {statement.columns}"
            matrices = ", ".join(buffer.name for buffer in (statement.solution, *statement.sources))
            return [f"{pad}if (!fuse_{statement.kind}<{size}>({matrices})) return 1;"]
        case Fail():
            return [f"{pad}if ({statement.condition}) return 1;"]
        case Comment():
            return [f"{pad}// {statement.text}"]
        case Scope():
            inner = [line for s in statement.body for line in _statement(s, depth + 1, threads)]
            return [f"{pad}{{", *inner, f"{pad}}}"]
        case For():
            return _loop(statement, depth, threads)


def _loop(loop: For, depth: int, threads: Threads) -> list[str]:
    pad = _INDENT * depth
    lines = []
    if _reduces_in_lanes(loop, threads):
        return [pad + line for line in _in_lanes(loop)]
    if sums := _sums_to_share_out(loop, threads):
        return [pad + line for line in _in_chunks(loop, sums, threads)]
    if _stores_bools_beside_numbers(loop) and not splits(loop, threads):
        return [pad + line for line in _with_bools_apart(loop)]
    pragma = _pragma(loop, threads)
    if pragma:
        lines.append(f"{pad}#pragma omp {pragma}")
    lines.append(f"{pad}{_heading(loop)}")
    for statement in loop.body:
        lines += _statement(statement, depth + 1)
    lines.append(f"{pad}}}")
    return lines


def _reduces_in_lanes(loop: For, threads: Threads) -> bool:
    """Whether to write a reducing vector loop with explicit lanes, including the iterations after the last whole
    vector.

    Compilers run those iterations one by one.
    """
    whole = loop.kind == "vector" and loop.bounds is None and (varies(loop.extent) or loop.extent >= _LANES)
    known = all(a.op in _IN_LANES and a.dtype.is_floating_point for a in loop.reduces)
    return bool(whole and known and loop.reduces and not splits(loop, threads))


def _in_lanes(loop: For) -> list[str]:
    """The lines of a reducing loop with an array of lanes, each a partial result, combined at the end."""
    first = f"{loop.atom}_first"
    lines: list[str] = []
    after: list[str] = []
    for accumulator in loop.reduces:
        name, lanes = accumulator.name, f"{accumulator.name}_lanes"
        start = text(identity(accumulator.op, accumulator.dtype))
        lines.append(f"alignas(64) {cpp_types.register(accumulator.dtype)} {lanes}[{_LANES}];")
        lines.append(f"fuse_start_lanes<{_LANES}>({lanes}, {start});")
        both = f"[](auto a, auto b) {{ return {_combined(accumulator, 'a', 'b')}; }}"
        across = f"fuse_across<{_LANES // 2}>({lanes}, {both})"
        after.append(f"{name} = {_combined(accumulator, name, across)};")
    if is_multiple(loop.extent, _LANES):
        heading = f"for (int64_t {first} = 0; {first} < {loop.extent}; {first} += {_LANES}) {{"
        return [*lines, heading, *_vector(loop, first), "}", *after]
    last = f"{loop.atom}_last"
    lines.append(f"const int64_t {last} = {loop.extent};")
    lines.append(f"int64_t {first} = 0;")
    heading = f"for (; {first} + {_LANES} <= {last}; {first} += {_LANES}) {{"
    rest = [f"if ({first} < {last}) {{", *_part_of_a_vector(loop, first, last), "}"]
    return ["{", *(_INDENT + line for line in [*lines, heading, *_vector(loop, first), "}", *rest, *after]), "}"]


def _vector(loop: For, first: str) -> list[str]:
    """The lines for one whole vector of a loop with lanes."""
    before: list[str] = []
    body: list[str] = []
    for statement in loop.body:
        if isinstance(statement, Accumulate):
            lane = f"{statement.accumulator.name}_lanes[{loop.atom} - {first}]"
            body.append(f"{lane} = {_combined(statement.accumulator, lane, statement.value)};")
        elif isinstance(statement, Load) and _reads_bools(statement, loop.atom):
            before += _bool_loads(statement, loop.atom, first)
            body.append(f"const bool {statement.name} = {statement.name}_lanes[{loop.atom} - {first}] != 0;")
        else:
            body += _statement(statement, 0)
    return [
        *(_INDENT + line for line in before),
        f"{_INDENT}#pragma omp simd",
        f"{_INDENT}for (int64_t {loop.atom} = {first}; {loop.atom} < {first} + {_LANES}; ++{loop.atom}) {{",
        *(2 * _INDENT + line for line in body),
        f"{_INDENT}}}",
    ]


def _part_of_a_vector(loop: For, first: str, last: str) -> list[str]:
    """The lines for the iterations after the last whole vector, as one vector.

    Lanes from ``last`` on compute with zeros, which is safe because no kernel divides by integers from memory.
    Compilers do not vectorise a short loop with ``last`` as its bound.
    """
    lane, count = f"{loop.atom}_lane", f"{loop.atom}_count"
    before = [f"const int32_t {count} = fuse_unknown((int32_t)({last} - {first}));"]
    body = [f"const int64_t {loop.atom} = {first} + {lane};"]
    inside = f"{lane} < {count}"
    for statement in loop.body:
        match statement:
            case Accumulate(accumulator=of):
                so_far, start = f"{of.name}_lanes[{lane}]", text(identity(of.op, of.dtype))
                value = f"{inside} ? {text(statement.value)} : {start}"
                body.append(f"const {cpp_types.register(of.dtype)} {of.name}_next = {value};")
                body.append(f"{so_far} = {_combined(of, so_far, f'{of.name}_next')};")
            case Load() if _reads_bools(statement, loop.atom):
                before += _bool_loads(statement, loop.atom, first, count)
                body.append(f"const bool {statement.name} = {statement.name}_lanes[{lane}] != 0;")
            case Load():
                zero = f"{cpp_types.register(statement.buffer.dtype)}(0)"
                body.append(f"const {_typed(statement.variable)} = {inside} ? ({_load(statement)}) : {zero};")
            case Store(buffer=Buffer(extent=room)) if room:  # a scratch row, padded to whole vectors
                body += _statement(statement, 0)
            case Store():
                body += [f"if ({inside}) {{", *_statement(statement, 1), "}"]
            case _:
                body += _statement(statement, 0)
    return [
        *(_INDENT + line for line in before),
        f"{_INDENT}#pragma omp simd",
        f"{_INDENT}for (int32_t {lane} = 0; {lane} < {_LANES}; ++{lane}) {{",
        *(2 * _INDENT + line for line in body),
        f"{_INDENT}}}",
    ]


def _bool_loads(load: Load, atom: str, first: str, count: str = "") -> list[str]:
    """The lines that load the bools of a vector, or the first ``count`` of them, as integers."""
    where = load.offset.without(atom) + Affine.of(first)
    given = f"{load.name}_lanes, {load.buffer.name} + {where}{f', {count}' if count else ''}"
    return [f"alignas(64) int32_t {load.name}_lanes[{_LANES}];", f"fuse_truths({given});"]


def _sums_to_share_out(loop: For, threads: Threads) -> list[Accumulator]:
    """The accumulators of a loop that is split over threads, if it has floating-point sums, whose order matters."""
    sums = list(loop.reduces) if splits(loop, threads) else []
    rounded = any(a.op in ("sum", "prod") and a.dtype.is_floating_point for a in sums)
    in_order = any(a.op in ("argmax", "argmin") for a in sums)
    return sums if rounded and not in_order else []


def _in_chunks(loop: For, sums: Sequence[Accumulator], threads: Threads) -> list[str]:
    """The lines of a loop whose chunks of iterations have partial sums, which are added in order."""
    chunk = f"{loop.atom}_chunk"
    first = Affine.of(chunk) * loop.extent
    inside = replace(
        loop,
        kind="vector" if loop.kind == "vector" else "serial",
        bounds=(position(first) // CHUNKS, position(first + loop.extent) // CHUNKS),
    )
    condition = f" if(parallel : {work(loop)} >= {PARALLEL_WORK})" if threads == "decided in each call" else ""
    heading = f"for (int64_t {chunk} = 0; {chunk} < {CHUNKS}; ++{chunk}) {{"
    own = [line for a in sums for line in _accumulator(a)]
    kept = [f"{a.name}_parts[{chunk}] = {a.name};" for a in sums]
    added = [f"{a.name} = {_combined(a, a.name, f'{a.name}_parts[{chunk}]')};" for a in sums]
    return [
        *(f"{cpp_types.register(a.dtype)} {a.name}_parts[{CHUNKS}];" for a in sums),
        f"#pragma omp parallel for{condition}",
        heading,
        *(_INDENT + line for line in [*own, *_loop(inside, 0, "one"), *kept]),
        "}",
        heading,
        *(_INDENT + line for line in added),
        "}",
    ]


def _reads_bools(load: Load, atom: str) -> bool:
    """Whether a load reads contiguous bools along ``atom``; compilers do not vectorise these among floats."""
    return (
        load.buffer.dtype is torch.bool
        and not (load.guard or load.indirect)
        and load.offset.step(atom) == Affine((), 1)
    )


def _pragma(loop: For, threads: Threads) -> str:
    asked = threads == "decided in each call"
    shared = splits(loop, threads)
    sequential = any(a.op in ("argmax", "argmin") for a in loop.reduces)
    simd = loop.kind == "vector" and not sequential
    if sequential:
        return ""
    clauses = f" if(parallel : {work(loop)} >= {PARALLEL_WORK})" if shared and asked else ""
    clauses += "".join(f" reduction({_clause(a)} : {a.name})" for a in loop.reduces)
    if shared and loop.kind == "parallel":
        levels = perfectly_nested(loop)
        return "parallel for" + (f" collapse({levels})" if levels > 1 else "") + clauses
    if shared and simd:
        return "parallel for simd" + clauses
    return "simd" + clauses if simd else ""


def _stores_bools_beside_numbers(loop: For) -> bool:
    """Whether a short vector loop stores bools, and loads or stores wider elements too.

    Compilers make vectors of as many elements as a register has bytes, and run the iterations after the last whole
    vector one by one, with branches on the data. With an explicit vector length, they use a quarter of it.
    """
    few = loop.bounds is not None or type(loop.extent) is not int or loop.extent < SHORT
    whole = loop.bounds is None and is_multiple(loop.extent, 2 * _LANES)
    buffers = {s.buffer.dtype for s in loop.body if isinstance(s, (Load, Store))}
    beside = any(dtype.itemsize > 1 for dtype in buffers) and any(_stores_bools(s, loop.atom) for s in loop.body)
    return loop.kind == "vector" and not loop.reduces and few and not whole and beside


def _stores_bools(statement: Statement, atom: str) -> bool:
    """Whether a statement stores contiguous bools along ``atom``."""
    side_by_side = isinstance(statement, Store) and statement.offset.step(atom) == Affine((), 1)
    return side_by_side and cast(Store, statement).buffer.dtype is torch.bool


def _with_bools_apart(loop: For) -> list[str]:
    """The lines of a loop in blocks, where bools are kept as 32-bit integers and stored at the end of each block."""
    first, last = f"{loop.atom}_first", f"{loop.atom}_last"
    lanes: list[str] = []
    after: list[str] = []
    body: list[str] = []
    for statement in loop.body:
        if isinstance(statement, Store) and _stores_bools(statement, loop.atom):
            name = f"{statement.buffer.name}_lanes{len(lanes) or ''}"
            where = statement.offset.without(loop.atom) + Affine.of(first)
            lanes.append(f"alignas(64) int32_t {name}[{_BLOCK}];")
            body.append(f"{name}[{loop.atom} - {first}] = {text(statement.value)};")
            after.append(f"fuse_store_truths({statement.buffer.name} + {where}, {name}, {last} - {first});")
        else:
            body += _statement(statement, 0)
    begin, end = loop.bounds or (position(0), position(loop.extent))
    return [
        f"for (int64_t {first} = {text(begin)}; {text(position(first) < end)}; {first} += {_BLOCK}) {{",
        f"{_INDENT}const int64_t {last} = fuse_least({first} + {_BLOCK}, {text(end)});",
        *(_INDENT + line for line in lanes),
        f"{_INDENT}#pragma omp simd",
        f"{_INDENT}for (int64_t {loop.atom} = {first}; {loop.atom} < {last}; ++{loop.atom}) {{",
        *(2 * _INDENT + line for line in body),
        f"{_INDENT}}}",
        *(_INDENT + line for line in after),
        "}",
    ]


def _heading(loop: For) -> str:
    first, last = loop.bounds or (position(0), position(loop.extent))
    return f"for (int64_t {loop.atom} = {text(first)}; {text(position(loop.atom) < last)}; ++{loop.atom}) {{"


def _clause(accumulator: Accumulator) -> str:
    table = _CLAUSE if accumulator.dtype.is_floating_point else _INTEGER_CLAUSE
    return table[accumulator.op]


def _combined(accumulator: Accumulator, so_far: str, element: Expression | str) -> str:
    """``op(so_far, element)`` as C++, in a form that compilers recognise as a reduction."""
    if isinstance(element, str):
        element = Variable(accumulator.dtype, element)
    if accumulator.op == "sum" and not accumulator.dtype.is_floating_point:
        return f"{so_far} + {text(element)}"
    return text(combined(accumulator.op, Variable(accumulator.dtype, so_far), element))


def _accumulator(accumulator: Accumulator) -> list[str]:
    start = text(identity(accumulator.op, accumulator.dtype))
    lines = [f"{_typed(Variable(accumulator.dtype, accumulator.name))} = {start};"]
    if accumulator.op in ("argmax", "argmin"):
        lines.append(f"{_typed(accumulator.result)} = -1;")
    return lines


def _accumulate(statement: Accumulate) -> str:
    accumulator, value = statement.accumulator, statement.value
    name, op = accumulator.name, accumulator.op
    if op in ("argmax", "argmin"):
        test = text(better(op, value, Variable(accumulator.dtype, name), accumulator.result))
        return f"if ({test}) {{ {name} = {text(value)}; {name}_at = {statement.position}; }}"
    return f"{name} = {_combined(accumulator, name, value)};"


def _load(load: Load) -> str:
    where = str(load.offset)
    for term in load.indirect:
        where += f" + {text(term.position)} * {term.stride}" if term.stride != 1 else f" + {text(term.position)}"
    element = cpp_types.loaded(load.buffer.dtype, f"{load.buffer.name}[{where}]")
    otherwise = f"{cpp_types.register(load.buffer.dtype)}(0)"
    return f"{text(load.guard)} ? {element} : {otherwise}" if load.guard is not None else element


def _typed(variable: Variable) -> str:
    return f"{cpp_types.register(variable.dtype)} {variable.name}"
