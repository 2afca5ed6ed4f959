"""Evaluate expressions with torch: the reference for the code of every target.

In its own dtypes, ``+ - * /``, comparisons, selections and conversions are bit-identical to C++. With floats *widened*
to float64, no step rounds to a narrower dtype; errors are measured against that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fuse.kernel.arithmetic.expressions import Expression, Literal, Operation, Parameter, Position, Variable, fn
from fuse.kernel.arithmetic.scalar_operators import DEFINITIONS, MEANINGS


def evaluate(
    expression: Expression,
    arguments: Sequence[Tensor] = (),
    names: Mapping[str, Tensor] | None = None,
    widened: bool = False,
) -> Tensor:
    """The value of an expression: ``arguments`` for its parameters by position, ``names`` for variables by name.

    >>> x, y = Parameter(torch.float32, 0), Parameter(torch.float32, 1)
    >>> evaluate(x * (1 - y * y), [torch.tensor([2.0]), torch.tensor([0.5])])
    tensor([1.5000])
    """
    match expression:
        case Literal():
            wide = widened and expression.dtype.is_floating_point
            return torch.tensor(expression.number, dtype=torch.float64 if wide else expression.dtype)
        case Parameter():
            return _held(arguments[expression.position], widened)
        case Variable():
            return _held((names or {})[expression.name], widened)
        case Position():
            names, where = names or {}, expression.index
            total = torch.tensor(where.constant)
            for atom, factor in where.terms:
                total = total + names[atom] * factor
            for size, steps in where.sized:
                inner = evaluate(Position(torch.int64, steps), (), names)
                total = total + inner * names[size]
            return total
        case Operation():
            operands = [evaluate(operand, arguments, names, widened) for operand in expression.operands]
            return _operated(expression, operands, widened)
    raise TypeError(f"{type(expression).__name__} has no value")


def _held(value: Tensor, widened: bool) -> Tensor:
    return value.double() if widened and value.is_floating_point() else value


def _operated(whole: Operation, operands: Sequence[Tensor], widened: bool) -> Tensor:
    name = whole.operator
    if name == "convert":
        wide = widened and whole.dtype.is_floating_point
        return _converted(operands[0], torch.float64 if wide else whole.dtype)
    if name.startswith("round_"):
        half: torch.dtype = getattr(torch, name.removeprefix("round_"))
        return operands[0] if widened else operands[0].to(half).to(whole.dtype)
    if definition := DEFINITIONS.get(name):
        formula = definition(fn, *(Parameter(o.dtype, i) for i, o in enumerate(whole.operands)))
        return evaluate(formula, operands, widened=widened)
    return MEANINGS[name](*operands)


def _converted(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` as ``dtype``; negative floats are converted to uint8 through int64, so that they wrap around."""
    if dtype is torch.uint8 and value.is_floating_point():
        value = value.long()
    return value.to(dtype)
