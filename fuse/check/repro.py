"""Write a captured graph as a model file that needs only torch.

graph of ATen operators     ->     class Model(nn.Module): def forward(self, x, ...): ...
its placeholders            ->     def get_inputs(): tensors of those shapes, strides and dtypes
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

_FILE = '''"""Repro: {about}"""

import operator

import torch
from torch import device, inf, nan


class Model(torch.nn.Module):
{forward}


def get_init_inputs():
    return []


def get_inputs():
    return [
{inputs}
    ]
'''


def source_of(graph: GraphModule, inputs: Sequence[Tensor], about: str) -> str | None:
    """The text of the file; None if the graph has nodes beyond ATen operators. ``inputs`` are like its placeholders.

    >>> import fuse
    >>> graph = fuse.capture(torch.nn.Tanh(), (torch.zeros(3),))
    >>> text = source_of(graph, [torch.zeros(3)], "nothing wrong")
    >>> print("\\n".join(line for line in text.splitlines() if "torch." in line))
    class Model(torch.nn.Module):
            tanh = torch.ops.aten.tanh.default(input_1);  input_1 = None
            torch.randn([3]),
    """
    if not all(map(_plain, graph.graph.nodes)):
        return None
    code = graph.graph.python_code("self").src
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("from", "import"))]
    made = [f"        {_made(value)}," for value in inputs]
    text = about.replace('"""', "'''").replace("\\", "/")
    return _FILE.format(about=text, forward=textwrap.indent("\n".join(lines), "    "), inputs="\n".join(made))


def _plain(node: Node) -> bool:
    if node.op == "call_function":
        return not isinstance(node.target, OpOverload) or node.target.namespace == "aten"
    return node.op in ("placeholder", "output")


def _made(value: Tensor) -> str:
    """An expression for a random tensor with the shape, strides and dtype of ``value``."""
    shape = list(value.shape)
    if value.dtype.is_floating_point:
        dtype = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
        made = f"torch.randn({shape}{dtype})"
    elif value.dtype == torch.bool:
        made = f"torch.rand({shape}) > 0.5"
    else:
        made = f"torch.randint(0, 2, {shape}, dtype={value.dtype})"
    if value.is_contiguous():
        return made
    return f"torch.empty_strided({shape}, {list(value.stride())}, dtype={value.dtype}).copy_({made})"
