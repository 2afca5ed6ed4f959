"""Replace a sum that grows step by step by one sum over all steps.

    w1 = t(g1) @ h1                              gs = stack([g1, g2, g3, ...]), hs = stack([h1, h2, h3, ...])
    w2 = w1 + t(g2) @ h2              ->         w3 = t(gs) @ hs
    w3 = w2 + t(g3) @ h3 ...

The gradient of a weight that a loop uses has the form at the left, in which every step reads and writes a tensor as
large as the weight. One product over the stacked steps computes the whole sum. One reduction computes a sum over steps
and rows (the gradient of a bias). A sum of parts that are each embedded in zeros (the gradient of ``x[t]``) becomes a
stack of the parts, with zeros in empty places. The first rewrite is in Appleyard, Kocisky and Blunsom, "Optimizing
Performance of Recurrent Neural Networks on GPUs", 2016.

The order of the sum changes, as it does where products are merged. Declined for fewer than four terms, and for parts
that fill less than half of the tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from fuse.loops.rolling import LEAST_STEPS
from fuse.rewrite import surgery
from fuse.rewrite.matrix_products import transposed
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten


@register_pass(stage="loops", before_gradients=False)  # such sums are gradients
def sum_over_steps(graph: GraphModule) -> Iterator[Verdict]:
    """Replace a sum that grows step by step by one sum over all steps."""
    seen: set[Node] = set()
    stacks = _Stacks()
    for last in reversed(list(graph.graph.nodes)):
        if last in seen or not is_sum(last):
            continue
        terms = terms_of(last, seen)
        groups = groups_of(terms)
        if not groups:
            continue
        if reason := next((r for group in groups if (r := group.obstacle)), None):
            yield declined(terms, reason)
        else:
            yield rewrite(terms, sum_once, last, terms, groups, stacks)


def is_sum(node: Node) -> bool:
    """Whether ``node`` adds two tensors of its own shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(a, Node) for a in node.args):
        return False
    held = node.meta["val"]
    return all(a.meta["val"].shape == held.shape and a.meta["val"].dtype == held.dtype for a in node.args)  # type: ignore[union-attr]  # FX types arguments loosely


def terms_of(last: Node, seen: set[Node]) -> list[Node]:
    """The terms of the tree of sums that ends in ``last``, in program order; ``seen`` collects the sums."""
    terms: list[Node] = []
    worklist = [last]
    while worklist:
        node = worklist.pop()
        if node is last or (is_sum(node) and len(node.users) == 1):
            seen.add(node)
            worklist.extend(node.args)  # type: ignore[arg-type]  # FX types arguments loosely
        else:
            terms.append(node)
    return sorted(terms)


@dataclass
class TermGroup:
    """Terms that one operation on stacked operands can compute: ``rows`` and, for products, ``others``."""

    kind: str
    terms: list[Node] = field(default_factory=list)
    rows: list[Node] = field(default_factory=list)
    others: list[Node] = field(default_factory=list)

    @property
    def obstacle(self) -> str | None:
        """Why the terms cannot be one operation, or None."""
        if self.kind != "part":
            return None
        positions = [_position(term) for term in self.terms]
        if len(set(positions)) < len(positions):
            return "two terms have the same position"
        if 2 * len(positions) < self.terms[0].meta["val"].shape[_dimension(self.terms[0])]:
            return "most positions are zero"
        return None


def groups_of(terms: Sequence[Node]) -> list[TermGroup]:
    """The terms of equal form, where there are enough of them."""
    found: dict[Hashable, TermGroup] = {}
    for term in terms:
        if len(term.users) != 1:
            continue
        if term.target is aten.mm.default and (rows := transposed(term.args[0])):  # type: ignore[arg-type]  # FX types arguments loosely
            other: Node = term.args[1]  # type: ignore[assignment]  # FX types arguments loosely
            group = found.setdefault(("product", _key(rows), _key(other)), TermGroup("product"))
            group.others.append(other)
        elif rows := summed_rows(term):
            links = [(n.target, surgery.constant_key(n.args[1:])) for n in _links(term)]
            group = found.setdefault(("rows", _key(rows), *links), TermGroup("rows"))
        elif term.target is aten.select_backward.default:
            rows = term.all_input_nodes[0]
            group = found.setdefault(("part", _key(rows), _dimension(term)), TermGroup("part"))
        else:
            continue
        group.terms.append(term)
        group.rows.append(rows)
    return [group for group in found.values() if len(group.terms) >= LEAST_STEPS]


def summed_rows(term: Node) -> Node | None:
    """The tensor that ``term`` sums over its first dimension and maybe others; ``term`` may be a view of the sum."""
    reduction = _links(term)[-1]
    if reduction.target is not aten.sum.dim_IntList or reduction.kwargs or any(len(n.users) != 1 for n in _links(term)):
        return None
    rows: Node = reduction.args[0]  # type: ignore[assignment]  # FX types arguments loosely
    dims: list[int] = reduction.args[1]  # type: ignore[assignment]  # FX types arguments loosely
    return rows if dims and 0 in {d % rows.meta["val"].dim() for d in dims} else None


def _links(term: Node) -> list[Node]:
    """``term`` and, if it is a ``view``, its base."""
    base = term.args[0] if term.target is aten.view.default else None
    return [term, base] if isinstance(base, Node) else [term]


def _key(node: Node) -> Hashable:
    value = node.meta["val"]
    return value.dtype, tuple(value.shape), value.device


def _dimension(part: Node) -> int:
    rank: int = part.meta["val"].dim()
    return int(part.args[2]) % rank  # type: ignore[arg-type]  # FX types arguments loosely


def _position(part: Node) -> int:
    return int(part.args[3]) % part.meta["val"].shape[_dimension(part)]  # type: ignore[arg-type,no-any-return]  # FX types arguments loosely


def sum_once(last: Node, terms: Sequence[Node], groups: Sequence[TermGroup], stacks: _Stacks) -> None:
    """Replace the sum of all terms by the sum of the groups and of the terms in none."""
    grouped = {term for group in groups for term in group.terms}
    left = [term for term in terms if term not in grouped]
    parts = [*left, *(_MAKE[group.kind](last, group, stacks) for group in groups)]
    total = parts[0]
    for part in parts[1:]:
        total = surgery.insert(last, aten.add.Tensor, total, part, like=last)
    if total.meta["val"].stride() != last.meta["val"].stride():
        total = surgery.insert(last, aten.copy.default, last.args[0], total, like=last)
    surgery.replace(last, total)


def _product(last: Node, group: TermGroup, stacks: _Stacks) -> Node:
    rows, others = stacks.rows(group.rows), stacks.rows(group.others)
    like = group.terms[0]
    return surgery.insert(
        last, aten.mm.default, surgery.insert(last, aten.t.default, rows, like=like), others, like=like
    )


def _summed(last: Node, group: TermGroup, stacks: _Stacks) -> Node:
    *views, reduction = _links(group.terms[0])
    value = surgery.insert(last, aten.sum.dim_IntList, stacks.rows(group.rows), *reduction.args[1:], like=reduction)
    for view in views:
        value = surgery.insert(last, view.target, value, *view.args[1:], like=view)  # type: ignore[arg-type]  # FX types targets loosely
    return value


def _stacked(last: Node, group: TermGroup, stacks: _Stacks) -> Node:
    like, parts = group.terms[0], dict(zip(map(_position, group.terms), group.rows, strict=True))
    dim = _dimension(like)
    positions = range(like.meta["val"].shape[dim])
    if len(parts) < len(positions):
        held = group.rows[0].meta["val"]
        zeros = surgery.insert(
            last, aten.full.default, list(held.shape), 0, dtype=held.dtype, device=held.device, like=like
        )
        parts = dict.fromkeys(positions, zeros) | parts
    return surgery.insert(last, aten.stack.default, [parts[position] for position in positions], dim, like=like)


_MAKE = {"product": _product, "rows": _summed, "part": _stacked}


class _Stacks:
    """Stacked tensors, made once for all sums that read the same ones."""

    def __init__(self) -> None:
        self.made: dict[tuple[Node, ...], Node] = {}

    def rows(self, pieces: Sequence[Node]) -> Node:
        """The rows of all pieces, concatenated."""
        key = tuple(pieces)
        if key not in self.made or self.made[key]._erased:
            latest = max(pieces)
            before = latest.next
            while before.op == "placeholder":
                before = before.next
            stacked = surgery.insert(before, aten.stack.default, list(pieces), like=latest)
            shape = list(pieces[0].meta["val"].shape)
            self.made[key] = surgery.insert(
                before, aten.view.default, stacked, [len(pieces) * shape[0], *shape[1:]], like=latest
            )
        return self.made[key]
