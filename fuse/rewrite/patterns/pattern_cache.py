"""A cache of results about patterns on disk, under a hash of the pattern's code, so that no code is tested twice.

    key   =  the pattern's source, torch, Python, the files of fuse that computed the result, and the question
    value =  text

A change of any of these changes the key, so that no entry is out of date. The source is a text that changes whenever
the pattern does: code and constants of its functions, their closures, the globals that they read, functions that they
call. A value without a text gets a new one in each process, so that its entries are never found again.
"""

from __future__ import annotations

import os
import platform
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.services import disk_cache

SUFFIX = ".txt"
_FOLDERS = ("graph", "rewrite/patterns", "check")


def find(pattern: Pattern, *asked: str) -> bytes | None:
    """The stored result for ``pattern``, or None."""
    entry = disk_cache().find(_key(pattern, *asked), SUFFIX)
    return None if entry is None else entry[1]


def store(content: bytes, pattern: Pattern, *asked: str) -> None:
    """Store ``content`` as the result."""
    disk_cache().store(_key(pattern, *asked), content, SUFFIX)


def _key(pattern: Pattern, *asked: str) -> str:
    return disk_cache().key_of(
        "pattern", source_of(pattern), _finders(), torch.__version__, platform.python_version(), *asked
    )


@cache
def _finders() -> str:
    """Sizes and times of the files of fuse that compute results: another version may compute others."""
    home = Path(__file__).parent.parent.parent
    entries = [entry for folder in _FOLDERS for entry in os.scandir(home / folder) if entry.name.endswith(".py")]
    texts = [(entry.path, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries]
    return repr(sorted(texts))


@cache
def source_of(pattern: Pattern) -> str:
    """The text of a pattern's code.

    >>> from fuse.rewrite.patterns.definition import define
    >>> def twice(x): return x.exp() * 2
    >>> def thrice(x): return x.exp() * 3
    >>> source_of(define(twice)) == source_of(define(twice)), source_of(define(twice)) == source_of(define(thrice))
    (True, False)
    """
    parts = [pattern.function, pattern.check, pattern.replace, pattern.backward, pattern.examples]
    seen: set[int] = set()
    texts = [line for part in parts for line in (_of_function(part, seen) if part is not None else ["none"])]
    return "\n".join([*texts, repr((pattern.parameters, pattern.finite))])


def _of_function(function: Callable[..., Any], seen: set[int]) -> Iterator[str]:
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if id(plain) in seen:
        yield "again"
    elif code is None:
        yield _of_value(plain)
    else:
        seen.add(id(plain))
        yield from _of_code(code)
        own_class = vars(type(function.__self__)) if hasattr(function, "__self__") else {}
        attributes = {name: value for name, value in own_class.items() if not callable(value)}
        yield _of_value([(name, attributes[name]) for name in sorted(attributes) if not name.startswith("__")])
        held = [cell.cell_contents for cell in plain.__closure__ or ()]
        named = [plain.__globals__[name] for name in _names(code) if name in plain.__globals__]
        by_keyword = sorted((plain.__kwdefaults__ or {}).items())
        yield repr([name for name, _ in by_keyword])
        for value in (*held, *named, *(plain.__defaults__ or ()), *(value for _, value in by_keyword)):
            own = isinstance(value, (types.FunctionType, types.MethodType)) and not _is_keyed(value.__module__ or "")
            yield from _of_function(value, seen) if own else [_of_value(value)]


def _is_keyed(module: str) -> bool:
    """Whether a module is in the key already: torch by its version, files of patterns by size and time."""
    return module.partition(".")[0] == "torch" or module.startswith("fuse.rewrite.patterns.")


def _of_code(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _of_code(constant)
        elif isinstance(constant, frozenset):  # its order differs between processes
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals that a function, and the functions in it, may read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _of_value(value: Any) -> str:
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
        return value.__name__
    if isinstance(value, types.FunctionType):  # several functions may have one name
        return f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(_of_value, value))})"
    return repr(value)
