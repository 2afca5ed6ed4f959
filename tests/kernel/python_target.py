"""A target of the kernel IR that is not C++: it prints Python, a NumPy number at a time, and runs it.

    for i in range(0, 4):                     for (int64_t i = 0; i < 4; ++i) {
        x_at = load(x, 2 * i)                     const float x_at = x[2 * i];
        store(out0, i, x_at * f32(0.5))           out0[i] = x_at * 0.5f;
                                              }

It shows that the IR says all that a target needs to know, and says what it means where C++ and it differ.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuse.graph.describing import dtype_name
from fuse.graph.loop import Loop
from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.expressions import (
    CALL,
    CHOICE,
    SYMBOLS,
    Expression,
    Literal,
    Notation,
    Operation,
    Parameter,
    Position,
    Template,
    Variable,
    render,
)
from fuse.kernel.config import Config
from fuse.kernel.definitions import defined, defined_loop
from fuse.kernel.ir import (
    Accumulate,
    Accumulator,
    Comment,
    Declare,
    Fail,
    For,
    KernelBody,
    Let,
    Load,
    Rank,
    Scope,
    Solve,
    Statement,
    Store,
    better,
    combined,
    identity,
)
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.lower import attempt
from fuse.kernel.names import fit_names
from fuse.kernel.packing import Packing
from fuse.kernel.target import LoopKernels, Target, Written
from fuse.kernel.values import Computation, RankOrder, SolveKind
from tests.kernel.expression_values import evaluate

NUMPY: Mapping[torch.dtype, type[Any]] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,  # its bits
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}
PYTHON_FORMS = {
    "select": Template("{1} if {0} else {2}", CHOICE, (CHOICE + 1, CHOICE + 1, CHOICE)),
    "and": Template("({} and {})", CALL, (0, 0)),
    "or": Template("({} or {})", CALL, (0, 0)),
    "quotient": Template("({} // {})", CALL, (0, 0)),
}


def text(expression: Expression) -> str:
    return render(expression, Notation(_leaf, _template))


def _leaf(leaf: Expression) -> str:
    match leaf:
        case Literal():
            return f"{dtype_name(leaf.dtype)}({float(leaf.number) if leaf.dtype.is_floating_point else leaf.number!r})"
        case Variable():
            return leaf.name
        case Position():
            return f"int64({leaf.index})"
    raise TypeError(f"{type(leaf).__name__} stands for nothing in Python")


def _template(whole: Operation) -> Template:
    """Symbols bind in Python as in C, but for comparisons, which it chains: each stands in parentheses."""
    form = PYTHON_FORMS.get(whole.operator) or SYMBOLS.get(whole.operator)
    if form is None:
        arguments = ", ".join(["{}"] * len(whole.operands))
        return Template(f"call({whole.operator!r}, {whole.dtype}, {arguments})", CALL, (0,) * len(whole.operands))
    return Template(f"({form.text})", CALL, (CALL,) * len(form.operands))


def python_of(body: KernelBody) -> str:
    """The source of a function ``kernel`` of arrays, inputs first, which answers whether an index was in range."""
    names = [buffer.name for buffer in (*body.inputs, *body.outputs)]
    lines = [f"def kernel({', '.join(names)}):", *_block(body.statements), "    return True"]
    return "\n".join(lines)


def _block(statements: Iterable[Statement]) -> list[str]:
    return ["    " + line for statement in statements for line in _lines(statement)] or ["    pass"]


def _lines(statement: Statement) -> list[str]:
    match statement:
        case Load():
            return [_load(statement)]
        case Let():
            return [f"{statement.name} = {text(statement.value)}"]
        case Store():
            place = f"{statement.buffer.name}, {statement.offset}, {statement.buffer.dtype}"
            return [f"store({place}, {text(statement.value)})"]
        case Accumulator():
            start = [f"{statement.name} = {text(identity(statement.op, statement.dtype))}"]
            return [*start, f"{statement.result.name} = int64(-1)"] if statement.op.startswith("arg") else start
        case Accumulate():
            return _accumulate(statement)
        case Declare():
            return [f"{statement.buffer.name} = array({statement.buffer.extent}, {statement.buffer.dtype})"]
        case Rank():
            how = f"{statement.largest}, {statement.order!r}"
            return [f"rank({statement.best.name}, {statement.row.name}, {how})"]
        case Solve():
            matrices = ", ".join(buffer.name for buffer in (statement.solution, *statement.sources))
            return [f"if not solve({statement.kind!r}, {statement.rows}, {matrices}): return False"]
        case Fail():
            return [f"if {statement.condition}: return False"]
        case Comment():
            return [f"# {statement.text}"]
        case For():
            first, last = map(text, statement.bounds) if statement.bounds else ("0", str(statement.extent))
            return [f"for {statement.atom} in range({first}, {last}):", *_block(statement.body)]
        case Scope():
            return ["if True:", *_block(statement.body)]
    raise TypeError(f"{type(statement).__name__} has no Python")


def _load(load: Load) -> str:
    looked_up = (f"int({text(term.position)}) * {term.stride}" for term in load.indirect)
    where = " + ".join([str(load.offset), *looked_up])
    element = f"{load.name} = load({load.buffer.name}, {where}, {load.buffer.dtype})"
    if load.guard is None:
        return element
    return f"{element} if {text(load.guard)} else {dtype_name(register(load.buffer.dtype))}(0)"


def _accumulate(statement: Accumulate) -> list[str]:
    accumulator, value = statement.accumulator, statement.value
    so_far = Variable(accumulator.dtype, accumulator.name)
    if not accumulator.op.startswith("arg"):
        return [f"{so_far.name} = {text(combined(accumulator.op, so_far, value))}"]
    test = text(better(accumulator.op, value, so_far, accumulator.result))
    position = f"int64({statement.position})"
    return [f"if {test}: {so_far.name}, {accumulator.result.name} = {text(value)}, {position}"]


# ---- what the printed source calls -----------------------------------------------------------------------------------


def load(memory: Any, where: int, dtype: torch.dtype) -> Any:
    element = memory[where]
    if dtype is torch.bfloat16:
        return (np.uint32(element) << np.uint32(16)).view(np.float32)
    return np.float32(element) if dtype is torch.float16 else element


def store(memory: Any, where: int, dtype: torch.dtype, value: Any) -> None:
    if dtype is torch.bfloat16:
        value = torch.tensor(float(value)).bfloat16().view(torch.uint16).item()
    memory[where] = value


def array(extent: int, dtype: torch.dtype) -> Any:
    return np.zeros(extent, NUMPY[dtype])


def rank(best: Any, row: Any, largest: bool, order: RankOrder) -> None:
    elements = torch.from_numpy(row)
    if order in ("topk", "any"):
        best[:] = torch.topk(elements, len(best), largest=largest, sorted=order == "topk").indices
    else:
        best[:] = torch.sort(elements, descending=largest, stable=order == "stable").indices


def solve(kind: SolveKind, rows: int, solution: Any, *sources: Any) -> bool:
    a, *right = (torch.from_numpy(source).reshape(rows, -1) for source in sources)
    try:
        made = SOLVERS[kind](a, *right)
    except torch.linalg.LinAlgError:
        return False
    solution[:] = made.reshape(-1).numpy()
    return True


SOLVERS: dict[SolveKind, Callable[..., torch.Tensor]] = {
    "inverse": torch.linalg.inv,
    "solution": torch.linalg.solve,
    "factors": lambda a: torch.linalg.lu_factor(a).LU,
    "pivots": lambda a: torch.linalg.lu_factor(a).pivots,
    "cholesky": torch.linalg.cholesky,
    "lower": lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
    "upper": lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
    "unit_lower": lambda a, b: torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True),
    "unit_upper": lambda a, b: torch.linalg.solve_triangular(a, b, upper=True, unitriangular=True),
    "with_factors": lambda a, b, pivots: torch.linalg.lu_solve(a, pivots[:, 0], b),
    "with_factors_transposed": lambda a, b, pivots: torch.linalg.lu_solve(a, pivots[:, 0], b, adjoint=True),
}


def call(operator: str, dtype: torch.dtype, *operands: Any) -> Any:
    """A function: the meaning of its operator."""
    given = [torch.from_numpy(np.asarray(operand)) for operand in operands]
    parameters = tuple(Parameter(value.dtype, i) for i, value in enumerate(given))
    return NUMPY[dtype](evaluate(Operation(dtype, operator, parameters), given).numpy())


SPACE: dict[str, Any] = {
    "load": load,
    "store": store,
    "array": array,
    "rank": rank,
    "solve": solve,
    "call": call,
    "torch": torch,
}
SPACE |= {"inf": math.inf, "nan": math.nan, **{dtype_name(dtype): number for dtype, number in NUMPY.items()}}


def run(body: KernelBody, tensors: Sequence[Tensor]) -> bool:
    """Run a kernel in Python on the memory of ``tensors``, inputs first."""
    return run_source(python_of(body), tensors)


def run_source(source: str, tensors: Sequence[Tensor]) -> bool:
    """Run the source of a kernel on the memory of ``tensors``, inputs first."""
    space = dict(SPACE)
    exec(source, space)
    kernel: Callable[..., bool] = space["kernel"]
    with np.errstate(all="ignore"):
        return kernel(*(_memory(tensor) for tensor in tensors))


def _memory(tensor: Tensor) -> Any:
    """The elements of a tensor's memory from its first one on."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((extent,), (1,))
    return (flat.view(torch.uint16) if tensor.dtype is torch.bfloat16 else flat).numpy()


def write(computation: Computation, name: str, config: Config) -> Written:
    """The Python of a region; its products are sums."""
    return Written(python_of(defined(fit_names(computation, keyword.iskeyword))))


def write_loop(
    loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor], made: LoopKernels | None = None
) -> Kernel | Declined:
    """The Python of a loop, time outermost."""
    if loop.spec.stop is not None:
        return Declined("a loop that may end early runs step by step")
    body = attempt(lambda: defined_loop(loop, operands, results, keyword.iskeyword))
    return body if isinstance(body, Declined) else Kernel("kernel", python_of(body), frozenset(), parallel=False)


def no_ends(*_: object) -> Declined:
    return Declined("what is in front of a loop and behind it runs apart")


TARGET = Target("cpu", Packing(panel=1, most_panels=1, largest_block=1 << 20), write, write_loop, no_ends, no_ends)
