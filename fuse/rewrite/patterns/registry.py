"""The installed patterns.

    @fuse.pattern                              registers at once
    [project.entry-points."fuse.patterns"]     a package's patterns, loaded at the first request

A plugin that does not load is listed as broken, with the reason, and does not affect the others.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

from fuse.errors import FuseError
from fuse.graph.loading.model_file import summary
from fuse.rewrite.installed import BrokenPlugin, Installed
from fuse.rewrite.patterns import services
from fuse.rewrite.patterns.call_classes import Trial, class_of
from fuse.rewrite.patterns.definition import Failure, Match, Pattern, define
from fuse.rewrite.patterns.exact_match import FoundMatch
from fuse.rewrite.patterns.pairs import define_pair

Definition = TypeVar("Definition")

_installed: Installed[Pattern] = Installed(
    "pattern",
    "fuse.patterns",
    "'fuse patterns' lists them; a file is path/to/file.py[:Name]",
    own=lambda: importlib.import_module("fuse.passes.patterns"),
)


@overload
def pattern(source: Definition) -> Definition: ...
@overload
def pattern(
    source: Callable[..., Any],
    replace: Callable[..., Any],
    *,
    examples: Any = None,
    name: str | None = None,
    check: Callable[[Match], Failure | None] | None = None,
    priority: int = 0,
    enabled: bool = True,
    finite: bool = False,
    overlaps: Iterable[str] = (),
) -> Pattern: ...
@overload
def pattern(
    *, priority: int = 0, enabled: bool = True, finite: bool = False, overlaps: Iterable[str] = ()
) -> Callable[[Definition], Definition]: ...
def pattern(
    source: Any = None,
    replace: Any = None,
    *,
    examples: Any = None,
    name: str | None = None,
    check: Callable[[Match], Failure | None] | None = None,
    priority: int = 0,
    enabled: bool = True,
    finite: bool = False,
    overlaps: Iterable[str] = (),
) -> Any:
    """Register a function of tensors, or a class with a method ``pattern``, as a pattern of its own name.

    It may also be a pair of functions, as ``torch.fx.subgraph_rewriter.replace_pattern`` and Inductor's
    ``register_replacement`` take them: the computation of ``source`` is replaced by that of ``replace``.

    Args:
        replace: the second function of a pair; its parameters correspond to those of the first by position.
        examples: of a pair: arguments with which it runs, or a list of such. A parameter whose example or default is a
            number may be any number in a graph.
        name: of a pair; by default the name of the first function.
        check: of a pair: called for each match, like the method of a class.
        priority: the pattern with the higher priority gets a node that two patterns match.
        enabled: whether the pass ``match_patterns`` uses the pattern; otherwise only ``fuse explain`` does.
        overlaps: names of patterns that compete with this one on purpose; ``fuse check-pattern`` does not report them.
        finite: ``replace`` may differ from the pattern if a value is or becomes infinite or NaN.

    A match of a pattern without ``replace`` becomes one region, run by one generated kernel. A class may also have
    ``check(m)``, ``replace`` (PyTorch code that replaces the match), ``backward`` (its gradients) and ``examples()``
    (arguments with which it runs).

    Raises:
        FuseError: a pattern of another module has the name, or the definition is invalid.

    >>> @pattern(enabled=False)
    ... def swish(x):
    ...     "x * sigmoid(x)"
    ...     return x * x.sigmoid()
    >>> find("swish").summary
    'x * sigmoid(x)'
    >>> unregister("swish")
    """
    if replace is not None:
        options: dict[str, Any] = {"priority": priority, "enabled": enabled, "finite": finite, "overlaps": overlaps}
        return _register(define_pair(source, replace, examples, name=name, check=check, **options))
    if source is None:
        return functools.partial(pattern, priority=priority, enabled=enabled, finite=finite, overlaps=overlaps)
    _register(define(source, priority, enabled, finite, overlaps))
    return source


def _register(made: Pattern) -> Pattern:
    known = _installed.by_name.get(made.name)
    if known is not None and known.origin != made.origin:
        raise FuseError(f"pattern {made.name!r} is registered twice, by {known.origin} and by {made.origin}")
    _installed.by_name[made.name] = made
    return made


def unregister(name: str) -> None:
    """Remove the pattern ``name``."""
    del _installed.by_name[name]


def registered() -> list[Pattern]:
    """Every installed pattern, in the order of registration."""
    _installed.broken()
    return list(_installed.by_name.values())


def broken_plugins() -> tuple[BrokenPlugin, ...]:
    """The plugins that failed to load."""
    return _installed.broken()


def find(name: str) -> Pattern:
    """The pattern called ``name``; ``FuseError`` with a suggestion if there is none."""
    return _installed.find(name)


def refusal(pattern: Pattern) -> str | None:
    """Why ``pattern`` must not be used in any call: a test call with a wrong result; None if there is none.

    A pattern is tested before its first use, and the result is stored. fuse's own patterns are tested by fuse's tests
    instead, which takes up to three seconds each. :func:`objection` tests the class of each call, for all patterns.
    """
    return None if _is_ours(pattern) else services.verifier().refusal(pattern)


def objection(found: FoundMatch) -> str | None:
    """Why the pattern's replacement must not be used for ``found``: its test failed for calls of this class."""
    return _unless_right("replace", found, services.verifier().trial(found))


def gradient_objection(found: FoundMatch) -> str | None:
    """Why the pattern's gradient rule must not be used for ``found``, or None."""
    return _unless_right("backward", found, services.verifier().gradient_trial(found))


def _unless_right(method: str, found: FoundMatch, trial: Trial) -> str | None:
    if trial.outcome == "right":
        return None
    call_class = class_of(found.setting.arguments, found.form.choices, found.constants)
    return f"{method} is not used for {call_class}; {trial}"


def _is_ours(pattern: Pattern) -> bool:
    return pattern.origin.startswith("fuse.passes.patterns.")


def load(path: Path, name: str | None = None) -> Pattern:
    """The pattern ``name`` of a Python file, which is executed; without a name, the file's only pattern.

    The file's patterns do not stay registered.

    Raises:
        FuseError: the file raises, has no such pattern, or has several and no name is given.
    """
    found = load_all(path)
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        known = ", ".join(found) or "none"
        wanted = f"has no pattern {name!r}" if name else "does not have exactly one pattern; choose one with FILE:Name"
        raise FuseError(f"{path} {wanted} (it has {known})")
    return found[name]


def load_all(path: Path) -> dict[str, Pattern]:
    """The patterns of a Python file, by name. The file is executed; its patterns do not stay registered.

    Raises:
        FuseError: there is no such file, or it raises.
    """
    if not path.is_file():
        raise FuseError(f"no file {path}; 'fuse patterns' lists patterns by name, and a file is path/to/file.py[:Name]")
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
        except Exception as error:  # any error of the user's file
            line = error.lineno if isinstance(error, SyntaxError) else _last_line(error, path)
            raise FuseError(f"{path}{f':{line}' if line else ''} cannot be run ({summary(error)})") from error
        return dict(_installed.by_name)


def _last_line(error: Exception, path: Path) -> int | None:
    """The innermost line of the file that the exception passed through."""
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == str(path)]
    return lines[-1] if lines else None


ALL = "all"


@contextmanager
def also(wanted: Iterable[str]) -> Iterator[None]:
    """A context that enables more patterns: installed ones by name or ``all``, and those of ``file.py[:Name]``.

    Raises:
        FuseError: no such pattern is installed; a file has no such pattern, or one whose name is taken.
    """
    added: dict[str, Pattern] = {}
    known = {one.name: one for one in registered()}
    for one in wanted:
        path, name = split(one)
        if path is None:
            found = known if one == ALL else {one: find(one)}
        else:
            found = load_all(path) if name is None else {name: load(path, name)}
            if not found:
                raise FuseError(f"{one} has no pattern")
            if twice := sorted((known.keys() | added.keys()) & found.keys()):
                raise FuseError(f"{one}: a pattern {twice[0]!r} is installed already; give this one another name")
        added |= found
    _installed.by_name.update({name: replace(one, enabled=True) for name, one in added.items() if not one.enabled})
    _installed.by_name.update({name: one for name, one in added.items() if one.enabled})
    try:
        yield
    finally:
        for name in added:
            if name in known:
                _installed.by_name[name] = known[name]
            else:
                unregister(name)


def split(pattern: str) -> tuple[Path | None, str | None]:
    """File and name in ``path/to/file.py[:Name]``; no file if ``pattern`` is only a name.

    >>> split("swish"), split("patterns.py:swish")[1], split("patterns.py")[1]
    ((None, 'swish'), 'swish', None)
    """
    path, in_file, name = pattern.partition(".py")
    return (Path(path + in_file), name.removeprefix(":") or None) if in_file else (None, pattern)


@contextmanager
def alone(pattern: Pattern) -> Iterator[None]:
    """A context in which ``pattern`` is the only registered pattern, and enabled."""
    with _aside():
        _installed.by_name[pattern.name] = replace(pattern, enabled=True)
        yield


@contextmanager
def _aside() -> Iterator[None]:
    """A context in which nothing is registered at first; patterns registered in it are removed at its end."""
    _installed.broken()  # load plugins now: those loaded within would be removed, too
    before = dict(_installed.by_name)
    _installed.by_name.clear()
    try:
        yield
    finally:
        _installed.by_name.clear()
        _installed.by_name.update(before)
