"""Inverses, solutions and factors of small matrices in a step of a loop.

for matrices of the batch (parallel):
    MATRIX_0 = the matrix;  MATRIX_1 = the right-hand sides
    MATRIX_2 = solution of MATRIX_0, MATRIX_1;  fail if MATRIX_0 is nearly singular
    store MATRIX_2

``small_matrices.h`` has the algorithms, which are LAPACK's. Where a pivot may be nothing but rounding errors, rounding
decides whether eager raises. There, and where a number is not finite, the kernel fails, and the call runs eager.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from functools import reduce

import torch

from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.extents import pinned
from fuse.kernel.arithmetic.index import Affine, offset
from fuse.kernel.elements import Builder
from fuse.kernel.ir import Buffer, Declare, Load, Solve, Statement, Store
from fuse.kernel.nest import Dimension, Sink
from fuse.kernel.recipes.registry import Call, Result, Unsupported
from fuse.kernel.values import Input, Solved, SolveKind, Value, permute, view

aten = torch.ops.aten

MOST_ROWS = 16
"""Most rows of a matrix, and most columns of a right-hand side: beside the library's work for larger ones its call is
short, and one thread holds all matrices of a statement on its stack."""

Keep = Callable[[Value], Input]
"""Stores a value before any is read."""


def solved(call: Call, keep: Keep, read: Set[object]) -> Result:
    """The results of an operator in ``OPS``; ``read`` has the positions of those that are read."""
    return OPS[call.op](call, keep, read)


def _inverse(call: Call, keep: Keep, read: Set[object]) -> Result:
    matrix = _checked(call).tensor("A")
    return _solution(call, keep, "inverse", matrix), None


def _solve(call: Call, keep: Keep, read: Set[object]) -> Result:
    """The solution, and what the backward pass reads: the factors of the matrix, and its pivots."""
    matrix, right = _checked(call).tensor("A"), call.tensor("B")
    if not call["left"]:
        raise Unsupported("the unknown matrix is the left factor")
    held, columns = keep(matrix), right
    if right.shape == matrix.shape[:-1]:
        columns = view(right, (*right.shape, 1))
    solution = view(_solution(call, keep, "solution", held, columns), right.shape)
    factors = _solution(call, keep, "factors", held) if 1 in read else None
    pivots = keep(Solved(matrix.shape[:-1], torch.int32, (held,), "pivots")) if 2 in read else None
    return solution, factors, pivots, None


def _cholesky(call: Call, keep: Keep, read: Set[object]) -> Result:
    matrix = _checked(call).tensor("self")
    if call["upper"]:
        return _transposed(_solution(call, keep, "cholesky", _transposed(matrix))), None
    return _solution(call, keep, "cholesky", matrix), None


def _triangular(call: Call, keep: Keep, read: Set[object]) -> Result:
    """``X @ A = B`` is solved as ``A.mT @ X.mT = B.mT``."""
    matrix, right, upper = call.tensor("self"), call.tensor("B"), call["upper"]
    if not call["left"]:
        matrix, right, upper = _transposed(matrix), _transposed(right), not upper
    unit: tuple[SolveKind, SolveKind] = ("unit_lower", "unit_upper")
    kinds: tuple[SolveKind, SolveKind] = unit if call["unitriangular"] else ("lower", "upper")
    solution = _solution(call, keep, kinds[upper], matrix, right)
    return solution if call["left"] else _transposed(solution)


def _cholesky_solve(call: Call, keep: Keep, read: Set[object]) -> Result:
    """``L @ L.mT @ X = B``."""
    factor = call.tensor("input2")
    lower = _transposed(factor) if call["upper"] else factor
    half = _solution(call, keep, "lower", lower, call.tensor("self"))
    return _solution(call, keep, "upper", _transposed(lower), half)


def _solve_with_factors(call: Call, keep: Keep, read: Set[object]) -> Result:
    if not call["left"]:
        raise Unsupported("the unknown matrix is the left factor")
    kind: SolveKind = "with_factors_transposed" if call["adjoint"] else "with_factors"
    return _solution(call, keep, kind, call.tensor("LU"), call.tensor("B"), pivots=call.tensor("pivots"))


OPS: Mapping[object, Callable[[Call, Keep, Set[object]], Result]] = {
    aten.linalg_inv_ex.default: _inverse,
    aten._linalg_solve_ex.default: _solve,
    aten.linalg_cholesky_ex.default: _cholesky,
    aten.linalg_solve_triangular.default: _triangular,
    aten.cholesky_solve.default: _cholesky_solve,
    aten.linalg_lu_solve.default: _solve_with_factors,
}


def _checked(call: Call) -> Call:
    if not call["check_errors"]:
        raise Unsupported(f"{call.op.overloadpacket.__name__} does not check for errors")
    return call


def _solution(call: Call, keep: Keep, kind: SolveKind, *matrices: Value, pivots: Value | None = None) -> Input:
    name = call.op.overloadpacket.__name__
    batch = matrices[0].shape[:-2]
    for matrix in matrices:
        if matrix.dtype not in (torch.float32, torch.float64):
            raise Unsupported(f"{name} is of {matrix.dtype}")
        if matrix.shape[:-2] != batch:
            raise Unsupported(f"the matrices of {name} are broadcast")
        if not all(0 < pinned(extent) <= MOST_ROWS for extent in matrix.shape[-2:]):
            raise Unsupported(f"{name} is of matrices with more than {MOST_ROWS} rows or columns, or with none")
    sources = tuple(map(keep, matrices if pivots is None else (*matrices, pivots)))
    return keep(Solved(matrices[-1].shape, matrices[0].dtype, sources, kind))


def _transposed(value: Value) -> Value:
    rank = len(value.shape)
    return permute(value, [*range(rank - 2), rank - 1, rank - 2])


def solve_nest(
    target: Sink, inputs: list[Buffer], names: Mapping[int, str], dimensions: Sequence[Dimension]
) -> list[Statement]:
    """The loops that store ``target``, whose value is solved; ``dimensions`` are those of the batch.

    Raises:
        SplitNeeded, NotAffine: see :mod:`fuse.kernel.arithmetic.index`.
    """
    value = target.value
    assert isinstance(value, Solved)
    batch, matrices = tuple(dimension.index() for dimension in dimensions), (*value.sources, value)
    inner = [_inner_loops(one, number, len(batch)) for number, one in enumerate(matrices)]
    extents = {a: e for d in dimensions for a, e in zip(d.atoms, d.extents, strict=True)}
    builder = Builder(inputs, reduce(operator.or_, inner, extents), names)
    *sources, solution = (
        Buffer(builder.fresh(f"MATRIX_{n}"), register(one.dtype), "scratch", math.prod(inner[n].values()))
        for n, one in enumerate(matrices)
    )
    for atom in extents:
        builder.open(atom, "parallel")
    for buffer, source, loops in zip(sources, value.sources, inner, strict=False):
        builder.add(Declare(buffer))
        for atom in loops:
            builder.open(atom, "serial")
        element = builder.element(source, (*batch, *map(Affine.of, loops)))
        builder.add(Store(buffer, _place(loops), element))
        for _ in loops:
            builder.close()
    rows, *columns = inner[-1].values()
    builder.add(Declare(solution))
    builder.add(Solve(value.kind, solution, tuple(sources), rows, math.prod(columns)))
    for atom in inner[-1]:
        builder.open(atom, "serial")
    found = Load(builder.fresh("solution"), solution, _place(inner[-1]))
    there = offset((*batch, *map(Affine.of, inner[-1])), target.strides) + target.start
    builder.add(found)
    builder.add(Store(target.buffer, there, found.variable))
    for _ in (*inner[-1], *extents):
        builder.close()
    return builder.blocks[0].statements


def _inner_loops(matrix: Value, number: int, batch: int) -> dict[str, int]:
    """The loop variables of a matrix, or of a vector, with their extents."""
    shape = map(pinned, matrix.shape[batch:])
    return {f"{axis}_{number}": extent for axis, extent in zip(("row", "column"), shape, strict=False)}


def _place(loops: Mapping[str, int]) -> Affine:
    """The place of an element in scratch memory."""
    return offset(tuple(map(Affine.of, loops)), contiguous_strides(tuple(loops.values())))
