"""Programs for lengths that were never captured, from graphs captured at a few short ones.

    graph at 11   ->  steps  -+
    graph at 17   ->  steps  -+->  one law  ->  steps at 1024  ->  program
    graph at 37   ->  steps  -+

The steps of a program are plain data: which kernel, which operator, which bytes of which buffer, which sizes. At all
captured lengths they must be the same but for whole numbers that grow evenly with the length. Kernels get what differs
as sizes (:mod:`fuse.kernel.cpu.any_length`), so that nothing is compiled for a new length either.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule

from fuse.graph.signature import InputSpec, Signature
from fuse.kernel.cpu.any_length import for_any_length
from fuse.kernel.lower import Declined, Kernel, lower
from fuse.runtime.laws import Law, NoLaw, law_of
from fuse.runtime.libraries import LARGEST_NUMBER
from fuse.runtime.program import Program
from fuse.runtime.schedule import schedule
from fuse.runtime.steps import KernelStep, ProductStep, Schedule, Step


class OtherConstants(NoLaw):
    """Constants of the graphs hold other numbers; without folding they might be computed in the call."""


@dataclass(frozen=True)
class Template:
    """Programs for all lengths from ``least`` on. ``signature`` is that of the shortest captured graph."""

    least: int
    signature: Signature
    _steps: Law
    _outputs: Law

    def at(self, length: int) -> tuple[Program, Signature]:
        """The program for one length, and what it promises its caller.

        Raises:
            NoLaw: there is none for this length; the message is a reason.
            CompilerMissing, CompileFailed: see :mod:`fuse.runtime.compiler`.
        """
        steps: Schedule = self._steps(length)
        for step in steps.steps:
            if isinstance(step, ProductStep) and step.product.largest > LARGEST_NUMBER:
                raise NoLaw("a matrix is too large for the library")
        return Program(steps), replace(self.signature, outputs=self._outputs(length))


def template_of(lengths: Sequence[int], graphs: Sequence[GraphModule]) -> Template:
    """The template of graphs that were captured, and rewritten, at these lengths.

    Raises:
        NoLaw: the graphs are not one function of the length; the message is a reason. :class:`OtherConstants` is one.
    """
    signatures: list[Signature] = [graph.meta["signature"] for graph in graphs]
    _check_inputs([signature.inputs for signature in signatures])
    if any(signature.out_spec != signatures[0].out_spec for signature in signatures):
        raise NoLaw("the structure of the result is another one at other lengths")
    law_of(lengths, [signature.mutations for signature in signatures])
    steps = law_of(lengths, _shared_kernels(graphs))
    outputs = law_of(lengths, [signature.outputs for signature in signatures])
    return Template(min(lengths), replace(signatures[0], dispatches=()), steps, outputs)


def _check_inputs(inputs: Sequence[Sequence[InputSpec]]) -> None:
    """Placeholders must be the same at all lengths, and constants hold the same numbers."""
    if any(found != inputs[0] for found in inputs):
        raise NoLaw("the graph has other inputs at other lengths")
    for specs in zip(*inputs, strict=True):
        values = [spec.value for spec in specs if spec.value is not None]
        if values and not all(torch.equal(values[0], value) for value in values):
            raise OtherConstants("a constant has other numbers at other lengths")


def _shared_kernels(graphs: Sequence[GraphModule]) -> list[Schedule]:
    """The schedules of the graphs, where a kernel that differs is replaced by one that serves all lengths."""
    plans = [schedule(graph, lower) for graph in graphs]
    if len({len(plan.steps) for plan in plans}) > 1:
        counts = f"{len(plans[0].steps)} steps become {len(plans[-1].steps)}"
        raise NoLaw(f"the program has more launches at other lengths: {counts}")
    if all(_same_kernels(steps) for steps in zip(*(plan.steps for plan in plans), strict=True)):
        return plans
    asking = [schedule(graph, functools.partial(lower, threads="asked in the call")) for graph in graphs]
    made: dict[tuple[str, ...], list[Kernel] | Declined] = {}
    steps = [list(plan.steps) for plan in plans]
    for number in range(len(steps[0])):
        if not _same_kernels([of_one[number] for of_one in steps]):
            found = _one_kernel([plan.steps[number] for plan in asking], made)
            for of_one, step in zip(steps, found, strict=True):
                of_one[number] = step
    return [replace(plan, steps=tuple(of_one)) for plan, of_one in zip(plans, steps, strict=True)]


def _same_kernels(steps: Sequence[Step]) -> bool:
    return len({step.kernel.source for step in steps if isinstance(step, KernelStep)}) <= 1


def _one_kernel(steps: Sequence[Step], made: dict[tuple[str, ...], list[Kernel] | Declined]) -> list[KernelStep]:
    """The same step at several lengths with one kernel for all; ``made``: those found before, by names."""
    calls = [step for step in steps if isinstance(step, KernelStep)]
    if len(calls) < len(steps) or len({len(call.reads) for call in calls}) > 1:
        raise NoLaw("something runs as a kernel at some lengths only")
    names = tuple(call.kernel.name for call in calls)
    if names not in made:
        arguments = len(calls[0].reads) + len(calls[0].writes)
        made[names] = for_any_length([call.kernel for call in calls], arguments)
    found = made[names]
    if isinstance(found, Declined):
        raise NoLaw(found.reason)
    return [replace(call, kernel=kernel) for call, kernel in zip(calls, found, strict=True)]
