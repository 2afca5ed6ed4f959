"""Recipes: functions that translate ATen operators to values, and their registry.

A recipe reads like the operator's formula::

    @recipe("silu")
    def silu(call: Call) -> Value:
        return call.map(fn.silu, "self")

A recipe gets a :class:`Call`, which has the operator's arguments by name, and the dtype and shape of the result. Most
recipes are in :mod:`fuse.kernel.recipes.elementwise`, :mod:`fuse.kernel.recipes.movement` and
:mod:`fuse.kernel.recipes.reductions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.fx import Node, map_arg

from fuse.kernel.arithmetic.dtypes import HALVES, register, supported
from fuse.kernel.arithmetic.expressions import Expression, Parameter, converted, select
from fuse.kernel.arithmetic.extents import Extent, Real, is_one
from fuse.kernel.values import Constant, Map, Value, expand, view

Result = Value | tuple[Value | None, ...]
Number = bool | int | float
Formula = Callable[..., Expression]
"""A function of expressions, one for each argument."""


class Unsupported(Exception):
    """This call of the operator cannot be lowered; the message is the reason that the user reads."""


@dataclass(frozen=True)
class Call:
    """One operator call: arguments by name (``Value`` for tensors, else Python objects) and the result's metadata."""

    op: OpOverload
    arguments: Mapping[str, Any]
    result: Any

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._first.dtype
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._first.shape)

    @property
    def _first(self) -> Any:
        return self.result[0] if isinstance(self.result, (tuple, list)) else self.result

    def tensor(self, name: str) -> Value:
        value = self.arguments[name]
        if not isinstance(value, Value):
            raise Unsupported(f"argument {name} is not a tensor")
        return value

    def map(self, formula: Formula, *names: str | Value | Number, compute: torch.dtype | None = None) -> Value:
        """``formula`` of the named arguments, in the result's shape and dtype.

        Each argument is broadcast to the result's shape and converted to ``compute`` (default: the result's dtype). A
        Python number given by value is not rounded to bfloat16 or float16.
        """
        compute = compute or self.dtype
        args = [self._operand(name, compute) if isinstance(name, str) else name for name in names]
        return convert(apply(formula, args, compute, self.shape), self.dtype)

    def _operand(self, name: str, compute: torch.dtype) -> Value | Number:
        """An argument in ``compute``; like eager, a number in place of a tensor is rounded to half precision."""
        value: Value | Number = self.arguments[name]
        if compute not in HALVES:
            return value
        if isinstance(value, Value):
            return convert(value, compute)
        return rounded(value, compute) if name in ("self", "other") else value

    def unrounded(self, name: str) -> Value | Number:
        """A factor or divisor; in half precision, a tensor of one element is read in float32, as eager does."""
        value: Value | Number = self.arguments[name]
        if isinstance(value, Value) and self.dtype in HALVES and all(is_one(size) for size in value.shape):
            return convert(view(value, ()), register(self.dtype))
        return value


_ROUNDED_BY_C = torch.int64, torch.float32, torch.float64


def rounded(number: Number, dtype: torch.dtype) -> Number:
    """``number`` rounded to ``dtype``.

    Raises:
        Unsupported: an integer that ``dtype`` cannot hold.
    """
    if isinstance(number, (Extent, Real)) and (dtype in _ROUNDED_BY_C or (dtype is torch.int32 and number < 2**31)):
        return number  # the kernel converts what it is given, like eager
    number = float(number) if isinstance(number, float) else int(number) if type(number) is not bool else number
    try:
        return torch.tensor(number, dtype=dtype).item()
    except RuntimeError:
        raise Unsupported(f"{dtype} cannot hold {number}") from None


def apply(formula: Formula, args: Sequence[Value | Number], compute: torch.dtype, shape: tuple[int, ...]) -> Value:
    """A ``Map`` over tensors and numbers, computed in ``compute``; the result of a comparison is a bool.

    bfloat16 and float16 are computed in float32 and rounded once, after the operation. Tensors of another dtype are
    rounded to them first, as type promotion does. Numbers and 0-dimensional floats are not rounded, as in eager.
    """
    wide = register(compute)
    operands = tuple(
        expand(_operand(a, compute, wide), shape) if isinstance(a, Value) else Constant(shape, wide, a) for a in args
    )
    expression = formula(*(Parameter(wide, i) for i in range(len(operands))))
    value = Map(shape, expression.dtype, expression, operands)
    return convert(value, compute) if value.dtype == wide else value


def _operand(value: Value, compute: torch.dtype, wide: torch.dtype) -> Value:
    if value.shape == () and value.dtype.is_floating_point:
        return convert(value, wide)
    return convert(convert(value, compute), wide)


def convert(value: Value, dtype: torch.dtype) -> Value:
    """``value.to(dtype)``."""
    if value.dtype == dtype:
        return value
    if not supported(dtype):
        raise Unsupported(f"dtype {dtype} is not supported in kernels")
    held = Parameter(register(value.dtype), 0)
    return Map(value.shape, dtype, converted(held, value.dtype, dtype), (value,))


def choice(condition: Value, yes: Value, no: Value) -> Value:
    """``yes`` where ``condition`` holds, else ``no``; all have one shape, the choices one dtype."""
    given = Parameter(torch.bool, 0)
    branches = (Parameter(register(yes.dtype), position) for position in (1, 2))
    return Map(yes.shape, yes.dtype, select(given, *branches), (condition, yes, no))


Recipe = Callable[[Call], Result]
RecipeFunction = TypeVar("RecipeFunction", bound=Recipe)
_RECIPES: dict[str, Recipe] = {}


def recipe(*names: str) -> Callable[[RecipeFunction], RecipeFunction]:
    """Register the recipe of ATen operators: ``"add"`` for all overloads, ``"sum.dim_IntList"`` for one."""

    def registered(function: RecipeFunction) -> RecipeFunction:
        for name in names:
            _RECIPES[name] = function
        return function

    return registered


def find_recipe(op: Any) -> Recipe | None:
    """The recipe of an operator, or None when it has none."""
    if not isinstance(op, OpOverload) or op.namespace not in ("aten", "fuse"):
        return None
    packet = op._schema.name.split("::")[1]
    return _RECIPES.get(f"{packet}.{op._overloadname}") or _RECIPES.get(packet)


def bind(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in."""
    bound = {a.name: a.default_value for a in op._schema.arguments}
    bound.update(zip((a.name for a in op._schema.arguments), args, strict=False))
    bound.update(kwargs)
    return bound


def arguments_of(node: Node, values: Mapping[Node, Result]) -> dict[str, Any]:
    """The arguments of ``node`` by name, tensors as values."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])  # type: ignore[arg-type,return-value]  # FX types arguments loosely
    return bind(node.target, args, kwargs)  # type: ignore[arg-type]  # FX types targets loosely


def translate(node: Node, values: Mapping[Node, Result]) -> Result:
    """The value or values of one node, from the values of its arguments.

    Raises:
        Unsupported: no recipe, a dtype or an argument that kernels do not handle.
    """
    found = find_recipe(node.target)
    if found is None:
        raise Unsupported(f"{node.target} has no kernel")
    result = node.meta["val"]
    for part in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(part, torch.Tensor) and not supported(part.dtype):
            raise Unsupported(f"dtype {part.dtype} is not supported in kernels")
    return found(Call(node.target, arguments_of(node, values), result))  # type: ignore[arg-type]  # FX types targets loosely
