"""Functions of the user compiled again from their source, with parts of it replaced.

    n = int(t)       ->     n = CONVERT(int, t)

The source must be the one that the running code was made from; line numbers are kept. Code that is written into it
names objects by constants: they need no variables.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def recompiled(
    function: types.FunctionType, replace: Callable[[ast.FunctionDef], Mapping[str, Any]]
) -> types.CodeType | None:
    """The code of ``function`` after ``replace`` has changed its source; None if it changed nothing, or if the source
    is not known.

    ``replace`` returns the objects that strings in the new source stand for; none if it changed nothing.
    """
    original = function.__code__
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(original)))
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    (found,) = parsed.body if len(parsed.body) == 1 else (None,)
    shares = any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in ast.walk(parsed))
    if not isinstance(found, ast.FunctionDef) or shares or _has_private_names(found):
        return None
    found.decorator_list = []
    ast.increment_lineno(found, original.co_firstlineno - 1)
    if not _is_same(_compiled(found, original), original):
        return None
    values: dict[Any, Any] = {**replace(found)}
    made = _compiled(found, original) if values else None
    if made is None or made.co_freevars != original.co_freevars:
        return None
    constants = tuple(values.get(one, one) if isinstance(one, str) else one for one in made.co_consts)
    return made.replace(co_consts=constants)


def _compiled(function: ast.FunctionDef, original: types.CodeType) -> types.CodeType | None:
    """The code of a function, compiled within another one that has its free variables."""
    arguments = ast.arguments([], [ast.arg(name) for name in original.co_freevars], None, [], [], None, [])
    outer = ast.copy_location(ast.FunctionDef("outer", arguments, [function], [], None), function)
    module = ast.fix_missing_locations(ast.Module([*_imports(original.co_filename), outer], []))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constants that are called
            code = compile(module, original.co_filename, "exec", dont_inherit=True, flags=original.co_flags & _FUTURES)
    except (SyntaxError, ValueError):
        return None
    within = next(one for one in code.co_consts if isinstance(one, types.CodeType))
    return next((one for one in within.co_consts if isinstance(one, types.CodeType)), None)


_FUTURES = 0x1000000  # from __future__ import annotations


@functools.lru_cache(maxsize=64)
def _imports(file: str) -> list[ast.stmt]:
    """The imports of a module: the names that they bind are called by other instructions than others."""
    left: list[ast.stmt] = list(ast.parse("".join(linecache.getlines(file))).body)
    found: list[ast.stmt] = []
    for statement in left:
        if isinstance(statement, (ast.Import, ast.ImportFrom)) and getattr(statement, "module", "") != "__future__":
            found.append(statement)
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            left += [inner for inner in ast.iter_child_nodes(statement) if isinstance(inner, ast.stmt)]
    return found


def _is_same(code: types.CodeType | None, original: types.CodeType) -> bool:
    """Whether two code objects do the same."""
    if code is None:
        return False
    parts = ["co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable"]
    parts += ["co_argcount", "co_posonlyargcount", "co_kwonlyargcount"]
    if any(getattr(code, part, None) != getattr(original, part, None) for part in parts):
        return False
    if (code.co_flags ^ original.co_flags) & ~inspect.CO_NESTED:
        return False
    pairs = list(zip(code.co_consts, original.co_consts, strict=False))
    return len(code.co_consts) == len(original.co_consts) and all(
        _is_same(one, other)
        if isinstance(one, types.CodeType) and isinstance(other, types.CodeType)
        else type(one) is type(other) and repr(one) == repr(other)
        for one, other in pairs
    )


def _has_private_names(function: ast.FunctionDef) -> bool:
    """Whether a name in the function is spelled otherwise within its class."""
    names = (getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(function))
    return any(isinstance(name, str) and name.startswith("__") and not name.endswith("__") for name in names)
