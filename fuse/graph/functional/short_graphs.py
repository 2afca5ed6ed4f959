"""Stand-ins for steps of a loop that a short graph leaves out.

    x, h0 -> 1,024 equal steps -> stack(h1 ... h1024)

    opening(x), opening(h0) -> 16 steps -> h1 ... h16
    remaining(h16)                                     the values h17 ... h1024
    closing(h16)                                       h1024
    stack_of_steps([h1, ..., h16, remaining(h16)])     the stack of all

A short graph computes what the whole graph computes, because each stand-in has the value of the results that it
replaces. ``opening`` returns its operand. Passes know nothing about stand-ins. So whatever a pass derives from the
first steps holds for any initial state and any position in the inputs, and thus for all steps. The pass that rolls the
loop removes the stand-ins. If the steps do not become a loop, the whole graph is made (:attr:`Steps.expand`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuse.graph.outputs import copied

aten = torch.ops.aten

STEPS_KEPT = 16
"""Steps in a short graph. More than steps that are peeled at both ends and a group of steps that together are one."""

WHOLE = "whole_graph"
"""Key in a short graph's ``meta`` of the function that makes the whole graph."""


class StepsNeeded(Exception):
    """The steps of a short graph do not become a loop: passes need all of them."""


def opening(value: Any, loop: int) -> Any:
    """``value``, which loop number ``loop`` starts from, or which its steps read part by part."""
    raise StepsNeeded


def closing(value: Any, loop: int, back: int, left_out: int) -> Any:
    """The counterpart of ``value`` in the step ``left_out`` steps later.

    ``value`` is a result of the last step at hand, or of the step ``back`` before that.
    """
    raise StepsNeeded


def remaining(value: Any, loop: int, left_out: int) -> Any:
    """The counterparts of ``value``, a result of the last step at hand, in each of ``left_out`` later steps: several
    tensors."""
    raise StepsNeeded


def stack_of_steps(pieces: Any, dim: int = 0) -> Any:
    """``stack``, where one of the ``pieces`` is several that remain."""
    raise StepsNeeded


def cat_of_steps(pieces: Any, dim: int = 0) -> Any:
    """``cat``, where one of the ``pieces`` is several that remain."""
    raise StepsNeeded


COLLECTORS: Mapping[Any, Callable[..., Any]] = {
    aten.stack.default: stack_of_steps,
    aten.cat.default: cat_of_steps,
}
"""The operators that may take what remains."""

STAND_INS = frozenset([opening, closing, remaining, *COLLECTORS.values()])
LATER = frozenset([closing, remaining])
"""Stand-ins for values of steps that were left out."""


def shortened(whole: GraphModule, expand: Callable[[], None]) -> GraphModule:
    """A copy of ``whole``, which has stand-ins, for passes to change; :func:`whole_graph` returns ``whole`` after
    ``expand``."""

    def made() -> GraphModule:
        expand()
        whole.recompile()
        return whole

    short = copied(whole)
    short.meta[WHOLE] = made
    return short


def whole_graph(short: GraphModule) -> GraphModule:
    """The graph with all steps from which ``short`` was made, whatever passes have changed in ``short``."""
    made: GraphModule = short.meta[WHOLE]()
    return made


def is_short(graph: GraphModule) -> bool:
    """Whether steps are left out of ``graph``."""
    return WHOLE in graph.meta


@dataclass(frozen=True)
class Slot:
    """An operand of a step: argument ``at`` of its operator number ``position``; where this is a list, its ``item``."""

    position: int
    at: int
    item: int = -1


def given(slot: Slot, args: tuple[Any, ...]) -> Any:
    """The operand in ``slot`` of a call with these arguments."""
    return args[slot.at] if slot.item < 0 else args[slot.at][slot.item]


def selected(node: Node) -> tuple[Node, int, int] | None:
    """Tensor, dimension and position, where ``node`` selects a part of a tensor."""
    if node.target is not aten.select.int or len(node.args) != 3:
        return None
    whole, dim, at = node.args
    if not isinstance(whole, Node) or not isinstance(dim, int) or not isinstance(at, int):
        return None
    return whole, dim, operator.index(at)
