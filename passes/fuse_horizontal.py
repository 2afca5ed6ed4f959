"""Run independent small kernels in one launch.

    q = region_1(a)                 q, k = region(a, b):
    k = region_2(b)        ->           loop over q's elements
                                        loop over k's elements

The kernels must not depend on one another (equal depth, see :mod:`fuse.rewrite.partition`). They must also be small: a
kernel that runs longer than a launch takes gains nothing. Where sizes vary, kernels of any size share a launch, so that
large and small calls have one graph. Many kernels share several launches, so that compilers stay fast; equal functions
are compiled once. Every loop nest keeps its own shape. Many kernels that do the same to different tensors share one
launch, whose function has a loop over them (:mod:`fuse.kernel.sizes.members`). A fill (``zeros``) that a library call
or the caller reads joins the first kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fuse.cost.work import bytes_of, tensors_in
from fuse.kernel.domain import Domain, domain_of
from fuse.kernel.kernel import Declined
from fuse.kernel.lower import structure
from fuse.kernel.sizes.members import FEWEST
from fuse.kernel.sizes.region_text import layouts
from fuse.kernel.sizes.sized import sizes_vary
from fuse.passes.region_growing import domain_of_region, fuse_members
from fuse.rewrite import nested, regions
from fuse.rewrite.partition import Group, partition
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict

MAX_BYTES = 4 * 2**20
"""The most bytes that a small kernel reads and writes: beyond, work outweighs a launch on any device."""

MAX_OPERATORS = 96
"""The most operators merged into one kernel: compilers take time by the square of a function's size."""

OPERATORS_PER_REDUCTION = 4
"""The operators that a reduction counts for: it has loops of its own."""


@register_pass(stage="finish", after="loop_ends")
def fuse_horizontal(graph: GraphModule) -> Iterator[Verdict]:
    """Run independent small kernels in one launch."""
    found = partition(graph.graph, small_kernel, lambda earlier, later: "dependent kernels are not merged here")
    levels: dict[int, list[Group[Domain]]] = {}
    for group in (*found.groups, *fills(graph)):
        if group.facts is not None:
            levels.setdefault(group.depth, []).append(group)
    for level in levels.values():
        for together in functions(level):
            members = sorted(m for group in together for m in group.members)
            yield from fuse_members(graph, members, together[0].facts or Domain(0, None, False, 0))
    regions.sort(graph.graph)


def fills(graph: GraphModule) -> Iterator[Group[Domain]]:
    """Fills (``zeros``) that launch on their own, on the first level: they wait for no other kernel."""
    for node in graph.graph.nodes:
        if regions.is_constructor(node) and (domain := small_kernel(node)) is not None:
            yield Group(1, domain, [node])


def functions(level: list[Group[Domain]]) -> Iterator[list[Group[Domain]]]:
    """Consecutive kernels that one function may hold; if these are several functions, many that do the same first."""
    alike: dict[str, list[Group[Domain]]] = {}
    for group in level if sum(map(operators_of, level)) > MAX_OPERATORS else ():
        alike.setdefault(_spelled(group), []).append(group)
    many = [of for of in alike.values() if len(of) >= FEWEST and sum(map(operators_of, of)) > MAX_OPERATORS // 4]
    yield from many
    apart = {id(group) for of in many for group in of}
    together: list[Group[Domain]] = []
    operators = 0
    for group in level:
        if id(group) in apart:
            continue
        more = operators_of(group)
        if together and operators + more > MAX_OPERATORS:
            yield together
            together, operators = [], 0
        together.append(group)
        operators += more
    if together:
        yield together


def operators_of(group: Group[Domain]) -> int:
    """The operators of a kernel, as compilers' time counts them."""
    return 0 if group.facts is None else group.facts.size + OPERATORS_PER_REDUCTION * group.facts.reductions


def _spelled(group: Group[Domain]) -> str:
    """A text that is equal for kernels that do the same to tensors of equal layouts."""
    (node,) = group.members
    if regions.is_region(node):
        module = nested.called_module(node)
        assert isinstance(module, GraphModule)
        return structure(module, named=False)
    return f"{node.target} {map_arg((node.args, node.kwargs), layouts)} {layouts(node)}"


def small_kernel(node: Node) -> Domain | None:
    """The domain of a kernel that moves at most ``MAX_BYTES``, or of any where sizes vary; else None."""
    if regions.is_region(node):
        domain = domain_of_region(node)
    else:
        found = domain_of(node) if node.op == "call_function" else None
        domain = None if found is None or isinstance(found, Declined) else found
    if domain is None or sizes_vary():
        return domain
    values = [*(a.meta["val"] for a in node.all_input_nodes), node.meta["val"]]
    moved = sum(bytes_of(tensor) for tensor in tensors_in(values))
    return domain if moved <= MAX_BYTES else None
