"""List the kernels of a graph: their source, or the IR from which it is generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.fx import GraphModule, Node

from fuse.graph.loop import Loop
from fuse.graph.loop_with_ends import LoopWithEnds
from fuse.kernel.definitions import defined, defined_loop
from fuse.kernel.ir import KernelBody
from fuse.kernel.ir_text import text_of_body
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.loops.lower_loops import lower_loop, lower_with_ends
from fuse.kernel.lower import attempt, lower
from fuse.kernel.recipes.reading import computation_of
from fuse.kernel.target import LoopKernels
from fuse.rewrite.nested import called_module, kind, walk

Language = Literal["source", "ir"]
MARKS: dict[Language, str] = {"source": "//", "ir": "#"}
"""Prefix of comments."""


def listing(graph: GraphModule, language: Language = "source") -> str:
    """Every kernel of the fused groups and the loops of ``graph``, in order of first use.

    Groups that compute the same share one kernel, and the line above it says how many; the line above a loop's kernel
    has the sizes it is called with, the trip count first. A group that cannot be lowered is listed with the reason. The
    functions that kernels call (``fuse_tanh``, ``fuse_product`` and so on) stand in ``fuse/kernel/cpu/vecmath.h`` and
    the headers beside it.

    In the ``"ir"``, products, convolutions, attention and loops are plain loop nests, one for each product and one for
    time; the line above says how the target runs them.

    >>> import torch, fuse
    >>> listing(fuse.capture(torch.nn.Identity(), (torch.ones(3),)))
    '// no fused groups, so no generated kernels'
    """
    texts = (_described(one, language) for one in kernels(graph))
    return "\n\n".join(texts) or f"{MARKS[language]} no fused groups, so no generated kernels"


@dataclass(frozen=True)
class Listed:
    """One generated kernel: its ``code``, the nodes that call it, and the sizes each passes (a loop's trip count).

    A group that cannot be lowered has a ``reason`` instead of code. ``call`` is the first node that calls it.
    ``schedule`` describes how it runs, if its loops in the IR do not show it.
    """

    callers: tuple[str, ...]
    code: str
    reason: str
    sizes: tuple[tuple[tuple[str, int], ...], ...]
    call: Node
    schedule: str


def kernels(graph: GraphModule) -> list[Listed]:
    """The kernels of ``graph``, in order of first use; groups that compute the same share one.

    >>> import torch, fuse
    >>> kernels(fuse.capture(torch.nn.Identity(), (torch.ones(3),)))
    []
    """
    users: dict[str, list[tuple[Node, Kernel | Declined]]] = {}
    made: LoopKernels = {}
    for body, _ in walk(graph):
        for node in body.graph.nodes:
            if kind(node) == "region" or getattr(called_module(node), "persistent", False):
                kernel = _lowered(node, made)
                users.setdefault(_text(kernel), []).append((node, kernel))
    listed = []
    for text, callers in users.items():
        (call, kernel), names = callers[0], tuple(node.name for node, _ in callers)
        sizes = tuple(tuple(k.sizes) for _, k in callers if isinstance(k, Kernel))
        if isinstance(kernel, Kernel):
            listed.append(Listed(names, text, "", sizes, call, kernel.schedule))
        else:
            listed.append(Listed(names, "", kernel.reason, sizes, call, ""))
    return listed


def _lowered(node: Node, made: LoopKernels) -> Kernel | Declined:
    module = called_module(node)
    if isinstance(module, Loop):
        operands = [operand.meta["val"] for operand in node.args if isinstance(operand, Node)]
        return lower_loop(module, operands, node.meta["val"], made)
    if isinstance(module, LoopWithEnds):
        return lower_with_ends(module, made)
    assert isinstance(module, GraphModule)
    return lower(module)


def _text(kernel: Kernel | Declined) -> str:
    return kernel.source.strip() if isinstance(kernel, Kernel) else kernel.reason


def _described(one: Listed, language: Language) -> str:
    """A kernel, or the reason for none, below the names of its callers; each loop with the sizes it passes."""
    name, *others = one.callers
    mark = MARKS[language]
    shared = f" and {len(others)} more" if others else ""
    if one.reason:
        return f"{mark} {name}{shared}: runs operator by operator, because {one.reason}"
    heading = [f"{mark} {name}{shared}"]
    if one.sizes[0]:
        heading = [f"{mark} {name}: {_sizes(sizes)}" for name, sizes in zip(one.callers, one.sizes, strict=True)]
    if language == "source":
        return "\n".join([*heading, one.code])
    runs = [f"{mark} runs as: {one.schedule}"] if one.schedule else []
    return "\n".join([*heading, *runs, *_ir(one.call)])


def _sizes(sizes: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sizes)


def _ir(call: Node) -> Iterator[str]:
    """The IR of a call of a kernel: a loop with prologue and epilogue has one body after another."""
    module = called_module(call)
    if isinstance(module, LoopWithEnds):
        for node in module.body.graph.nodes:
            if module.called(node) is not None:
                yield from _ir(node)
        return
    body = attempt(lambda: _body(call))
    yield f"# {body.reason}" if isinstance(body, Declined) else text_of_body(body, call.name)


def _body(call: Node) -> KernelBody:
    module = called_module(call)
    if isinstance(module, Loop):
        operands = [operand.meta["val"] for operand in call.args if isinstance(operand, Node)]
        return defined_loop(module, operands, call.meta["val"])
    assert isinstance(module, GraphModule)
    return defined(computation_of(module))
