"""Print scalar expressions as C++.

Operators without a symbol in C++ are functions of the headers in this folder: ``fuse_tanh``, ``fuse_maximum``.
"""

from __future__ import annotations

import torch

from fuse.kernel.arithmetic.expressions import (
    CALL,
    SYMBOLS,
    UNARY,
    Expression,
    Literal,
    Notation,
    Operation,
    Position,
    Template,
    Variable,
    called,
    parts,
    render,
)
from fuse.kernel.cpu import cpp_types

_HALF_NAMES = {"round_bfloat16": "fuse_round_bf16", "round_float16": "fuse_round_f16"}
_FUNCTIONS = {"hypot": "__builtin_hypot"} | _HALF_NAMES
_OF_BOOLS = {"add": SYMBOLS["or"], "multiply": SYMBOLS["and"], "invert": Template("!{}", UNARY, (UNARY,))}
_CHEAP = SYMBOLS.keys() | {"chosen"}
_WRAPPING = {"add": "+", "subtract": "-", "multiply": "*"}


def text(expression: Expression) -> str:
    """The expression as C++.

    >>> x, n = Variable(torch.float32, "x"), Variable(torch.int8, "n")
    >>> text(x * (1 - x * x)), text(n + 1)
    ('x * (1.0f - x * x)', 'int8_t(uint64_t(n) + uint64_t(int8_t(1)))')
    """
    return render(expression, CPP)


def calls(expression: Expression) -> bool:
    """Whether the C++ of an expression calls a function."""
    return any(isinstance(part, Operation) and part.operator not in _CHEAP for part in parts(expression))


def _leaf(leaf: Expression) -> str:
    match leaf:
        case Literal():
            return cpp_types.literal(leaf.number, leaf.dtype)
        case Variable():
            return leaf.name
        case Position():
            return str(leaf.index)
    raise TypeError(f"a {type(leaf).__name__} has no text in C++")


def _template(whole: Operation) -> Template:
    """The template of an operation; integers are computed unsigned, because signed overflow is undefined in C++."""
    name, dtype = whole.operator, whole.operands[-1].dtype
    if name == "convert":
        return called(f"fuse_cast<{cpp_types.register(whole.dtype)}>", 1)
    if name == "chosen":
        return called(f"fuse_chosen<{cpp_types.register(whole.dtype)}>", 3)
    if dtype is torch.bool and name in _OF_BOOLS:
        return _OF_BOOLS[name]
    if name in _WRAPPING and not dtype.is_floating_point:
        return Template(f"{cpp_types.register(dtype)}(uint64_t({{}}) {_WRAPPING[name]} uint64_t({{}}))", CALL, (0, 0))
    return SYMBOLS.get(name) or called(_FUNCTIONS.get(name, f"fuse_{name}"), len(whole.operands))


CPP = Notation(_leaf, _template)
