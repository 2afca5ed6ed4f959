"""The plan by which a call is recorded, corrected by what each recording finds.

    record(Plan())                       Assigns: forward assigns self.h
    record(Plan(attributes=(h,)))        WantsPlain: a number is used where only a plain one can be
    record(Plan(attributes=(h,), plain_reads=True))      ->  the graph

Each recording begins anew: the model is as before, and so are the variables of its context.
"""

from __future__ import annotations

import contextvars
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from fuse.errors import CaptureError
from fuse.graph.numbers.read_numbers import WantsPlain
from fuse.graph.signature import Attribute
from fuse.graph.state.freed_graphs import GraphFreed
from fuse.graph.values.chosen_by_draws import Chooses

LARGEST_ATTEMPTS = 6
"""The most plans tried: each captures the module anew, and corrects the plan by what it finds."""

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """How to record a call.

    ``attributes``: the attributes to overlay. ``numbers``: those whose numbers are inputs of the graph instead of
    counts. ``plain``: those whose numbers are constants of the graph. ``plain_reads``: numbers read from tensors become
    constants, too. ``freed``: ``forward`` takes gradients itself, and some results have no gradient any more.
    ``choosing``: code whose choices by random numbers are data (:mod:`fuse.graph.values.chosen_by_draws`); None if they
    must not be. ``converts``: ``int(tensor)`` is no plain number (:mod:`fuse.graph.values.whole_numbers`).
    ``grad_mode``: gradients are on for the caller, and so for ``forward`` where no known tensor needs any.
    """

    attributes: tuple[Attribute, ...] = ()
    numbers: frozenset[Attribute] = frozenset()
    plain: frozenset[Attribute] = frozenset()
    plain_reads: bool = False
    freed: bool = False
    choosing: frozenset[types.CodeType] | None = frozenset()
    converts: bool = False
    grad_mode: bool = False


class Assigns(CaptureError):
    """``forward`` changes attributes without an overlay, or objects in them. ``whole``: it only assigns attributes."""

    def __init__(self, what: str, attributes: Sequence[Attribute], whole: bool) -> None:
        super().__init__(f"forward changes {what}; a graph cannot hold that")
        self.attributes = tuple(attributes)
        self.whole = whole


class Reads(CaptureError):
    """``forward`` uses the value of a number that was taken for a count, or learns that of an input."""

    def __init__(self, attributes: Sequence[Attribute]) -> None:
        super().__init__(f"forward reads {', '.join(map(str, attributes))}")
        self.attributes = frozenset(attributes)


class NeedsGradients(CaptureError):
    """A result needs gradients in a call that is captured without them. ``hidden``: the call reads tensors that need
    gradients, and that are neither arguments nor of the model."""

    hidden: bool = False


def settled(record: Callable[[Plan], T], attributes: Sequence[Attribute], converts: bool = False) -> T:
    """The result of ``record`` under the first plan that needs no correction.

    Raises:
        CaptureError: an error of ``record``; or every plan needs a correction.
    """
    plan = Plan(tuple(attributes), converts=converts, grad_mode=torch.is_grad_enabled())
    for _ in range(LARGEST_ATTEMPTS):
        try:
            return contextvars.copy_context().run(record, plan)
        except Assigns as found:
            again = [attribute for attribute in found.attributes if attribute in plan.attributes]
            new = [attribute for attribute in dict.fromkeys(found.attributes) if attribute not in again]
            if again or not found.whole:
                found.assigned = _pairs((*plan.attributes, *new))
                raise
            plan = replace(plan, attributes=(*plan.attributes, *new))
        except Reads as found:
            plain = plan.plain | (found.attributes & plan.numbers)
            plan = replace(plan, numbers=(plan.numbers | found.attributes) - plain, plain=plain)
        except Chooses as found:
            plan = replace(plan, choosing=found.codes)
        except WantsPlain:
            if plan.choosing or plan.converts:
                plan = _as_written(plan)
                continue
            plan = _with_constants(plan) if plan.numbers else replace(plan, plain_reads=True)
        except GraphFreed:
            if plan.freed:
                raise
            plan = replace(plan, freed=True)
        except CaptureError as error:
            if plan.grad_mode and isinstance(error, NeedsGradients) and error.hidden:
                plan = replace(plan, grad_mode=False)  # the caller sees these tensors in the signature
                continue
            if plan.choosing or plan.converts:
                plan = _as_written(plan)
                continue
            if not plan.numbers:
                error.assigned = _pairs(plan.attributes)
                raise
            plan = _with_constants(plan)
    raise CaptureError("forward assigns other attributes each time it is captured")


def _as_written(plan: Plan) -> Plan:
    """The plan in which the user's functions run as they are written."""
    return replace(plan, choosing=None) if plan.choosing else replace(plan, converts=False)


def _with_constants(plan: Plan) -> Plan:
    """The plan with constants of the graph in place of numbers that are inputs."""
    return replace(plan, plain=plan.plain | plan.numbers, numbers=frozenset())


def _pairs(attributes: Sequence[Attribute]) -> tuple[tuple[str, str, bool], ...]:
    return tuple((attribute.owner, attribute.name, attribute.entries) for attribute in attributes)
