"""Whether a replacement of ``int`` may be put into the globals of code: other code there must not tell it from ``int``.

    int(x.shape[0]), map(int, sizes), int.from_bytes(b)    work with a replacement
    isinstance(n, (int, float)), def f(n: int)             work with a replacement
    dtype=int, type(n) is int, defaultdict(int)            do not: C code refuses it, it is another object, it is kept

Functions of a file that use ``int`` in the last way leave all code of the file with Python's own.
"""

from __future__ import annotations

import ast
import functools
import gc
import linecache
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)


def may_replace_int(code: CodeType, names: dict[str, Any]) -> bool:
    """Whether all code with the globals ``names`` uses ``int`` as a replacement allows it; ``code`` is a part of it.

    Code without its source is taken to use it otherwise. In a notebook, code of all cells shares its globals.
    """
    files = {code.co_filename}
    if names.get("__file__") != code.co_filename:
        functions = (one for one in gc.get_referrers(names) if isinstance(one, FunctionType))
        files.update(one.__code__.co_filename for one in functions if "int" in one.__code__.co_names)
    return all(_may_replace_int("".join(linecache.getlines(file, names))) for file in files)


@functools.lru_cache(maxsize=1024)
def _may_replace_int(source: str) -> bool:
    """The same of a file.

    >>> _may_replace_int("def f(n: int): return int(n) if isinstance(n, (int, float)) else list(map(int, n))")
    True
    >>> _may_replace_int("def f(n): return int.from_bytes(n)"), _may_replace_int("def f(n): return int.__repr__(n)")
    (True, False)
    >>> _may_replace_int("KINDS = [int]"), _may_replace_int("def f(n): return n.to(int)"), _may_replace_int("")
    (True, False, False)
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    inside = (one for function in ast.walk(tree) if isinstance(function, _FUNCTIONS) for one in ast.walk(function))
    used = {one for one in inside if isinstance(one, ast.Name) and one.id == "int"}
    return bool(source) and used <= {one for node in ast.walk(tree) for one in _allowed(node)}


def _allowed(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression where a replacement of ``int`` does the same."""
    match node:
        case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, ast.Tuple(elts=kinds)]):
            yield from kinds
        case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, kind]):
            yield kind
        case ast.Call(func=ast.Name("map"), args=[function, *_]):
            yield function
        case ast.Call(func=used):
            yield used
        case ast.Attribute(value=used, attr=name) if not name.startswith("__"):  # which the replacement has itself
            yield used
        case ast.arg(annotation=annotation) | ast.AnnAssign(annotation=annotation) if annotation is not None:
            yield from ast.walk(annotation)
        case ast.FunctionDef(returns=annotation) | ast.AsyncFunctionDef(returns=annotation) if annotation is not None:
            yield from ast.walk(annotation)
