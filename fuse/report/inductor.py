"""Count what ``torch.compile`` launches, in the code that its compiler, Inductor, generates.

    buf7 = empty_strided_cpu(...)                       nothing runs
    extern_kernels.addmm(bias, x, weight, out=buf7)     a launch: a library
    cpp_fused_gelu_2(buf7, buf8)                        a launch: a generated kernel
    buf9 = torch.ops.aten.sort.stable(buf8)             a launch: an operator as eager runs it

Each call in the body of a wrapper's ``call`` is made once in a call of the model; where Dynamo broke the model's graph,
the parts add up.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator
from unittest import mock

import torch
from torch._ops import OpOverload

from fuse import ops

_GENERATED = ("cpp_fused_", "cpp_", "triton_")
_LIBRARIES = ("extern_kernels.", "inductor_ops.")
_OPERATORS = ("torch.ops.", "aten.")


@contextlib.contextmanager
def generated_code() -> Iterator[list[str]]:
    """The wrappers that Inductor generates meanwhile, in order."""
    from torch._inductor.graph import GraphLowering

    found: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", found.append):
        yield found


def launches_in(wrappers: Iterable[str]) -> int:
    """The launches of one call of each wrapper.

    >>> wrapper = '''
    ... class Runner:
    ...     def call(self, args):
    ...         buf0 = empty_strided_cpu((4,), (1,), torch.float32)
    ...         cpp_fused_tanh_0(arg0, buf0)
    ...         buf1 = torch.ops.aten.sort.stable(buf0, dim=0)
    ...         buf2 = torch.ops.aten.view.default(buf0, (2, 2))
    ...         return (buf1,)
    ... '''
    >>> launches_in([wrapper])
    2
    """
    return sum(_launches(called) for wrapper in wrappers for called in _called(wrapper))


def _called(wrapper: str) -> Iterator[str]:
    """The dotted names of all calls in the functions named ``call``."""
    for function in ast.walk(ast.parse(wrapper)):
        if isinstance(function, ast.FunctionDef) and function.name == "call":
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    yield ast.unparse(node.func)


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
