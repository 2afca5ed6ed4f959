"""Canonical views, casts and elementwise terms: views move towards the leaves, and cancel where they can.

    reshape(tanh(x), [6])                       ->   tanh(reshape(x, [6]))
    reshape(mm(reshape(x, [8, 3]), w), [2, 4, 5])  ->   matmul(x, w)             x is [2, 4, 3]
    permute(permute(x, [1, 0]), [1, 0])         ->   x
    add(x, expand(b, [4, 8]))                   ->   add(x, b)                   broadcasting expands b anyway

So a linear layer over a sequence, and the captured product between two views, are one term. Every rule keeps each
element's value, and none examines the operands' operands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fuse.rewrite.dtypes import holds
from fuse.rewrite.patterns.terms import FILL, KNOWN, TensorType, Term, Terms

Shape = tuple[int, ...]


def reshape(terms: Terms, x: Term, shape: Sequence[int]) -> Term:
    """The elements of ``x``, in the same order, in another shape."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if x.name == FILL:
        return terms.fill(x.value, replace(x.type, shape=shape))
    if x.name == "reshape":
        return reshape(terms, x.operands[0], shape)
    if x.elementwise and (operands := _reshaped_operands(terms, x, shape)):
        tensor_type = replace(x.type, shape=shape)
        return pointwise(terms, x.name, operands, tensor_type, x.constants, commutative=x.commutative)
    if x.name == "matmul" and (product := _reshaped_product(terms, x, shape)):
        return product
    return terms.make("reshape", [x], replace(x.type, shape=shape))


def _reshaped_operands(terms: Terms, x: Term, shape: Shape) -> list[Term] | None:
    """The operands of an elementwise term for a result of another shape; None if an operand cannot be reshaped."""
    operands = []
    for operand in x.operands:
        if operand.name in KNOWN and not operand.shape:
            operands.append(operand)
        elif operand.shape == x.shape:
            operands.append(reshape(terms, operand, shape))
        elif math.prod(operand.shape) == 1:
            operands.append(operand)
        elif _is_row(operand.shape, x.shape) and shape[-1:] == x.shape[-1:]:
            operands.append(reshape(terms, operand, operand.shape[-1:]))
        else:
            return None
    return operands


def _is_row(shape: Shape, of: Shape) -> bool:
    """Whether a value of this shape varies only along the last dimension of the shape ``of``."""
    return shape[-1:] == of[-1:] and math.prod(shape) == of[-1]


def _reshaped_product(terms: Terms, product: Term, shape: Shape) -> Term | None:
    """``reshape(matmul(a, b))`` as a product with other leading dimensions; None if the last ones change."""
    a, b = product.operands
    rows, columns = product.shape[-2:]
    inner = a.shape[-1]
    if len(b.shape) > 2:
        if shape[-2:] != (rows, columns):
            return None
        b = reshape(terms, b, (*shape[:-2], inner, columns))
    elif len(shape) < 2 or shape[-1] != columns:
        return None
    return matmul(terms, reshape(terms, a, (*shape[:-1], inner)), b, product.type.dtype)


def matmul(terms: Terms, a: Term, b: Term, dtype: torch.dtype) -> Term:
    """The product of the rows of ``a`` and the columns of ``b``, over the leading dimensions of ``a``."""
    tensor_type = TensorType((*a.shape[:-1], b.shape[-1]), dtype, a.type.device)
    return terms.make("matmul", [a, b], tensor_type)


def permute(terms: Terms, x: Term, dims: Sequence[int]) -> Term:
    """``x`` with its dimensions in another order."""
    order = tuple(dim % len(x.shape) for dim in dims)
    shape = tuple(x.shape[dim] for dim in order)
    if 1 in shape:  # the order of dimensions of one element does not matter
        long = [dim for dim in range(len(x.shape)) if x.shape[dim] != 1]
        narrow = reshape(terms, x, [x.shape[dim] for dim in long])
        return reshape(terms, permute(terms, narrow, [long.index(dim) for dim in order if dim in long]), shape)
    if order == tuple(range(len(shape))):
        return x
    if x.name == FILL:
        return terms.fill(x.value, replace(x.type, shape=shape))
    if x.name == "permute":
        inner = dict(x.constants)["dims"]
        return permute(terms, x.operands[0], [inner[dim] for dim in order])
    return terms.make("permute", [x], replace(x.type, shape=shape), [("dims", order)])


def expand(terms: Terms, x: Term, shape: Sequence[int]) -> Term:
    """``x`` repeated along dimensions of one element and along new leading dimensions."""
    if x.shape == tuple(shape):
        return x
    if x.name == FILL:
        return terms.fill(x.value, replace(x.type, shape=tuple(shape)))
    if x.name == "expand":
        return expand(terms, x.operands[0], shape)
    return terms.make("expand", [x], replace(x.type, shape=tuple(shape)))


def cut(terms: Terms, x: Term, dim: int, start: int | None, end: int | None, step: int = 1) -> Term:
    """``x[start:end:step]`` along ``dim``; bounds are clamped to the size."""
    dim %= len(x.shape)
    first, last, step = slice(start, end, step).indices(x.shape[dim])
    count = len(range(first, last, step))
    if count == x.shape[dim]:
        return x
    if x.name == FILL:
        return terms.fill(x.value, replace(x.type, shape=(*x.shape[:dim], count, *x.shape[dim + 1 :])))
    if x.name == "slice":
        inner = dict(x.constants)
        if (inner["dim"], inner["step"], step) == (dim, 1, 1):
            return cut(terms, x.operands[0], dim, inner["start"] + first, inner["start"] + first + count)
    tensor_type = replace(x.type, shape=(*x.shape[:dim], count, *x.shape[dim + 1 :]))
    if x.name == "reshape" and step == 1 and (whole := _cut_unsplit(terms, x, dim, first, count)):
        return reshape(terms, whole, tensor_type.shape)
    constants = [("dim", dim), ("start", first), ("count", count), ("step", step)]
    return terms.make("slice", [x], tensor_type, constants)


def _cut_unsplit(terms: Terms, split: Term, dim: int, first: int, count: int) -> Term | None:
    """``count`` elements along ``dim`` of a reshape that splits a dimension, as a slice of that dimension.

    x.view(4, 2, 8)[:, 1]   x[:, 8:]            x.view(4, 8, 2)[..., 1]   x[:, 1::2]
    """
    x, shape = split.operands[0], split.shape
    if 0 in shape:
        return None
    for outer in range(dim + 1):
        for whole, end in itertools.product(range(len(x.shape)), range(dim + 1, len(shape) + 1)):
            before, inside = math.prod(x.shape[:whole]), x.shape[whole]
            if (before, inside) != (math.prod(shape[:outer]), math.prod(shape[outer:end])):
                continue
            within = math.prod(shape[dim + 1 : end])
            if outer == dim:
                return cut(terms, x, whole, first * within, (first + count) * within)
            if within == 1 and count == 1:
                return cut(terms, x, whole, first, None, shape[dim])
    return None


def cast(terms: Terms, x: Term, dtype: torch.dtype) -> Term:
    """``x`` in another dtype; an exact cast before it is left out."""
    if x.name == "cast" and holds(x.operands[0].dtype, x.dtype):
        return cast(terms, x.operands[0], dtype)
    if x.name == FILL:
        return terms.fill(x.value, replace(x.type, dtype=dtype))
    return x if x.dtype == dtype else terms.make("cast", [x], replace(x.type, dtype=dtype))


def pointwise(
    terms: Terms,
    name: str,
    operands: Iterable[Term],
    tensor_type: TensorType,
    constants: Iterable[tuple[str, Any]] = (),
    *,
    commutative: bool = False,
) -> Term:
    """An elementwise term. Operands that broadcasting repeats are not expanded; commutative ones are sorted."""
    found = list(operands)
    for position, operand in enumerate(found):
        if operand.name == "expand":
            narrow = [*found[:position], operand.operands[0], *found[position + 1 :]]
            if torch.broadcast_shapes(*(term.shape for term in narrow)) == tensor_type.shape:
                found = narrow
    if commutative:
        found.sort(key=lambda term: term.serial)
    return terms.make(name, found, tensor_type, constants, elementwise=True, commutative=commutative)


def stripped(term: Term) -> Term:
    """``term`` without views and conversions.

    >>> terms = Terms()
    >>> x = terms.leaf("x", TensorType((2, 3), torch.float32, None))
    >>> str(permute(terms, x, (1, 0))), str(stripped(permute(terms, x, (1, 0))))
    ('permute(x, dims=(1, 0))', 'x')
    """
    while term.is_view:
        term = term.operands[0]
    return term
