"""The patterns that are installed.

    @fuse.pattern                          registers at once
    [project.entry-points."fuse.patterns"]     a package's patterns, loaded when they are first asked for

A plugin that does not load is listed as broken, with the reason, and harms no other.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, overload

from fuse.errors import FuseError
from fuse.rewrite.patterns.definition import Pattern, define
from fuse.rewrite.registry import BrokenPlugin

Source = TypeVar("Source")

_patterns: dict[str, Pattern] = {}


@overload
def pattern(source: Source) -> Source: ...
@overload
def pattern(*, priority: int = 0, enabled: bool = True) -> Callable[[Source], Source]: ...
def pattern(source: Any = None, *, priority: int = 0, enabled: bool = True) -> Any:
    """Register a function of tensors, or a class with a method ``pattern``, as a pattern of its own name.

    Args:
        priority: of two patterns that match the same node, the one with the higher priority gets it.
        enabled: whether it runs in the pass ``match_patterns``; else ``fuse explain`` alone knows it.

    A pattern without ``replace`` becomes one region, run by one generated kernel. The class may also have ``check(m)``,
    ``replace`` (PyTorch code to stand in the pattern's place) and ``examples()`` (arguments that it runs with).

    Raises:
        FuseError: the name is taken by another module's pattern, or the definition is none.

    >>> @pattern(enabled=False)
    ... def swish(x):
    ...     "x * sigmoid(x)"
    ...     return x * x.sigmoid()
    >>> find("swish").summary
    'x * sigmoid(x)'
    >>> unregister("swish")
    """
    if source is None:
        return functools.partial(pattern, priority=priority, enabled=enabled)
    made = define(source, priority, enabled)
    known = _patterns.get(made.name)
    if known is not None and known.origin != made.origin:
        raise FuseError(f"pattern {made.name!r} is registered twice, by {known.origin} and by {made.origin}")
    _patterns[made.name] = made
    return source


def unregister(name: str) -> None:
    """Forget the pattern ``name``."""
    del _patterns[name]


def registered() -> list[Pattern]:
    """Every installed pattern, in the order of registration."""
    _load_plugins()
    return list(_patterns.values())


def broken_plugins() -> tuple[BrokenPlugin, ...]:
    """The plugins that failed to load."""
    return _load_plugins()


def find(name: str) -> Pattern:
    """The pattern called ``name``; ``FuseError`` with a suggestion when there is none."""
    _load_plugins()
    if name not in _patterns:
        close = difflib.get_close_matches(name, _patterns, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise FuseError(f"no pattern {name!r}{hint}; 'fuse patterns' lists them; a file is path/to/file.py[:Name]")
    return _patterns[name]


def load(path: Path, name: str | None = None) -> Pattern:
    """The pattern ``name`` of a Python file, which is run; without a name, the only one that it has.

    The file's patterns are not registered for longer than this takes.

    Raises:
        FuseError: the file cannot be run, or has no such pattern, or several and no name is given.
    """
    with _aside():
        try:
            spec = importlib.util.spec_from_file_location(f"fuse_patterns_of_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = module
            spec.loader.exec_module(module)
        except FuseError:
            raise
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            raise FuseError(f"{path} cannot be run ({type(error).__name__}: {text})") from error
        found = dict(_patterns)
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        known = ", ".join(found) or "none"
        wanted = f"has no pattern {name!r}" if name else "has not exactly one pattern; say which: FILE:Name"
        raise FuseError(f"{path} {wanted} (it has {known})")
    return found[name]


@contextmanager
def _aside() -> Iterator[None]:
    """Nothing is registered at first, and what is registered within is forgotten afterwards."""
    before = dict(_patterns)
    _patterns.clear()
    try:
        yield
    finally:
        _patterns.clear()
        _patterns.update(before)


@functools.cache
def _load_plugins() -> tuple[BrokenPlugin, ...]:
    broken = []
    for entry in entry_points(group="fuse.patterns"):
        try:
            entry.load()
        except Exception as error:
            origin = entry.dist.name if entry.dist else entry.value
            broken.append(BrokenPlugin(entry.name, origin, f"{type(error).__name__}: {error}"))
    return tuple(broken)
