"""The generated source of all kernels of a graph, for reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fuse.graph.loop import Loop
from fuse.graph.loop_ends import LoopWithEnds
from fuse.kernel.lower import Declined, Kernel, lower
from fuse.kernel.lower_loops import lower_loop, lower_with_ends
from fuse.kernel.target import LoopKernels
from fuse.rewrite.nested import called_module, kind, walk


def listing(graph: GraphModule) -> str:
    """Every kernel of the fused groups and the loops of ``graph``, in order of first use.

    Groups that compute the same share one kernel, and the line above it says how many do; above a loop's kernel stand
    the sizes that it is given, the trip count first. A group that cannot be
    lowered is listed with the reason. The functions that kernels call (``fuse_tanh``, ``fuse_product`` and so on) stand
    in ``fuse/kernel/cpu/vecmath.h`` and the headers beside it.

    >>> import torch, fuse
    >>> listing(fuse.capture(torch.nn.Identity(), (torch.ones(3),)))
    '// no fused groups, so no kernels of our own'
    """
    found = kernels(graph)
    return "\n\n".join(map(_described, found)) or "// no fused groups, so no kernels of our own"


@dataclass(frozen=True)
class Listed:
    """One generated kernel: its ``code``, the nodes that call it, and the sizes that each gives it (a loop's steps).

    A group that cannot be lowered has a ``reason`` instead of code.
    """

    callers: tuple[str, ...]
    code: str
    reason: str
    sizes: tuple[tuple[tuple[str, int], ...], ...]


def kernels(graph: GraphModule) -> list[Listed]:
    """The kernels of ``graph``, in order of first use; groups that compute the same share one.

    >>> import torch, fuse
    >>> kernels(fuse.capture(torch.nn.Identity(), (torch.ones(3),)))
    []
    """
    users: dict[str, list[tuple[str, Kernel | Declined]]] = {}
    made: LoopKernels = {}
    for body, _ in walk(graph):
        for node in body.graph.nodes:
            if kind(node) == "region" or getattr(called_module(node), "persistent", False):
                kernel = _lowered(node, made)
                users.setdefault(_text(kernel), []).append((node.name, kernel))
    listed = []
    for text, callers in users.items():
        kernel, names = callers[0][1], tuple(name for name, _ in callers)
        code, reason = ("", kernel.reason) if isinstance(kernel, Declined) else (text, "")
        sizes = tuple(tuple(k.sizes) for _, k in callers if isinstance(k, Kernel))
        listed.append(Listed(names, code, reason, sizes))
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


def _described(one: Listed) -> str:
    """A kernel below the names of its callers, or why they have none; each loop with the sizes it gives the kernel."""
    name, *others = one.callers
    shared = f" and {len(others)} more" if others else ""
    if one.reason:
        return f"// {name}{shared}: runs operator by operator, because {one.reason}"
    if not one.sizes[0]:
        return f"// {name}{shared}\n{one.code}"
    lines = [f"// {name}: {_sizes(sizes)}" for name, sizes in zip(one.callers, one.sizes, strict=True)]
    return "\n".join([*lines, one.code])


def _sizes(sizes: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sizes)
