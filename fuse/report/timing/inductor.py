"""Count the launches of ``torch.compile`` in the code that its compiler, Inductor, generates.

    buf7 = empty_strided_cpu(...)                       nothing runs
    extern_kernels.addmm(bias, x, weight, out=buf7)     a launch: a library
    cpp_fused_gelu_2(buf7, buf8)                        a launch: a generated kernel
    buf9 = torch.ops.aten.sort.stable(buf8)             a launch: an operator as eager runs it

Each call in a wrapper's method ``call`` happens once in a call of the model. If Dynamo broke the model's graph, the
counts of its parts add up.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch._ops import OpOverload

from fuse import ops

_GENERATED = ("cpp_fused_", "cpp_", "triton_")
_LIBRARIES = ("extern_kernels.", "inductor_ops.")
_OPERATORS = ("torch.ops.", "aten.")
_MADE_OF = re.compile(r"#.* Source Nodes: \[(?P<nodes>[^\]]*)\], Original ATen: \[(?P<operators>[^\]]*)\]")


@dataclass(frozen=True)
class InductorCall:
    """A call that launches; for a library call, the ``node`` of Inductor's input graph and the ATen operator."""

    name: str
    launches: int
    node: str = ""
    operator: str = ""

    @property
    def is_generated(self) -> bool:
        """Whether it is a kernel that Inductor wrote."""
        return self.name.startswith(_GENERATED)


_EXAMPLE = """
class Runner:
    def call(self, args):
        buf0 = empty_strided_cpu((4,), (1,), torch.float32)
        cpp_fused_tanh_0(arg0, buf0)
        # Topologically Sorted Source Nodes: [y, z], Original ATen: [aten.tanh, aten.sort]
        buf1 = torch.ops.aten.sort.stable(buf0, dim=0)
        buf2 = torch.ops.aten.view.default(buf0, (2, 2))
        return (buf1,)
"""


@contextlib.contextmanager
def generated_code() -> Iterator[list[str]]:
    """The wrappers that Inductor generates within this context, in order."""
    from torch._inductor.graph import GraphLowering

    found: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", found.append):
        yield found


def launches_in(wrappers: Iterable[str]) -> int:
    """The launches of one call of each wrapper.

    >>> launches_in([_EXAMPLE])
    2
    """
    return sum(call.launches for wrapper in wrappers for call in calls_in(wrapper))


def calls_in(wrapper: str) -> Iterator[InductorCall]:
    """The launches of one call of a wrapper, in order, with node and operator from the comment above each.

    >>> [(call.name, call.node, call.operator) for call in calls_in(_EXAMPLE)]
    [('cpp_fused_tanh_0', '', ''), ('torch.ops.aten.sort.stable', 'z', 'aten.sort')]
    """
    lines = wrapper.splitlines()
    for function in ast.walk(ast.parse(wrapper)):
        if isinstance(function, ast.FunctionDef) and function.name == "call":
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            for node in sorted(calls, key=lambda one: (one.lineno, one.col_offset)):
                name = ast.unparse(node.func)
                if launches := _launches(name):
                    yield InductorCall(name, launches, *_computes(lines, node.lineno - 1))


def _computes(lines: list[str], at: int) -> tuple[str, str]:
    """The last node and operator in the comments right above a line; the earlier ones are those of its inputs."""
    above = at - 1
    while above >= 0 and (text := lines[above].strip()).startswith("#"):
        if found := _MADE_OF.match(text):
            return found["nodes"].rpartition(",")[2].strip(), found["operators"].rpartition(",")[2].strip()
        above -= 1
    return "", ""


def _launches(called: str) -> int:
    if called.startswith((*_GENERATED, *_LIBRARIES)):
        return 1
    if not called.startswith(_OPERATORS):
        return 0
    operator = _operator(called)
    info = ops.info(operator) if operator else None
    return 1 if info is None else info.launches


def _operator(called: str) -> OpOverload | None:
    """``torch.ops.aten.sort.stable`` itself; a name without an overload means the default one."""
    found: object = torch.ops
    for name in called.removeprefix("torch.ops.").split("."):
        found = getattr(found, name, None)
    if isinstance(found, torch._ops.OpOverloadPacket):
        found = getattr(found, "default", None)
    return found if isinstance(found, OpOverload) else None
