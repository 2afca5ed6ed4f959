"""The definition of a pattern: a function, or a class with ``pattern`` and any of the other methods.

@fuse.pattern                          @fuse.pattern
def swish(x):                          class ResidualTail:
    return x * torch.sigmoid(x)            def pattern(self, x, weight, skip): ...
                                           def check(self, m): ...
                                           def replace(self, x, weight, skip): ...
                                           def backward(self, grad, x, weight, skip): ...
                                           def examples(self): ...

A pair of functions, as other matchers take them, is a pattern too: :mod:`fuse.rewrite.patterns.pairs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.fx import Node

from fuse.errors import FuseError
from fuse.rewrite.patterns.language import ManySpec, TensorSpec

METHODS = frozenset(["pattern", "check", "replace", "backward", "examples"])


@dataclass(frozen=True)
class PatternParameter:
    """A parameter of a pattern: one tensor, or a list of tensors."""

    name: str
    spec: TensorSpec | ManySpec


@dataclass(frozen=True, eq=False)
class Pattern:
    """A registered pattern.

    ``source``: its file and line. ``priority``: the pattern with the higher one gets a node that two patterns match.
    ``finite``: its replacement is right for finite values only, which its author accepts. ``overlaps``: patterns that
    compete with it on purpose.
    """

    name: str
    origin: str
    summary: str
    source: str
    priority: int
    enabled: bool
    finite: bool
    overlaps: tuple[str, ...]
    function: Callable[..., Any]
    parameters: tuple[PatternParameter, ...]
    check: Callable[[Match], Failure | None] | None
    replace: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    examples: Callable[[], Any] | None

    @cached_property
    def constrained(self) -> Mapping[str, TensorSpec]:
        """The demands on parameters that are tensors, by name."""
        anything = TensorSpec()
        return {
            one.name: one.spec for one in self.parameters if isinstance(one.spec, TensorSpec) and one.spec != anything
        }


@dataclass(frozen=True)
class Failure:
    """The result of :meth:`Match.fail`: why a match must not be used."""

    reason: str
    node: Node | None


@dataclass(frozen=True)
class Match:
    """The argument of ``check``: ``m["x"]`` is the graph's node for the pattern's ``x``.

    For a parameter that is ``fuse.many()``, it is a list of nodes; None for a parameter that the chosen alternative
    does not read. ``m[name]`` is also the value of a ``fuse.const``, and the position of the alternative of a
    ``fuse.either``. ``nodes``: all nodes of the match; ``outputs``: those that hold its results.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]
    bound: Mapping[str, Any] = field(repr=False)

    def __getitem__(self, name: str) -> Any:
        if name not in self.bound:
            raise KeyError(f"the pattern has no {name!r}; it has {', '.join(self.bound)}")
        return self.bound[name]

    def fail(self, reason: str, node: Node | None = None) -> Failure:
        """Decline the match, for ``reason``, which the user reads unchanged."""
        return Failure(reason, node)


def define(
    source: Any, priority: int = 0, enabled: bool = True, finite: bool = False, overlaps: Iterable[str] = ()
) -> Pattern:
    """The pattern that a function or a class defines.

    Raises:
        FuseError: a class without ``pattern``, with an unknown public method, or whose ``replace`` or ``backward`` has
            other parameters; a parameter that is not positional.
    """
    name = source.__name__
    if not inspect.isclass(source):
        return pattern_of(name, source, source, {}, priority, enabled, finite, tuple(overlaps))
    methods = {key for key, value in vars(source).items() if callable(value) and not key.startswith("_")}
    if "pattern" not in methods:
        raise FuseError(f"pattern {name!r} has no method 'pattern'")
    if unknown := sorted(methods - METHODS):
        raise FuseError(f"pattern {name!r} has a method {unknown[0]!r}; known are {', '.join(sorted(METHODS))}")
    instance: Any = source()
    parts = {key: getattr(instance, key) for key in methods - {"pattern"}}
    return pattern_of(name, source, instance.pattern, parts, priority, enabled, finite, tuple(overlaps))


def pattern_of(
    name: str,
    source: Any,
    function: Callable[..., Any],
    parts: Mapping[str, Any],
    priority: int,
    enabled: bool,
    finite: bool,
    overlaps: tuple[str, ...],
) -> Pattern:
    """The pattern with ``function`` and the other methods in ``parts``; ``source``: its function or class."""
    parameters = _parameters(name, function)
    replace = parts.get("replace")
    if replace is not None and _names(replace) != [one.name for one in parameters]:
        raise FuseError(f"pattern {name!r}: replace must take the parameters of pattern, in their order")
    backward = parts.get("backward")
    if backward is not None and not _takes_gradients(backward, [one.name for one in parameters]):
        raise FuseError(
            f"pattern {name!r}: backward must take the gradient of each result, then the parameters of pattern in "
            "their order, and perhaps the keyword result"
        )
    return Pattern(
        name=name,
        origin=source.__module__,
        summary=(inspect.getdoc(source) or "").partition("\n")[0],
        source=_source_line(function),
        priority=priority,
        enabled=enabled,
        finite=finite,
        overlaps=overlaps,
        function=function,
        parameters=parameters,
        check=parts.get("check"),
        replace=replace,
        backward=backward,
        examples=parts.get("examples"),
    )


def _parameters(name: str, function: Callable[..., Any]) -> tuple[PatternParameter, ...]:
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise FuseError(f"pattern {name!r}: parameter {parameter.name!r} must not be keyword-only or variadic")
        spec = TensorSpec() if parameter.default is inspect.Parameter.empty else parameter.default
        if not isinstance(spec, (TensorSpec, ManySpec)):
            raise FuseError(
                f"pattern {name!r}: the default of {parameter.name!r} must be fuse.tensor(...) or fuse.many()"
            )
        found.append(PatternParameter(parameter.name, spec))
    if not found:
        raise FuseError(f"pattern {name!r} takes no tensor")
    return tuple(found)


def _takes_gradients(backward: Callable[..., Any], names: Sequence[str]) -> bool:
    taken = inspect.signature(backward).parameters.values()
    positional = [one.name for one in taken if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    others = {(one.name, one.kind) for one in taken if one.name not in positional}
    in_order = len(positional) > len(names) and positional[-len(names) :] == names
    return in_order and others <= {("result", inspect.Parameter.KEYWORD_ONLY)}


def _names(function: Callable[..., Any]) -> Sequence[str]:
    return list(inspect.signature(function).parameters)


def _source_line(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
