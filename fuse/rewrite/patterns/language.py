"""The words of a pattern that PyTorch has no word for.

    torch.relu(F.conv2d(x, weight, bias, padding=fuse.const("padding")) + skip)      any padding
    fuse.either(F.gelu(h), F.silu(h))                                                one or the other
    fuse.optional(torch.relu, h)                                                     relu(h), or h alone
    def pattern(self, pieces=fuse.many()): return torch.cat(pieces, dim=1)           any number of tensors
    def pattern(self, x=fuse.tensor("rows", "columns", dtype=torch.float32)): ...    a tensor of a certain kind

A pattern is run like any function, once for each way that it can go: the words look up, in the environment of that run,
which value a constant has and which alternative is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch

from fuse.errors import FuseError

UNSET = object()

SizeSpec = int | str | None | EllipsisType


@dataclass(frozen=True)
class TensorSpec:
    """What a pattern wants of a tensor that it is given; see :func:`tensor`."""

    shape: tuple[SizeSpec, ...] = ()
    dtype: torch.dtype | tuple[torch.dtype, ...] | str | None = None
    device: str | None = None
    layout: str | None = None
    constant: bool | None = None

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that will do; none where any will."""
        if isinstance(self.dtype, tuple):
            return self.dtype
        return (self.dtype,) if isinstance(self.dtype, torch.dtype) else ()


@dataclass(frozen=True)
class ManySpec:
    """A parameter that takes a list of tensors; see :func:`many`."""

    at_least: int


@dataclass
class Environment:
    """One run of a pattern: the values of its constants, the alternatives to take, and what the run asked for.

    ``constants`` and ``choices`` are looked up by name; what is not in them is asked of ``guess``, or the first
    alternative. ``examples`` and ``alternatives`` note what the last run met, in order.
    """

    constants: Mapping[str, Any]
    choices: Mapping[str, int]
    guess: Callable[[str, Any], Any] | None = None
    examples: dict[str, Any] = field(default_factory=dict)
    alternatives: dict[str, int] = field(default_factory=dict)


_environment: ContextVar[Environment | None] = ContextVar("fuse_pattern_environment", default=None)


@contextmanager
def running(environment: Environment) -> Iterator[None]:
    """Run a pattern in ``environment``."""
    environment.examples.clear()
    environment.alternatives.clear()
    token = _environment.set(environment)
    try:
        yield
    finally:
        _environment.reset(token)


def const(name: str, example: Any = UNSET) -> Any:
    """A Python value of the pattern that may be any: a number, a dimension, a padding, a dtype.

    In ``check`` it is ``m[name]``, in ``replace`` the same ``fuse.const(name)``. Give an ``example`` where fuse cannot
    guess one that the pattern runs with: a list of sizes, a string.

    Raises:
        FuseError: outside of a pattern.
    """
    environment = _running("const")
    environment.examples.setdefault(name, example)
    if name in environment.constants:
        return environment.constants[name]
    if environment.guess is None:
        raise FuseError(f"fuse.const({name!r}): the pattern has no constant of that name")
    return environment.guess(name, example)


def either(*alternatives: Any, name: str | None = None) -> Any:
    """One of several values: the pattern matches with any of them.

    An alternative that is a function without parameters is called when it is taken: ``lambda: h + skip`` where nothing
    else reads ``skip``. ``m[name]`` in ``check`` is the position of the one that matched; in ``replace``, ``either``
    under the same name takes the same position.

    Raises:
        FuseError: outside of a pattern, or without an alternative.
    """
    environment = _running("either")
    if not alternatives:
        raise FuseError("fuse.either needs at least one alternative")
    key = name or f"either_{len(environment.alternatives)}"
    environment.alternatives[key] = len(alternatives)
    taken = alternatives[environment.choices.get(key, 0)]
    return taken() if callable(taken) else taken


def optional(function: Callable[[Any], Any], value: Any, name: str | None = None) -> Any:
    """``function(value)``, or ``value`` alone; the function is called only where it is there.

    Raises:
        FuseError: outside of a pattern.
    """
    return either(lambda: function(value), value, name=name)


def many(at_least: int = 1) -> Any:
    """As the default of a parameter: it takes a list of tensors, of any length that the graph has.

    In ``check`` it is a list of nodes, in ``replace`` a list of tensors.
    """
    return ManySpec(at_least)


def tensor(
    *shape: SizeSpec,
    dtype: torch.dtype | tuple[torch.dtype, ...] | str | None = None,
    device: str | None = None,
    layout: str | None = None,
    constant: bool | None = None,
) -> Any:
    """As the default of a parameter: what the tensor must be for the pattern to fire.

    Args:
        shape: a number for a size that must be that; a name for one that may be any, the same wherever the name
            stands; None for any; ``...`` for any number of dimensions. None given: any shape.
        dtype: the dtype, or those that will do; a name for one that may be any, the same wherever the name stands.
        device: the device type, such as ``"cpu"``.
        layout: ``"contiguous"`` or ``"channels_last"``.
        constant: whether it must (or must not) be the same in every call: a parameter, a buffer, or made from those.

    Raises:
        FuseError: an unknown layout, or more than one ``...``.

    >>> tensor(..., "channels", dtype=torch.float32).shape
    (Ellipsis, 'channels')
    """
    if layout not in (None, "contiguous", "channels_last"):
        raise FuseError(f"layout {layout!r} is neither 'contiguous' nor 'channels_last'")
    if shape.count(...) > 1:
        raise FuseError("a shape may hold one ... only")
    return TensorSpec(shape, dtype, device, layout, constant)


def _running(word: str) -> Environment:
    environment = _environment.get()
    if environment is None:
        raise FuseError(f"fuse.{word} has a meaning only inside of a pattern")
    return environment
