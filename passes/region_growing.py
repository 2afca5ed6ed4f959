"""Shared by the fusion passes: turn groups of nodes into regions, if each can be lowered.

    groups  ->  region body  ->  kernel?   yes: rewrite      no: try its halves, then decline with the reason

A stack of few pieces is computed in the kernel that reads it. Where the number of pieces varies from call to call, such
a kernel would serve one number. So the stack has a kernel of its own, as if its pieces were many.

Registers no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.fx import GraphModule, Node

from fuse.kernel.domain import Domain, domain_of, join
from fuse.kernel.kernel import Declined
from fuse.kernel.lower import count_varies, lower, remember
from fuse.kernel.sizes.members import alike_parts
from fuse.rewrite import nested, regions
from fuse.rewrite.partition import partition
from fuse.rewrite.verdict import Verdict, declined, rewrite

MAX_REGION = 4096
"""The most operators of one region, which bounds the time of a compiler call."""


def fuse_groups(graph: GraphModule, admits: Callable[[Node], bool]) -> Iterator[Verdict]:
    """Fuse the operators that ``admits``, and existing regions, as far as kernels can be generated."""

    def facts_of(node: Node) -> Domain | None:
        if regions.is_region(node):
            return domain_of_region(node)
        if node.op != "call_function" or not admits(node):
            return None
        domain = domain_of(node)
        return None if isinstance(domain, Declined) else domain

    found = partition(graph.graph, facts_of, bounded_join)
    for group in found.groups:
        members = with_numbers(group.members)
        if len(members) > 1 and group.facts is not None:
            yield from fuse_members(graph, members, group.facts)
    for refusal in found.apart:
        yield declined((refusal.earlier, refusal.later), refusal.reason)
    regions.sort(graph.graph)


def with_numbers(members: Sequence[Node]) -> Sequence[Node]:
    """A single operator with the filled tensors (``full``) that only it reads, which its kernel can hold; several
    operators unchanged."""
    if len(members) > 1:
        return members
    return *(n for n in members[0].all_input_nodes if regions.is_constructor(n) and len(n.users) == 1), *members


def bounded_join(earlier: Domain, later: Domain) -> Domain | str:
    if earlier.size + later.size > MAX_REGION:
        return f"a region holds at most {MAX_REGION} operators"
    return join(earlier, later)


def domain_of_region(node: Node) -> Domain | None:
    """The domain noted at the region's creation."""
    module = nested.called_module(node)
    assert isinstance(module, GraphModule)
    return module.meta.get("domain")


def fuse_members(graph: GraphModule, members: Sequence[Node], domain: Domain) -> Iterator[Verdict]:
    """One region of ``members`` if it lowers, or of all but the last one, else regions of its halves; a single member
    stays as it is."""
    if len(members) < 2:
        return
    joined, readers = at_first_join(members)
    if readers and (pieces := alike_parts(regions.build_body(joined)[0])):
        if count_varies(*pieces):
            yield declined(members, "the number of pieces varies: computed apart, they have one kernel for all numbers")
            yield from fuse_members(graph, joined, domain)
            yield from fuse_members(graph, readers, domain)
            return
        remember(*pieces)
        remember(regions.build_body(readers)[0])
    body, inputs, results = regions.build_body(members)
    verdict = lower(body)
    if not isinstance(verdict, Declined):
        body.meta["domain"] = domain
        yield rewrite(members, regions.insert_region, graph, members, body, inputs, results)
        return
    yield declined(members, verdict.reason)
    most = len(members) - 1
    middle = most if not isinstance(lower(regions.build_body(members[:most])[0]), Declined) else len(members) // 2
    yield from fuse_members(graph, members[:middle], domain)
    yield from fuse_members(graph, members[middle:], domain)


def at_first_join(members: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
    """The members up to the first that stacks or concatenates values, and those after it, if these read it."""
    for i, node in enumerate(members, 1):
        if node.target in (torch.ops.aten.stack.default, torch.ops.aten.cat.default):
            reads = any(regions.owner(value) is node for reader in members[i:] for value in reader.all_input_nodes)
            return (members[:i], members[i:]) if reads else ((), ())
    return (), ()
