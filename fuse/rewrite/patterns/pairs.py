"""Pairs of functions, as other pattern matchers take them, as patterns of fuse.

torch.fx.subgraph_rewriter.replace_pattern(graph, search, replace)          fuse.pattern(search, replace)
register_replacement(search, replace, examples, trace, passes)              fuse.pattern(search, replace, examples=...)
    scalar_workaround={"scale": 2.0}                                            a number among the examples

The functions stay unchanged. A parameter whose example or default is no tensor is a constant of the pattern:
``fuse.const`` with its name, any value in the graph. The replacement's parameters correspond by position.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.errors import FuseError
from fuse.rewrite.patterns.definition import Failure, Match, Pattern, pattern_of
from fuse.rewrite.patterns.language import ManySpec, TensorSpec, const

PlainFunction = Callable[..., Any]


def define_pair(
    search: PlainFunction,
    replace: PlainFunction,
    examples: Any = None,
    *,
    name: str | None = None,
    check: Callable[[Match], Failure | None] | None = None,
    priority: int = 0,
    enabled: bool = True,
    finite: bool = False,
    overlaps: Iterable[str] = (),
) -> Pattern:
    """The pattern that replaces the computation of ``search`` by ``replace``.

    ``examples``: a tuple of arguments, a list of such tuples, or a function that returns either.

    Raises:
        FuseError: the functions have different numbers of parameters, or the examples do not fit them.

    >>> import torch
    >>> def search(x, scale): return torch.softmax(x * scale, -1)
    >>> def replace(y, c): return torch.softmax(c * y, -1)
    >>> [one.name for one in define_pair(search, replace, (torch.ones(2, 3), 0.5)).parameters]
    ['x']
    """
    title = name or _name_of(search)
    given = list(_parameters(search))
    others = list(_parameters(replace))
    if len(given) != len(others):
        raise FuseError(f"pattern {title!r}: search has {len(given)} parameters, and replace {len(others)}")
    listed = _listed(title, examples() if inspect.isfunction(examples) else examples, len(given))
    constants = _constants(given, listed)
    tensors = [one for one in given if one.name not in constants]
    parts: dict[str, Any] = {"replace": _with_constants(replace, given, constants, tensors)}
    if check is not None:
        parts["check"] = check
    if listed:
        only = [tuple(v for v, one in zip(row, given, strict=True) if one.name not in constants) for row in listed]
        parts["examples"] = _Examples(only)
    function = _with_constants(search, given, constants, tensors)
    return pattern_of(title, search, function, parts, priority, enabled, finite, tuple(overlaps))


class _Examples:
    """A function that returns the same arguments at each call."""

    def __init__(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self.rows = list(rows)

    def __call__(self) -> list[tuple[Any, ...]]:
        return self.rows

    def __repr__(self) -> str:  # part of the pattern's cache key
        kinds = pytree.tree_map_only(Tensor, lambda one: (one.dtype, one.shape, one.stride()), self.rows)
        return f"examples({kinds})"


def _with_constants(
    function: PlainFunction,
    given: Sequence[inspect.Parameter],
    constants: Mapping[str, Any],
    tensors: Sequence[inspect.Parameter],
) -> PlainFunction:
    """``function`` of its tensors alone; its other parameters are constants of the pattern."""
    called = function.forward if isinstance(function, nn.Module) else function

    @functools.wraps(called)
    def within(*values: Any) -> Any:
        left = iter(values)
        return called(*(const(one.name, constants[one.name]) if one.name in constants else next(left) for one in given))

    plain = [inspect.Parameter(one.name, one.POSITIONAL_OR_KEYWORD, default=_spec(one)) for one in tensors]
    within.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]  # inspect asks for it
    return within


def _spec(parameter: inspect.Parameter) -> Any:
    stated = isinstance(parameter.default, (TensorSpec, ManySpec))
    return parameter.default if stated else inspect.Parameter.empty


def _constants(given: Sequence[inspect.Parameter], examples: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """The parameters that are no tensors, each with an example."""
    found = {}
    for position, one in enumerate(given):
        value = examples[0][position] if examples else one.default
        known = value is not inspect.Parameter.empty and not isinstance(value, (TensorSpec, ManySpec))
        if known and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            found[one.name] = value
    return found


def _listed(name: str, examples: Any, count: int) -> list[tuple[Any, ...]]:
    if examples is None:
        return []
    rows = [tuple(row) if isinstance(row, (tuple, list)) else (row,) for row in _rows(examples)]
    if wrong := next((row for row in rows if len(row) != count), None):
        raise FuseError(f"pattern {name!r} takes {count} arguments, and an example has {len(wrong)}")
    return rows


def _rows(examples: Any) -> Sequence[Any]:
    """The argument rows: ``examples`` itself, or its items if it is a list that begins with a tuple or a list."""
    several = isinstance(examples, list) and examples and isinstance(examples[0], (tuple, list))
    return examples if several else [examples]


def _parameters(function: PlainFunction) -> Iterable[inspect.Parameter]:
    called = function.forward if isinstance(function, nn.Module) else function
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one for one in inspect.signature(called).parameters.values() if one.kind in kinds]


def _name_of(function: PlainFunction) -> str:
    return str(getattr(function, "__name__", type(function).__name__)).strip("_<>")
