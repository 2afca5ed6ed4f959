"""The kernel IR as text: what ``fuse show --kernels=ir`` prints.

    kernel tanh_add(x: float32) -> (out0: float32)
        for i0 in 4 (parallel):
            for i1 in 8 (vector):
                x_at = load x[8 * i0 + i1]
                store out0[8 * i0 + i1] = tanh(x_at) + 1.0

Offsets count elements of a buffer. Conversions are explicit (``to_float32``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fuse.graph.describing import dtype_name
from fuse.kernel.arithmetic.expressions import Variable
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
    better,
    combined,
    identity,
)
from fuse.kernel.values import RankOrder

_INDENT = "    "
_ORDERS: Mapping[RankOrder, str] = {
    "topk": "in order",
    "any": "in any order",
    "sort": "in order",
    "stable": "in order, equal ones as they come",
}


def text_of_body(body: KernelBody, name: str) -> str:
    """A kernel as text: the user's lines, the inputs and outputs, the statements.

    >>> import torch
    >>> from fuse.kernel.arithmetic.expressions import fn
    >>> from fuse.kernel.arithmetic.index import Affine
    >>> x, y = Buffer("x", torch.float32, "input"), Buffer("y", torch.float32, "output")
    >>> load = Load("x_at", x, Affine.of("i") * 2)
    >>> loop = For("i", 8, (load, Store(y, Affine.of("i"), fn.tanh(load.variable))), "vector")
    >>> print(text_of_body(KernelBody((x,), (y,), (loop,), ("model.py:3  tanh",)), "example"))
    # model.py:3  tanh
    kernel example(x: float32) -> (y: float32)
        for i in 8 (vector):
            x_at = load x[2 * i]
            store y[i] = tanh(x_at)
    """
    lines = [f"# {line}" for line in body.lines]
    lines.append(f"kernel {name}({_buffers(body.inputs)}) -> ({_buffers(body.outputs)})")
    return "\n".join([*lines, *_block(body.statements)])


def _buffers(buffers: Iterable[Buffer]) -> str:
    return ", ".join(f"{buffer.name}: {dtype_name(buffer.dtype)}" for buffer in buffers)


def _block(statements: Iterable[Statement]) -> list[str]:
    return [_INDENT + line for statement in statements for line in _lines(statement)]


def _lines(statement: Statement) -> list[str]:
    match statement:
        case Load():
            otherwise = f" if {statement.guard} else 0" if statement.guard is not None else ""
            return [f"{statement.name} = load {statement.buffer.name}[{_address(statement)}]{otherwise}"]
        case Let():
            return [f"{statement.name} = {statement.value}"]
        case Pointer():
            return [f"{statement.name} = {statement.base} from element {statement.offset} on"]
        case Store():
            return [f"store {statement.buffer.name}[{statement.offset}] = {statement.value}"]
        case Accumulator():
            where = f", {statement.result.name} = -1" if _remembers(statement) else ""
            return [f"{statement.name} = {identity(statement.op, statement.dtype)}{where}"]
        case Accumulate():
            return [_accumulated(statement)]
        case Declare():
            buffer = statement.buffer
            return [f"memory {buffer.name}: {buffer.extent} of {dtype_name(buffer.dtype)}"]
        case Rank():
            kind = "largest" if statement.largest else "smallest"
            return [
                f"{statement.best.name} = positions of the {kind} of {statement.row.name}, {_ORDERS[statement.order]}"
            ]
        case Solve():
            sources = ", ".join(buffer.name for buffer in statement.sources)
            return [f"{statement.solution.name} = {statement.kind} of {sources}; fail if it may not exist"]
        case Fail():
            return [f"fail if {statement.condition}"]
        case Comment():
            return [f"# {statement.text}"]
        case Scope():
            return ["nest:", *_block(statement.body)]
        case For():
            return [_heading(statement), *_block(statement.body)]


def _address(load: Load) -> str:
    return " + ".join([str(load.offset), *map(_looked_up, load.indirect)])


def _looked_up(term: Indirect) -> str:
    return f"{term.stride} * {term.position}" if term.stride != 1 else str(term.position)


def _heading(loop: For) -> str:
    reduced = ", ".join(accumulator.name for accumulator in loop.reduces)
    kinds = [*([loop.kind] if loop.kind != "serial" else []), *([f"reduces {reduced}"] if reduced else [])]
    first_and_last = f"{loop.bounds[0]} ... {loop.bounds[1]} - 1" if loop.bounds else str(loop.extent)
    return f"for {loop.atom} in {first_and_last}{' (' + ', '.join(kinds) + ')' if kinds else ''}:"


def _remembers(accumulator: Accumulator) -> bool:
    """Whether an accumulator keeps the position of an element beside the element."""
    return accumulator.op in ("argmax", "argmin")


def _accumulated(statement: Accumulate) -> str:
    accumulator, value = statement.accumulator, statement.value
    so_far = Variable(accumulator.dtype, accumulator.name)
    if not _remembers(accumulator):
        return f"{so_far} = {combined(accumulator.op, so_far, value)}"
    test = better(accumulator.op, value, so_far, accumulator.result)
    return f"{so_far}, {accumulator.result} = {value}, {statement.position} if {test}"
