"""Prepare a loop that has no kernel: its body becomes a program of its own, run step by step.

    body:  s = solve(a, h);  return s[:, 0], s          body:  s = solve(a, h);  k = clone(s[:, 0]);  return k, s

A step must store each state in memory of its own, in the layout that the next step reads. It must compute each
collected output directly into its place in the stacked output. The copies needed for this are operators of the body, so
that passes fuse them and counts include them. Outputs of library calls are stacked behind the loop.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fuse import ops
from fuse.graph.fakes.fake_operators import fake_like
from fuse.graph.loop import Loop, of_all_steps
from fuse.graph.outputs import outputs_of
from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.dtypes import supported
from fuse.kernel.kernel import Declined
from fuse.kernel.lower import values_of_call
from fuse.loops.reads import tensors_of
from fuse.loops.rolling import LEAST_STEPS, Rolled, prove
from fuse.rewrite import effects
from fuse.rewrite.launches import node_launches
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.registry import of_stages

aten = torch.ops.aten

MOST_CUTS = 8
"""The most positions tried at which a step may begin."""


def obstacle(loop: Loop) -> str | None:
    """Why the body cannot or should not run as a program step by step, or None."""
    nodes = [node for node in loop.body.graph.nodes if node.op == "call_function"]
    values = [part for node in loop.body.graph.nodes for part in tensors_of(node)]
    if any(value.layout is not torch.strided or value.is_conj() or value.is_neg() for value in values):
        return "a tensor is sparse or lazily conjugated or negated"
    if any(not supported(value.dtype) for value in values):
        return "a step computes with a dtype that kernels do not know"
    if any(value.numel() == 0 for value in values):
        return "a tensor has no elements"
    if not all(effects.is_pure(node) or effects.only_raises(node) for node in nodes):
        return "a step draws random numbers, or has unknown effects"
    targets: list[Any] = [node.target for node in nodes if node.target is not operator.getitem]
    if all(ops.is_view(target) or ops.is_pointwise(target) for target in targets):
        return "elementwise steps fuse without a loop"
    return None


def cuts(rolled: Rolled) -> Iterator[Rolled]:
    """The loop, and the same loop with steps that begin next to an operator without a kernel.

        | f solve g | f solve g | f solve g |      ->      f | solve g f | solve g f | solve g

    The operators between two of these then fuse, where a step boundary among them would cut them in two.
    """
    yield rolled
    if len(rolled.steps) <= LEAST_STEPS:
        return
    calls = [j for j, node in enumerate(rolled.typical) if not _has_kernel(node)]
    starts = dict.fromkeys(start for j in calls for start in (j, j + 1))
    for cut in [start for start in starts if 0 < start < len(rolled.typical)][:MOST_CUTS]:
        pairs = zip(rolled.steps, rolled.steps[1:], strict=False)
        found = prove([[*one[cut:], *following[:cut]] for one, following in pairs])
        if isinstance(found, Rolled):
            yield found


def launches_of_step(loop: Loop) -> int:
    """The launches of a step of ``loop`` after all passes, which rewrite its body here."""
    run_passes(loop.body, of_stages("fuse", "finish"))
    return sum(node_launches(node) for node in loop.body.graph.nodes)


def settle(loop: Loop) -> None:
    """Make the body of ``loop`` hand on and collect memory of its own, by copies where needed."""
    graph = loop.body.graph
    output = graph.output_node()
    given = graph.find_nodes(op="placeholder")
    results: list[Node] = list(output.args[0])  # type: ignore[arg-type]
    carries = loop.spec.carries
    for number, node in enumerate(results[:carries]):
        wanted = given[number].meta["val"]
        passed = node in given[:carries] or _is_own(node)
        if not passed or node.meta["val"].stride() != wanted.stride():
            results[number] = copied(node, output, wanted.stride())
    gathered = 0
    for number, node in enumerate(results[carries:], start=carries):
        own, again = _is_own(node) and node.meta["val"].is_contiguous(), node in results[carries:number]
        if own and not again and node.target is operator.getitem:
            continue  # later passes decide whether it is stacked behind the loop: ``Loop.gathered``
        if own and not _is_computed_here(node):
            gathered += 1
        elif not own or again:
            results[number] = copied(node, output, contiguous_strides(node.meta["val"].shape))
    loop.spec = replace(loop.spec, gathered=gathered)
    output.args = (tuple(results),)
    output.meta["val"] = tuple(node.meta["val"] for node in results)


def native_values(loop: Loop) -> tuple[Tensor, ...]:
    """Metadata of a settled loop's results: last states in a step's layout, stacked outputs contiguous, steps first."""
    states = [node.meta["val"] for node in loop.body.graph.find_nodes(op="placeholder")][: loop.spec.carries]
    kept: Sequence[Tensor] = loop.body.graph.output_node().meta["val"][loop.spec.carries :]
    return (*states, *(of_all_steps(value, loop.spec.trip_count) for value in kept))


def lasts_to_copy(loop: Loop) -> set[int]:
    """The last states without memory of their own: also collected, equal to another one, or an operand of the loop.

    >>> from fuse.graph.loop import LoopSpec
    >>> graph = torch.fx.Graph()
    >>> h, older = graph.placeholder("h"), graph.placeholder("older")
    >>> new = graph.call_function(torch.tanh, (h,))
    >>> _ = graph.output((new, h, new))
    >>> body = torch.fx.GraphModule(torch.nn.Module(), graph)
    >>> sorted(lasts_to_copy(Loop(body, LoopSpec(9, carries=2, step_inputs=(), collected=1))))
    [0, 1]
    """
    results = outputs_of(loop.body.graph)
    carries, steps = loop.spec.carries, loop.spec.trip_count
    states = {node: i for i, node in enumerate(loop.body.graph.find_nodes(op="placeholder")[:carries])}
    taken = {(node, t) for node in results[carries:] for t in range(steps - carries - 1, steps)}
    found: set[int] = set()
    for number in range(carries):
        node, t = results[number], steps - 1
        while node in states and t > 0 and steps - t <= carries:
            node, t = results[states[node]], t - 1
        if node.op == "placeholder" or (node, t) in taken:
            found.add(number)
        taken.add((node, t))
    return found


def _is_own(node: Node) -> bool:
    return node.op == "call_function" and effects.view_base(node) is None


def _is_computed_here(node: Node) -> bool:
    """Whether a kernel or a product computes ``node`` into given memory."""
    if node.target is operator.getitem:
        return False
    if ops.kind(node.target) == "gemm":
        return node.meta["val"].dtype in (torch.float32, torch.float64)
    return _has_kernel(node)


def _has_kernel(node: Node) -> bool:
    """Whether a generated kernel can compute ``node`` alone."""
    return not isinstance(values_of_call(node), Declined)


def copied(node: Node, before: Node, stride: Sequence[int]) -> Node:
    """A copy of ``node`` in front of ``before``, laid out with these strides."""
    held = node.meta["val"]
    with before.graph.inserting_before(before):
        copy = before.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copy.meta.update(val=fake_like(held, stride), source=node.meta.get("source", ""))
    return copy
