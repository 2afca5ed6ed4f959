"""Read a value directly instead of from the tensor that it was written to.

    o1 = select_scatter(o0, h1, 1, 1)           o1 = select_scatter(o0, h1, 1, 1)
    h  = select(o1, 1, 1)                 ->    h2 = tanh(h1)
    h2 = tanh(h)

    o1 = select_scatter(o0, h1, 1, 1)     ->    x2 = select(o0, 1, 2)
    x2 = select(o1, 1, 2)

A loop may keep its state in the tensor that it fills (``y[:, t] = f(y[:, t - 1])``). Each step then reads the result of
all writes so far. Once it reads the state directly, the writes only collect results, and the loop can be rolled.
Compilers know this as store-to-load forwarding (Muchnick, "Advanced Compiler Design and Implementation", 1997, section
12.2).

The written value may lie in memory otherwise than its place (``y[:, t] = f(y[:, t - 1].t()).t()``). Where that would
become visible, as many reads as a loop has steps get a contiguous copy of the value, which costs nothing in the kernel
of a loop.

Declined where a read covers only a part of one write or several writes, and where the layout of the written value, or
of its copy, would become visible: in a view that its strides do not allow, in the strides of a result, or in memory
that the caller receives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fuse.loops.rolling import LEAST_STEPS
from fuse.rewrite import effects, surgery, view_layouts
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite
from fuse.rewrite.writes import WRITES, dimension, only_a_place, piece, span, written

aten = torch.ops.aten
READS = {aten.select.int: aten.select_scatter.default, aten.slice.Tensor: aten.slice_scatter.default}
"""For each view operator, the write to the same place."""


@dataclass
class WriteChain:
    """Writes in one dimension so far: ``root`` is the tensor before the first one, ``writers`` the last write at each
    position."""

    root: Node
    dim: int
    writers: list[Node | None]


@dataclass(frozen=True)
class ReadSource:
    """The source of a read: the value written by the write ``node``, or the same place of the tensor ``node``."""

    node: Node
    written: bool


@register_pass(stage="clean", after="start_sums")
def forward_writes(graph: GraphModule) -> Iterator[Verdict]:
    """Read a value directly instead of from the tensor that it was written to."""
    escaping = effects.escaping(graph)
    chains: dict[Node, WriteChain] = {}  # by the last write of each chain
    visible: list[tuple[Node, ReadSource, str]] = []
    for node in list(graph.graph.nodes):
        base: Any = node.args[0] if node.args else None
        if node.target in WRITES:
            chains[node] = continued(chains.pop(base, None), node)
        elif node.target in READS and base in chains and not only_a_place(node):
            source = source_of(node, chains[base])
            if source is None:
                yield declined(node, "the read covers only a part of one write, or several writes")
            elif reason := obstacle(node, source, escaping):
                if source.written and obstacle(node, source, escaping, copied=True) is None:
                    visible.append((node, source, reason))
                else:
                    yield declined(node, reason)
            else:
                yield rewrite(node, forward, node, source, False)
    for read, source, reason in visible:
        if len(visible) < LEAST_STEPS:
            yield declined(read, reason)
        else:
            yield rewrite(read, forward, read, source, True)


def continued(chain: WriteChain | None, write: Node) -> WriteChain:
    """``chain`` with one more write, or a new one."""
    dim = dimension(write)
    if chain is None or chain.dim != dim:
        root: Node = write.args[0]  # type: ignore[assignment]  # FX types arguments loosely
        chain = WriteChain(root, dim, [None] * root.meta["val"].shape[dim])
    start, end = span(write)
    if start == end:  # with steps: nothing is known of any position
        start, end = 0, len(chain.writers)
    chain.writers[start:end] = [write] * (end - start)
    return chain


def source_of(read: Node, chain: WriteChain) -> ReadSource | None:
    """The source of ``read``; None if it has more than one."""
    start, end = span(read)
    writers = set(chain.writers[start:end])
    if chain.dim != dimension(read) or len(writers) != 1:
        return None
    write = writers.pop()
    if write is None:
        return ReadSource(chain.root, written=False)
    same_place = write.target is READS[read.target] and span(write) == (start, end)  # type: ignore[index]  # FX types arguments loosely
    return ReadSource(write, written=True) if same_place else None


def obstacle(read: Node, source: ReadSource, escaping: set[Node], copied: bool = False) -> str | None:
    """Why ``read`` cannot have its value from ``source``, or a contiguous copy of it, or None."""
    if read in escaping:
        return "the caller receives the read, which shares memory with the written tensor"
    value: Tensor = read.meta["val"]
    if source.written:
        given = view_layouts.without_data(written(source.node).meta["val"])
        given = given if given.dtype == value.dtype else given.to(value.dtype)
        new = given if given.shape == value.shape else given.expand(value.shape)
        new = new.contiguous() if copied else new
    else:
        plain = view_layouts.without_data(source.node.meta["val"])
        new = view_layouts.view(read.target, plain, read.args[1:], read.kwargs)  # type: ignore[arg-type]  # FX types targets loosely
    return None if new.stride() == value.stride() else shows(read, new)


def shows(node: Node, new: Tensor) -> str | None:
    """The place where users could notice that ``node`` has the layout of ``new``; None if there is none."""
    worklist = [(node, new)]
    while worklist:
        changed, layout = worklist.pop()
        if effects.reads_place(changed):
            return "an operator reads the memory around it"
        for user in changed.users:
            if makes_contiguous(user):
                continue
            result = _with_operand(user, changed, layout)
            if result is None:
                return f"{user.name} would see another layout"
            if result.stride() != user.meta["val"].stride():
                if not effects.is_view(user):
                    return f"the result of {user.name} would have another layout"
                worklist.append((user, result))
    return None


def _with_operand(user: Node, operand: Node, layout: Tensor) -> Tensor | None:
    """A fake result of ``user`` for an ``operand`` with another layout; None if it is unknown."""
    nodes = user.all_input_nodes
    if not isinstance(user.target, OpOverload) or not all(isinstance(n.meta["val"], Tensor) for n in (user, *nodes)):
        return None
    known = {node: layout if node is operand else view_layouts.without_data(node.meta["val"]) for node in nodes}
    (first, *rest), options = map_arg((user.args, user.kwargs), known.__getitem__)
    result: Tensor | None = view_layouts.view(user.target, first, rest, options)  # type: ignore[arg-type]  # FX types targets loosely
    return result


def makes_contiguous(node: Node) -> bool:
    """Whether ``node`` is a copy whose result is contiguous: it can be told to be, whatever the layout it copies."""
    return node.target is aten.clone.default and node.meta["val"].is_contiguous()


def keep_layouts_of_copies(read: Node) -> None:
    """Tell the copies of ``read``, and of views of it, to be contiguous, as they are."""
    worklist = [read]
    while worklist:
        for user in list(worklist.pop().users):
            if makes_contiguous(user):
                user.update_kwarg("memory_format", torch.contiguous_format)
            elif effects.is_view(user):
                worklist.append(user)


def forward(read: Node, source: ReadSource, copied: bool) -> None:
    """Let the users of ``read`` have its value from ``source``, or a contiguous copy of it."""
    keep_layouts_of_copies(read)
    if source.written:
        new = piece(source.node, read)
        if copied:
            new = surgery.insert(read, aten.clone.default, new, memory_format=torch.contiguous_format)
    else:
        new = surgery.insert(read, read.target, source.node, *read.args[1:], **read.kwargs)  # type: ignore[arg-type]  # FX types targets loosely
    surgery.replace(read, new)
