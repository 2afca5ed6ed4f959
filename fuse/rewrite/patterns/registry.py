"""The patterns that are installed.

    @fuse.pattern                          registers at once
    [project.entry-points."fuse.patterns"]     a package's patterns, loaded when they are first asked for

A plugin that does not load is listed as broken, with the reason, and harms no other.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

from fuse.errors import FuseError
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

    Or a pair of functions, as ``torch.fx.subgraph_rewriter.replace_pattern`` and Inductor's ``register_replacement``
    take them: what ``source`` computes is replaced by what ``replace`` does.

    Args:
        replace: the second of a pair; its parameters are those of the first, by position.
        examples: of a pair: arguments that it runs with, or a list of such; a parameter that is given a number there,
            or has one as its default, may be any number in a graph.
        name: of a pair; that of the first function where none is given.
        check: of a pair: asked for each match, as the method of a class is.
        priority: of two patterns that match the same node, the one with the higher priority gets it.
        enabled: whether it runs in the pass ``match_patterns``; else ``fuse explain`` alone knows it.
        overlaps: names of patterns that compete with this one on purpose; `fuse check-pattern` says nothing of those.
        finite: ``replace`` may give something else than the pattern where a value is infinite or NaN, or becomes so.

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
    """Forget the pattern ``name``."""
    del _installed.by_name[name]


def registered() -> list[Pattern]:
    """Every installed pattern, in the order of registration."""
    _installed.broken()
    return list(_installed.by_name.values())


def broken_plugins() -> tuple[BrokenPlugin, ...]:
    """The plugins that failed to load."""
    return _installed.broken()


def find(name: str) -> Pattern:
    """The pattern called ``name``; ``FuseError`` with a suggestion when there is none."""
    return _installed.find(name)


def refusal(pattern: Pattern) -> str | None:
    """Why ``pattern`` must not be used at all: a call on which its replacement is wrong; None where none is known.

    A pattern is tried before it is first used, and what was found is remembered. What a pattern is everywhere follows
    from its code: those that come with fuse are tried so by its tests, which takes up to three seconds each, and never
    again. What depends on a call is asked of :func:`objection`, of theirs as of others'.
    """
    return None if _is_ours(pattern) else services.verifier().refusal(pattern)


def objection(found: FoundMatch) -> str | None:
    """Why the replacement must not be used for ``found``: it does not hold for calls of that class."""
    return _unless_right("replace", found, services.verifier().trial(found))


def gradient_objection(found: FoundMatch) -> str | None:
    """Why the pattern's rule for gradients must not be used for ``found``."""
    return _unless_right("backward", found, services.verifier().gradient_trial(found))


def _unless_right(method: str, found: FoundMatch, trial: Trial) -> str | None:
    if trial.outcome == "right":
        return None
    told = class_of(found.setting.arguments, found.form.choices, found.constants)
    return f"{method} is not used for {told}; {trial}"


def _is_ours(pattern: Pattern) -> bool:
    return pattern.origin.startswith("fuse.passes.patterns.")


def load(path: Path, name: str | None = None) -> Pattern:
    """The pattern ``name`` of a Python file, which is run; without a name, the only one that it has.

    The file's patterns are not registered for longer than this takes.

    Raises:
        FuseError: the file cannot be run, or has no such pattern, or several and no name is given.
    """
    found = load_all(path)
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        known = ", ".join(found) or "none"
        wanted = f"has no pattern {name!r}" if name else "has not exactly one pattern; say which: FILE:Name"
        raise FuseError(f"{path} {wanted} (it has {known})")
    return found[name]


def load_all(path: Path) -> dict[str, Pattern]:
    """The patterns of a Python file, which is run, by name; they are not registered for longer than this takes.

    Raises:
        FuseError: the file cannot be run.
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
        except Exception as error:  # whatever the user's file raises
            text = (str(error).splitlines() or [""])[0]
            raise FuseError(f"{path} cannot be run ({type(error).__name__}: {text})") from error
        return dict(_installed.by_name)


ALL = "all"


@contextmanager
def also(wanted: Iterable[str]) -> Iterator[None]:
    """More patterns are looked for: installed ones that are off, by name or ``all``, and those of ``file.py[:Name]``.

    Raises:
        FuseError: no pattern is installed under a name; a file has no such pattern, or one whose name is taken.
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
    """The file and the name in ``path/to/file.py[:Name]``; no file where ``pattern`` is a name alone.

    >>> split("swish"), split("patterns.py:swish")[1], split("patterns.py")[1]
    ((None, 'swish'), 'swish', None)
    """
    path, in_file, name = pattern.partition(".py")
    return (Path(path + in_file), name.removeprefix(":") or None) if in_file else (None, pattern)


@contextmanager
def alone(pattern: Pattern) -> Iterator[None]:
    """No other pattern is registered, and this one is enabled."""
    with _aside():
        _installed.by_name[pattern.name] = replace(pattern, enabled=True)
        yield


@contextmanager
def _aside() -> Iterator[None]:
    """Nothing is registered at first, and what is registered within is forgotten afterwards."""
    _installed.broken()  # what is loaded at the first question would be forgotten, too
    before = dict(_installed.by_name)
    _installed.by_name.clear()
    try:
        yield
    finally:
        _installed.by_name.clear()
        _installed.by_name.update(before)
