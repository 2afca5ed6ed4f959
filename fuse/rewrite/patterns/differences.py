"""The differences between two terms: the first on each path, in words, with the change to the pattern.

pattern   cat(x, y, dim=1)          graph   cat(x, y, dim=0) "`cat` has dim 0, the pattern wants 1"      change: dim=0,
or fuse.const("dim") for any
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch._ops import OpOverload
from torch.fx import Node

from fuse import ops
from fuse.rewrite.patterns.canonical import may_make
from fuse.rewrite.patterns.terms import LEAF, NUMBER, Term, below


@dataclass(frozen=True)
class Difference:
    """One difference. ``reason``: for the user. ``change``: the change to the pattern that would remove it, if known.

    ``wanted``: the pattern's operator. ``node``: the graph's node. ``written``: a tensor is written between its uses.
    """

    reason: str
    change: str = ""
    wanted: Node | None = None
    node: Node | None = None
    written: bool = False


def differences(wanted: Term, found: Term) -> Iterator[Difference]:
    """The differences between the graph's term ``found`` and the pattern's ``wanted``; both are of one table."""
    if wanted is found:
        return
    if wanted.name != found.name or len(wanted.operands) != len(found.operands):
        yield other_operator(wanted, found)
        return
    if wanted.name == NUMBER:
        shown = (str(found), str(wanted)) if str(found) != str(wanted) else (repr(found.value), repr(wanted.value))
        reason = f"the number is {shown[0]}, the pattern wants {shown[1]}"
        yield _difference(wanted, found, reason, f"write {found}, or fuse.const(...) for any number")
        return
    if wanted.name == LEAF:
        yield _difference(wanted, found, "an operand is another value than the pattern's")
        return
    inner = list(_other_constants(wanted, found))
    for one, two in paired(wanted, found):
        inner += list(differences(one, two))
    if not inner:
        yield _difference(wanted, found, f"`{found.name}` gives {found.type}, the pattern's gives {wanted.type}")
    yield from inner


def _other_constants(wanted: Term, found: Term) -> Iterator[Difference]:
    for (name, want), (_, have) in zip(wanted.constants, found.constants, strict=False):
        if want != have:
            reason = f"`{found.name}` has {name} {_shown(have)}, the pattern wants {_shown(want)}"
            yield _difference(wanted, found, reason, f'{name}={_shown(have)}, or fuse.const("{name}") for any')


def other_operator(wanted: Term, found: Term) -> Difference:
    """The difference between two operators, or between an operator and a given value."""
    if wanted.name == found.name:
        reason = f"`{found.name}` has {len(found.operands)} operands, the pattern wants {len(wanted.operands)}"
        return _difference(wanted, found, reason, "take them as a list: a parameter with the default fuse.many()")
    if LEAF in (wanted.name, found.name) or wanted.is_view != found.is_view:
        extra = wanted.name == LEAF or (found.is_view and found.name != LEAF)
        term, owner, other = (found, "graph", "pattern") if extra else (wanted, "pattern", "graph")
        name = f"`cast` to {term.type}" if term.name == "cast" else f"`{term.name}`"
        change = f"put {name} into the pattern" if owner == "graph" else f"take {name} out of the pattern"
        return _difference(wanted, found, f"the {owner} has {name} where the {other} has none", change)
    return _difference(wanted, found, *_other_names(wanted, found))


def _other_names(wanted: Term, found: Term) -> tuple[str, str]:
    """Reason and change if the graph has the operator of ``found`` and the pattern that of ``wanted``."""
    node = _node_of(found)
    op = None if node is None else node.target
    if node is not None and isinstance(op, OpOverload) and wanted.name in may_make(op):
        plain = ops.is_pointwise(op) and found.name != "mul"  # a sum, which may have a factor and has none
        return (None if plain else other_factors(node, found)) or other_names(*_names(wanted, found))
    return other_names(*_names(wanted, found))


def other_factors(node: Node, found: Term) -> tuple[str, str] | None:
    """Reason and change if ``found``, a part of the term of ``node``, is a product with a number other than -1."""
    if found.name == "mul" and any(operand.name == NUMBER and operand.value == -1 for operand in found.operands):
        return None
    name = called(node)
    return f"`{name}` has factors that the pattern does not have", f"write `{name}` itself, with its factors"


def other_names(wanted: str, found: str) -> tuple[str, str]:
    """Reason and change if the graph has the operator ``found`` and the pattern ``wanted``."""
    return f"`{found}` where the pattern has `{wanted}`", f"fuse.either(...) of `{wanted}` and `{found}`"


def _names(wanted: Term, found: Term) -> tuple[str, str]:
    """The names of two terms: those of the operators that they were made for, unless these are equal."""
    operators = _node_of(wanted), _node_of(found)
    if operators[0] is not None and operators[1] is not None:
        names = called(operators[0]), called(operators[1])
        if names[0] != names[1]:
            return names
    return wanted.name, found.name


def _difference(wanted: Term, found: Term, reason: str, change: str = "") -> Difference:
    return Difference(reason, change, _node_of(wanted), _node_of(found))


def called(node: Node) -> str:
    """The operator's name, without the node's number, so that equal reasons are counted together.

    >>> import torch
    >>> called(torch.fx.Graph().call_function(torch.ops.aten.add.Tensor, (1, 2)))
    'add'
    """
    if node.target is operator.getitem:
        return f"{called(node.all_input_nodes[0])}[{node.args[1]}]"
    return str(node.target).removeprefix("aten.").partition(".")[0] if node.op == "call_function" else node.op


def paired(wanted: Term, found: Term) -> list[tuple[Term, Term]]:
    """Pairs of operands; equal ones are paired first if the operator is commutative."""
    if not wanted.commutative:
        return list(zip(wanted.operands, found.operands, strict=True))
    left, right = list(wanted.operands), list(found.operands)
    pairs = []
    for same in (lambda one, two: one is two, lambda one, two: one.name == two.name):
        for one in list(left):
            two = next((term for term in right if same(one, term)), None)
            if two is not None:
                pairs.append((one, two))
                left.remove(one)
                right.remove(two)
    return pairs + list(zip(left, right, strict=True))


def common(wanted: Sequence[Term], found: Sequence[Term]) -> set[Term]:
    """The pattern's terms that the graph has, too."""
    return set(below(*wanted)) & set(below(*found))


def _node_of(term: Term) -> Node | None:
    return term.origin if isinstance(term.origin, Node) else None


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
