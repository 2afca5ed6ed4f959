"""Integers that ``int`` makes of tensors, as Numbers.

    ptr = int(self.ptr)               ->     ptr = CONVERT(int, self.ptr)
    self.queue[ptr : ptr + 4] = k            self.ptr.item(), of which nothing is learned

Python makes a plain ``int`` of what a tensor answers, so that the number would be learned. Functions of the user that
call ``int`` are compiled again from their source (:mod:`fuse.graph.patches.recompiling`). This is done once the number
was found to differ from call to call, and not in functions that call ``type``, which tells a Number from an ``int``.
"""

from __future__ import annotations

import ast
import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fuse.graph.numbers.read_numbers import is_number
from fuse.graph.patches.recompiling import recompiled


@contextlib.contextmanager
def converted(functions: Sequence[types.FunctionType], read: Callable[[Tensor], Any]) -> Iterator[None]:
    """A context in which ``int(tensor)`` in these functions is ``read(tensor)``, in this thread."""
    thread = threading.get_ident()

    def convert(made: Any, value: Any) -> Any:
        if made is int and threading.get_ident() == thread:
            if is_number(value) and isinstance(value, int):
                return value
            if isinstance(value, Tensor) and value.numel() == 1 and _is_integer(value):
                return read(value)
        return made(value)

    before = [(one, one.__code__) for one in functions if _may_convert(one.__code__.co_names)]
    try:
        for function, code in before:
            function.__code__ = _converting(function, convert) or code
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def _may_convert(names: Sequence[str]) -> bool:
    return "int" in names and "type" not in names


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype.itemsize == 1)


def _converting(function: types.FunctionType, convert: Callable[[Any, Any], Any]) -> types.CodeType | None:
    name = f"\0int {id(function.__code__)}"

    def replace(found: ast.FunctionDef) -> Mapping[str, Any]:
        calls = _Calls(name)
        found.body = [calls.visit(statement) for statement in found.body]
        return {name: convert} if calls.count else {}

    return recompiled(function, replace)


class _Calls(ast.NodeTransformer):
    """Replaces ``int(x)`` by a call of the object ``name`` with ``int`` and ``x``; ``count`` of them so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def visit(self, node: ast.AST) -> Any:
        return node if isinstance(node, _APART) else super().visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_int = isinstance(node.func, ast.Name) and node.func.id == "int"
        if not is_int or len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
            return node
        self.count += 1
        return ast.copy_location(ast.Call(ast.Constant(self.name), [node.func, *node.args], []), node)


_APART = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
"""Code in a function that is compiled apart from it."""
