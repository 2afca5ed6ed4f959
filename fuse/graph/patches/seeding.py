"""Follow the state of torch's random generator through a capture.

    forward    state = get_rng_state();  mask = bernoulli(x)         drawn: mask
    backward   set_rng_state(state);     again = bernoulli(x)        again is mask: nothing is drawn a second time

A graph draws from the generator in one order, once. If ``forward`` restores a state that it read, it draws the same
numbers again, which the graph already has (checkpointing does this, around the part that it recomputes). Code that
seeds the generator, or leaves it elsewhere than after the last draw, is refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from fuse.errors import CaptureError
from fuse.graph.patches.patched import patched

aten = torch.ops.aten

OF_A_LAYOUT = frozenset(
    {
        aten.bernoulli.p,
        aten.exponential.default,
        aten.rand.default,
        aten.rand_like.default,
        aten.randn.default,
        aten.randn_like.default,
        aten.uniform.default,
        aten.normal_functional.default,
        aten.randint.default,
        aten.randint.low,
        aten.randperm.default,
    }
)
"""Random operators whose tensor arguments determine only the layout of the result."""


@dataclass(eq=False)
class Draws:
    """The random operators of a graph, in order; ``position``: the number of draws before the generator's present
    state."""

    nodes: list[Node] = field(default_factory=list)
    position: int = 0
    states: list[tuple[Tensor, int]] = field(default_factory=list)  # a state that was read, and the position then
    seeded: bool = False

    def next(self, op: OpOverload, args: Any, kwargs: Mapping[str, Any], emit: Callable[[], Node]) -> Node:
        """The node of the next draw: a new one, or an earlier one that drew the same numbers."""
        if self.position == len(self.nodes):
            self.nodes.append(emit())
        else:
            before = self.nodes[self.position]
            described = (_layouts((args, dict(kwargs))), _layouts((before.args, before.kwargs)))
            if op is not before.target or op not in OF_A_LAYOUT or described[0] != described[1]:
                raise CaptureError(f"{op} draws from a random state that was put back; it runs in eager mode")
        self.position += 1
        return self.nodes[self.position - 1]

    def read(self, state: Tensor) -> Tensor:
        self.states.append((state, self.position))
        return state

    def refuse_value(self, tensor: Tensor) -> None:
        """Refuse to compute with, return or store a state of the generator: it differs in each call."""
        if any(state is tensor for state, _ in self.states):
            raise CaptureError("forward uses the state of the random number generator; a graph cannot hold that")

    def put_back(self, state: Any) -> None:
        found = [position for known, position in self.states if known is state]
        self.seeded |= not found
        self.position = found[0] if found else self.position

    def raise_if_moved(self) -> None:
        if self.seeded or self.position != len(self.nodes):
            raise CaptureError("forward seeds the random number generator; a graph cannot hold that")


@contextlib.contextmanager
def followed(draws: Draws) -> Iterator[None]:
    """A context in which ``draws`` follows this thread's use of the generator; raises at its end if it was seeded.

    >>> with followed(Draws()):
    ...     state = torch.get_rng_state()
    ...     torch.set_rng_state(state)
    >>> with followed(Draws()):
    ...     _ = torch.manual_seed(3)
    Traceback (most recent call last):
    fuse.errors.CaptureError: forward seeds the random number generator; a graph cannot hold that
    """
    home: Any = torch.random
    with patched(home, {"default_generator": _WatchedGenerator(home.default_generator, draws)}):
        yield
    draws.raise_if_moved()


class _WatchedGenerator:
    """Replaces torch's generator where ``torch.manual_seed`` and similar functions look for it."""

    def __init__(self, generator: torch.Generator, draws: Draws) -> None:
        self.generator = generator
        self.draws = draws
        self.thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self.thread:
            if name == "get_state":
                return lambda: self.draws.read(self.generator.get_state())
            if name == "set_state":
                return self.draws.put_back
            if name in ("manual_seed", "seed"):
                self.draws.seeded = True
        return getattr(self.generator, name)


def _layouts(arguments: Any) -> Any:
    """``arguments`` with its layout in place of each tensor."""
    if isinstance(arguments, Node):
        value: Tensor = arguments.meta["val"]
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(arguments, (tuple, list)):
        return tuple(map(_layouts, arguments))
    if isinstance(arguments, Mapping):
        return {name: _layouts(value) for name, value in arguments.items()}
    return arguments
