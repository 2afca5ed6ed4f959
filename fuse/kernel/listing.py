"""The generated source of all kernels of a graph, for reading."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fuse.graph.loop import Loop
from fuse.kernel.loop_kernel import lower_loop
from fuse.kernel.lower import Declined, Kernel, lower
from fuse.rewrite.nested import called_module, kind, walk


def listing(graph: GraphModule) -> str:
    """Every kernel of the fused groups and the loops of ``graph``, in order of first use.

    Groups that compute the same share one kernel, and the line above it says how many do. A group that cannot be
    lowered is listed with the reason. The functions that kernels call (``fuse_tanh``, ``fuse_product`` and so on) stand
    in ``fuse/kernel/vecmath.h`` and the headers beside it.

    >>> import torch, fuse
    >>> listing(fuse.capture(torch.nn.Identity(), (torch.ones(3),)))
    '// no fused groups, so no kernels of our own'
    """
    users: dict[Kernel | Declined, list[str]] = {}
    for body, _ in walk(graph):
        for node in body.graph.nodes:
            if kind(node) in ("region", "loop"):
                users.setdefault(_lowered(node), []).append(node.name)
    if not users:
        return "// no fused groups, so no kernels of our own"
    return "\n\n".join(_described(kernel, names) for kernel, names in users.items())


def _lowered(node: Node) -> Kernel | Declined:
    module = called_module(node)
    if isinstance(module, Loop):
        operands = [operand.meta["val"] for operand in node.args if isinstance(operand, Node)]
        return lower_loop(module, operands, node.meta["val"])
    assert isinstance(module, GraphModule)
    return lower(module)


def _described(kernel: Kernel | Declined, names: list[str]) -> str:
    shared = f" and {len(names) - 1} more" if len(names) > 1 else ""
    if isinstance(kernel, Declined):
        return f"// {names[0]}{shared}: runs operator by operator, because {kernel.reason}"
    return f"// {names[0]}{shared}\n{kernel.source.strip()}"
