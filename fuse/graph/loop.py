"""A loop over steps as one node of a graph.

    h = h0                                      h_last, hs = loop(h0, xs, w)
    for t in range(T):                   ->         body(h, x, w) -> (h', h')
        h = tanh(xs[t] + h @ w)                     h carried, x = xs[t], w the same in each step, h' collected
        hs.append(h)

The body is a captured graph of one step. Its placeholders are the carried states, then the parts of per-step inputs,
then the invariants. Its outputs are the next states, then the collected values. ``forward`` runs the body step by step;
it is the reference for a kernel, and the fallback.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fuse.graph.fakes.fake_operators import mode_of
from fuse.graph.numbers.learned import Truths
from fuse.graph.outputs import outputs_of


@dataclass(frozen=True)
class StepInput:
    """Step ``t`` reads ``source.select(dim, start + step * t)`` of an operand ``source`` of the loop."""

    dim: int
    start: int
    step: int


@dataclass(frozen=True)
class Stop:
    """The condition that ends a loop: collected boolean number ``collected`` is not ``goes_on``.

    ``whole``: the step whose condition differs counts, and its states are the last; otherwise the states before it are.
    Collected values of later steps are undefined, except the boolean: it keeps the value that ended the loop.
    """

    collected: int
    goes_on: bool
    whole: bool


@dataclass(frozen=True)
class LoopSpec:
    """The parameters of a loop.

    ``trip_count``: number of steps. ``carries``: number of carried states; the first step reads the loop's operand,
    each other step the state that the step before wrote. ``step_inputs``: how steps read the operands that follow.
    ``collected``: number of values that are returned for every step. ``source``: the user's line of the body.
    ``one_call``: eager runs all steps in one library call. ``persistent``: one kernel runs all steps, as one launch;
    otherwise the body's launches are made in every step. ``gathered``: see :attr:`Loop.gathered`. ``backwards``:
    collected values are stored in reverse, the first step last. ``stop``: the loop may end before ``trip_count`` steps.
    """

    trip_count: int
    carries: int
    step_inputs: tuple[StepInput, ...]
    collected: int
    source: str = ""
    one_call: bool = False
    persistent: bool = True
    gathered: int = 0
    backwards: bool = False
    stop: Stop | None = None


class Loop(nn.Module):
    """``loop(*initial states, *per-step inputs, *invariants) -> (*last states, *collected)``.

    Collected values are stacked along dimension 0, the last step first if the loop runs ``backwards``. ``strides``: the
    result strides that the surrounding graph expects; None if any will do. ``truths``: the learned booleans of a loop
    that may stop.
    """

    def __init__(self, body: GraphModule, spec: LoopSpec) -> None:
        super().__init__()
        self.body = body
        self.spec = spec
        self.strides: tuple[tuple[int, ...], ...] | None = None
        self.truths: Truths | None = None
        self.meta = {"kind": "loop"}

    @property
    def persistent(self) -> bool:
        """Whether all steps run as one launch."""
        return self.spec.persistent

    @property
    def gathered(self) -> int:
        """The number of collected values that a library call makes as a new tensor in every step; they are stacked
        behind the loop.

        One of several results of an operator counts until a region computes it.
        """
        kept = outputs_of(self.body.graph)[self.spec.carries :]
        parts = [node.args[0] for node in kept if node.target is operator.getitem]
        return self.spec.gathered + sum(isinstance(node, Node) and node.op == "call_function" for node in parts)

    @property
    def trip_count(self) -> int:
        return self.spec.trip_count

    def with_body(self, body: GraphModule) -> Loop:
        """The same loop with another body."""
        loop = Loop(body, self.spec)
        loop.strides = self.strides
        return loop

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        spec = self.spec
        states = list(operands[: spec.carries])
        sources = operands[spec.carries : spec.carries + len(spec.step_inputs)]
        invariants = operands[spec.carries + len(spec.step_inputs) :]
        collected: list[list[Tensor]] = [[] for _ in range(spec.collected)]
        for t in range(spec.trip_count):
            reads = [s.select(i.dim, i.start + i.step * t) for s, i in zip(sources, spec.step_inputs, strict=True)]
            results = self.body(*states, *reads, *invariants)
            before, states = states, list(results[: spec.carries])
            for kept, result in zip(collected, results[spec.carries :], strict=True):
                kept.append(result)
            if spec.stop is not None and bool(collected[spec.stop.collected][-1]) is not spec.stop.goes_on:
                states = states if spec.stop.whole else before
                collected = [kept + kept[-1:] * (spec.trip_count - t - 1) for kept in collected]
                break
        if spec.backwards:
            collected = [kept[::-1] for kept in collected]
        if self.strides is None:
            return (*states, *(torch.stack(kept) for kept in collected))
        lasts = [_laid_out(state, stride) for state, stride in zip(states, self.strides, strict=False)]
        return (*lasts, *map(_stacked, collected, self.strides[spec.carries :]))


def of_all_steps(value: Tensor, steps: int, dim: int = 0) -> Tensor:
    """A fake stack of ``value`` over all steps: ``[steps, *shape]``, contiguous once the steps are moved to ``dim``.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode():
    ...     value = torch.empty(2, 3)
    >>> tuple(of_all_steps(value, 4).shape), of_all_steps(value, 4, dim=1).stride()
    ((4, 2, 3), (3, 12, 1))
    """
    shape = value.shape
    with mode_of(value):
        stacked = torch.empty((*shape[:dim], steps, *shape[dim:]), dtype=value.dtype, device=value.device)
        return stacked.movedim(dim, 0) if dim else stacked


def depending(loop: Loop, positions: Iterable[int]) -> set[Node]:
    """The nodes of the body that depend on the operands at ``positions``, in any step."""
    nodes: list[Node] = loop.body.graph.find_nodes(op="placeholder")
    outputs = outputs_of(loop.body.graph)
    found = {nodes[i] for i in positions}
    while True:
        for node in loop.body.graph.nodes:
            if node.op not in ("placeholder", "output") and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        more = {nodes[i] for i in range(loop.spec.carries) if outputs[i] in found} - found
        if not more:
            return found
        found |= more


def results_of(loop: Loop, positions: Iterable[int]) -> set[int]:
    """The positions of results that depend on the operands at ``positions``."""
    outputs = outputs_of(loop.body.graph)
    found = depending(loop, positions)
    return {i for i, output in enumerate(outputs) if output in found}


def _stacked(parts: list[Tensor], stride: tuple[int, ...]) -> Tensor:
    """``parts`` stacked along a new first dimension, with these strides.

    The steps are first stacked at the position that their stride has among the strides of a part, so that dense parts
    need no copy.
    """
    position = sum(one > stride[0] for one in stride[1:])
    return _laid_out(torch.stack(parts, position).movedim(position, 0), stride)


def _laid_out(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    return value if value.stride() == stride else value.new_empty_strided(value.shape, stride).copy_(value)
