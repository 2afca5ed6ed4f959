"""Functions for patterns that PyTorch lacks.

    torch.relu(F.conv2d(x, weight, bias, padding=fuse.const("padding")) + skip)      any padding
    fuse.either(F.gelu(h), F.silu(h))                                                one or the other
    fuse.optional(torch.relu, h)                                                     relu(h), or h alone
    def pattern(self, pieces=fuse.many()): return torch.cat(pieces, dim=1)           any number of tensors
    def pattern(self, x=fuse.tensor("rows", "columns", dtype=torch.float32)): ...    a tensor with constraints

A pattern is run like any function, once for each choice of alternatives. These functions read the values of constants
and the choices from the environment of the run.
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
    """The demands of a pattern on a tensor; see :func:`tensor`."""

    shape: tuple[SizeSpec, ...] = ()
    dtype: torch.dtype | tuple[torch.dtype, ...] | str | None = None
    device: str | None = None
    layout: str | None = None
    constant: bool | None = None

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The accepted dtypes; empty if any is accepted."""
        if isinstance(self.dtype, tuple):
            return self.dtype
        return (self.dtype,) if isinstance(self.dtype, torch.dtype) else ()


@dataclass(frozen=True)
class ManySpec:
    """A parameter that takes a list of tensors; see :func:`many`."""

    at_least: int


@dataclass
class Environment:
    """One run of a pattern: the values of its constants, the choices of alternatives, and notes on the run.

    ``constants`` and ``choices`` are read by name. A missing constant is taken from ``guess``, a missing choice is the
    first alternative. ``examples`` and ``alternatives`` note what the last run read, in order.
    """

    constants: Mapping[str, Any]
    choices: Mapping[str, int]
    guess: Callable[[str, Any], Any] | None = None
    examples: dict[str, Any] = field(default_factory=dict)
    alternatives: dict[str, int] = field(default_factory=dict)


_environment: ContextVar[Environment | None] = ContextVar("fuse_pattern_environment", default=None)


@contextmanager
def running(environment: Environment) -> Iterator[None]:
    """A context in which patterns run in ``environment``."""
    environment.examples.clear()
    environment.alternatives.clear()
    token = _environment.set(environment)
    try:
        yield
    finally:
        _environment.reset(token)


def const(name: str, example: Any = UNSET) -> Any:
    """A constant of the pattern with any value: a number, a dimension, a padding, a dtype.

    In ``check`` it is ``m[name]``, in ``replace`` the same ``fuse.const(name)``. Give an ``example`` if fuse cannot
    guess a value with which the pattern runs, such as a list of sizes or a string.

    Raises:
        FuseError: called outside of a pattern.

    ``x * fuse.const("factor")`` matches ``x * 0.5`` and ``x * 3``. Run for the first of these:

    >>> with running(Environment(constants={"factor": 0.5}, choices={})):
    ...     const("factor")
    0.5
    """
    environment = _running("const")
    environment.examples.setdefault(name, example)
    if name in environment.constants:
        return environment.constants[name]
    if environment.guess is None:
        raise FuseError(f"fuse.const({name!r}): the pattern has no constant of that name")
    return environment.guess(name, example)


def either(*alternatives: Any, name: str | None = None) -> Any:
    """One of several values; the pattern matches with any of them.

    An alternative may be a function without parameters, which is called if it is taken: ``lambda: h + skip`` if nothing
    else reads ``skip``. In ``check``, ``m[name]`` is the position of the alternative that matched. In ``replace``, an
    ``either`` of the same name takes the same position.

    Raises:
        FuseError: called outside of a pattern, or without an alternative.

    ``fuse.either(torch.relu(h), torch.tanh(h), name="activation") * gate`` matches both products. Run for the second:

    >>> with running(Environment(constants={}, choices={"activation": 1})):
    ...     either("relu", "tanh", name="activation")
    'tanh'
    """
    environment = _running("either")
    if not alternatives:
        raise FuseError("fuse.either needs at least one alternative")
    key = name or f"either_{len(environment.alternatives)}"
    environment.alternatives[key] = len(alternatives)
    taken = alternatives[environment.choices.get(key, 0)]
    return taken() if callable(taken) else taken


def optional(function: Callable[[Any], Any], value: Any, name: str | None = None) -> Any:
    """``function(value)`` or ``value`` alone; the pattern matches with either.

    Raises:
        FuseError: called outside of a pattern.

    ``fuse.optional(torch.relu, x @ w)`` matches products with and without a ``relu``. Run for the first:

    >>> with running(Environment(constants={}, choices={})):
    ...     optional(torch.relu, torch.tensor(-2.0))
    tensor(0.)
    """
    return either(lambda: function(value), value, name=name)


def many(at_least: int = 1) -> Any:
    """The default of a parameter that takes a list of tensors, of any length from ``at_least`` on.

    In ``check`` it is a list of nodes, in ``replace`` a list of tensors. ``def pattern(self, pieces=fuse.many(2)):
    return torch.cat(pieces, 1)`` matches concatenations of two pieces or more.

    >>> many(at_least=2)
    ManySpec(at_least=2)
    """
    return ManySpec(at_least)


def tensor(
    *shape: SizeSpec,
    dtype: torch.dtype | tuple[torch.dtype, ...] | str | None = None,
    device: str | None = None,
    layout: str | None = None,
    constant: bool | None = None,
) -> Any:
    """The default of a parameter with constraints on its tensor.

    Args:
        shape: for each dimension a number; a name for any size, equal wherever the name occurs; or None for any size.
            ``...`` stands for any number of dimensions. Without arguments: any shape.
        dtype: a dtype, or a tuple of them; a name for any dtype, equal wherever the name occurs.
        device: the device type, such as ``"cpu"``.
        layout: ``"contiguous"`` or ``"channels_last"``.
        constant: whether it must (or must not) be the same in every call: a parameter, a buffer, or made from these.

    Raises:
        FuseError: an unknown layout, or more than one ``...``.

    >>> tensor(..., "channels", dtype=torch.float32).shape
    (Ellipsis, 'channels')
    """
    if layout not in (None, "contiguous", "channels_last"):
        raise FuseError(f"layout {layout!r} is neither 'contiguous' nor 'channels_last'")
    if shape.count(...) > 1:
        raise FuseError("a shape may have only one ...")
    return TensorSpec(shape, dtype, device, layout, constant)


def _running(word: str) -> Environment:
    environment = _environment.get()
    if environment is None:
        raise FuseError(f"fuse.{word} can only be used inside of a pattern")
    return environment
