"""Rule out candidates of a form by the names of their operands, before any search.

    form    add(mul(f, c), mul(i, tanh(g)))        filters    add of mul, mul;  mul of tanh;  tanh
    graph   1,250 products, 12 of a tanh           the form is searched at those 12; if there are none, nowhere

A filter asks for less than the search does, so that it rules out no match.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from fuse.rewrite.patterns.terms import NUMBER, Term
from fuse.rewrite.patterns.views import stripped

OperandNames = tuple[tuple[str, ...], ...]
"""For each operand of a step in a graph: the names of the steps that it may be, and ``number`` if it may be a number.
"""


class OperandFilter(NamedTuple):
    """A step's name, its number of operands, and the sorted names of operands that are steps or numbers."""

    name: str
    operands: int
    read: tuple[str, ...]

    def __str__(self) -> str:
        named = " and ".join(f"`{one}`" if one != NUMBER else "a number" for one in self.read)
        return (
            f"no `{self.name}` here reads {named}" if named else f"no `{self.name}` here has {self.operands} operands"
        )


def operand_filter_of(step: Term) -> OperandFilter:
    """The filter for a form's step.

    >>> import torch
    >>> from fuse.rewrite.patterns.terms import TensorType, Terms
    >>> terms, tensor_type = Terms(), TensorType((8,), torch.float32, None)
    >>> x = terms.leaf("x", tensor_type)
    >>> of_tanh = operand_filter_of(terms.make("mul", [x, terms.make("tanh", [x], tensor_type)], tensor_type))
    >>> of_tanh, fits(of_tanh, [("tanh",), ("add",)]), fits(of_tanh, [("add",), ()])
    (OperandFilter(name='mul', operands=2, read=('tanh',)), True, False)
    """
    inner = [stripped(operand) for operand in step.operands]
    return OperandFilter(
        step.name, len(inner), tuple(sorted(one.name for one in inner if one.computes or one.name == NUMBER))
    )


def fits(operand_filter: OperandFilter, read: Sequence[Collection[str]]) -> bool:
    """Whether operands with the names ``read`` pass the filter; each operand may have several names."""
    if len(read) != operand_filter.operands:
        return False
    return all(
        sum(one in names for names in read) >= operand_filter.read.count(one)
        for one in dict.fromkeys(operand_filter.read)
    )
