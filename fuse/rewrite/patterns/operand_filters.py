"""Operands of a step by operator names alone, which rule out places of a form before any search.

    form    add(mul(f, c), mul(i, tanh(g)))        operand_filters   add of mul, mul     mul of tanh     tanh
    graph   1,250 products, 12 of them of a tanh   the form is looked for at those 12, or, where there are none, nowhere

A operand_filter asks for less than the search for a form does, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from fuse.rewrite.patterns.terms import NUMBER, Term
from fuse.rewrite.patterns.views import stripped

Read = tuple[tuple[str, ...], ...]
"""For each operand of a step in a graph, the names of the steps that it may be, and ``number`` where it is one."""


class OperandFilter(NamedTuple):
    """A step's name, how many operands it has, and the names of those that must be steps or numbers, sorted."""

    name: str
    operands: int
    read: tuple[str, ...]

    def __str__(self) -> str:
        named = " and ".join(f"`{one}`" if one != NUMBER else "a number" for one in self.read)
        return (
            f"no `{self.name}` here reads {named}" if named else f"no `{self.name}` here has {self.operands} operands"
        )


def operand_filter_of(step: Term) -> OperandFilter:
    """The operand_filter of a form's step.

    >>> import torch
    >>> from fuse.rewrite.patterns.terms import TensorType, Terms
    >>> terms, tensor_type = Terms(), TensorType((8,), torch.float32, None)
    >>> x = terms.leaf("x", tensor_type)
    >>> operand_filter = operand_filter_of(terms.make("mul", [x, terms.make("tanh", [x], tensor_type)], tensor_type))
    >>> operand_filter, fits(operand_filter, [("tanh",), ("add",)]), fits(operand_filter, [("add",), ()])
    (OperandFilter(name='mul', operands=2, read=('tanh',)), True, False)
    """
    inner = [stripped(operand) for operand in step.operands]
    return OperandFilter(
        step.name, len(inner), tuple(sorted(one.name for one in inner if one.computes or one.name == NUMBER))
    )


def fits(operand_filter: OperandFilter, read: Sequence[Collection[str]]) -> bool:
    """Whether a step of the operand_filter's name has operands for what it asks for; ``read`` are what they may be."""
    if len(read) != operand_filter.operands:
        return False
    return all(
        sum(one in names for names in read) >= operand_filter.read.count(one)
        for one in dict.fromkeys(operand_filter.read)
    )
