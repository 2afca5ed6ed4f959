"""Functions that run the candidates of a region for measurements, as a program does, on made-up operands.

kernel            a call through C, into allocated memory; the first run compiles all kernels
BLAS product      a native step, as in a program
Python call       with its arguments, views, and checks of the result, and a wait for the rest of such a step
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node, map_arg

from fuse.graph.outputs import outputs_of
from fuse.kernel.kernel import Kernel
from fuse.runtime.cpu.blas import product
from fuse.runtime.cpu.functions import addresses_of
from fuse.runtime.cpu.tables import Tables, runner, scratch_bytes
from fuse.runtime.programs.bindings import fastest
from fuse.runtime.programs.call_code import replaced
from fuse.runtime.programs.libraries import LibraryProduct
from fuse.runtime.programs.steps import Place, ProductStep, Ref

REST_OF_A_CALL = 4e-6
"""Seconds that a Python call costs a program besides its steps, for leaving native code and entering it again."""

Run = Callable[[], object]


def runs_of_kernels(region: GraphModule, kernels: dict[str, Kernel]) -> dict[str, Run]:
    """Functions that run each kernel once, all on the same operands."""
    addresses = cache(lambda: addresses_of(kernels.values()))
    tensors = cache(lambda: [made_up(node.meta["val"]) for node in (*_inputs(region), *outputs_of(region.graph))])
    return {name: _run(kernel, addresses, tensors) for name, kernel in kernels.items()}


def run_of_library(region: GraphModule) -> Run:
    """A function that runs the only operator of ``region`` by a library, as a program does."""
    node = next(node for node in region.graph.nodes if node.op == "call_function")
    found = product(node)
    return _called(node, _inputs(region)) if found is None else _multiplied(node, found)


def made_up(value: Tensor) -> Tensor:
    """A tensor of the layout of ``value``: normal random numbers for floats; else zeros, which are valid indices.

    The user's random generator is not used.
    """
    held = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    memory = torch.empty(0, dtype=value.dtype, device="cpu")
    memory.set_(held.untyped_storage())  # the whole storage, because elements may overlap
    if value.dtype.is_floating_point:
        memory.normal_(generator=torch.Generator().manual_seed(0))
    else:
        memory.zero_()
    return held


def _run(kernel: Kernel, addresses: Callable[[], dict[str, int]], tensors: Callable[[], Sequence[Tensor]]) -> Run:
    @cache
    def made() -> tuple[Callable[[object], object], object, object]:
        workspace = torch.empty(kernel.workspace_bytes, dtype=torch.uint8, device="cpu")
        held = (*tensors(), workspace)
        arguments = (ctypes.c_void_p * len(held))(*(tensor.data_ptr() for tensor in held))
        return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(addresses()[kernel.name]), arguments, held

    def run() -> object:
        function, arguments, _ = made()
        return function(arguments)

    return run


def _multiplied(node: Node, found: LibraryProduct) -> Run:
    operands = (found.left, found.right, *([found.bias] if found.bias else []))
    *reads, write = (Place(i, 0) for i in range(len(operands) + 1))
    step = ProductStep(found, tuple(reads), (write,))

    @cache
    def made() -> tuple[Callable[..., object], Tables, array[int], object]:
        tables = Tables(len(operands) + 1, {})
        tables.add(step, lambda places: [n for place in places for n in (place.buffer, place.offset)])
        scratch = torch.empty(scratch_bytes([step]), dtype=torch.uint8, device="cpu")
        held = [*(made_up(n.meta["val"]) for n in (*operands, node)), scratch]
        return runner(), tables.freeze(), array("q", map(Tensor.data_ptr, held)), held

    def run() -> object:
        function, tables, bases, _ = made()
        return function(tables.address, 0, 1, bases.buffer_info()[0])

    return run


def _called(node: Node, inputs: Sequence[Node]) -> Run:
    """A function that calls the operator of ``node`` from Python."""
    args: Any = node.args
    kwargs: Any = node.kwargs
    behind: Any = node.target
    if isinstance(behind, OpOverload):
        behind = fastest(behind, *map_arg((args, dict(kwargs)), lambda n: n.meta["val"]))
    places = {given: Ref(i) for i, given in enumerate(inputs)}
    args, kwargs = map_arg((args, dict(kwargs)), places.__getitem__)  # type: ignore[arg-type]  # FX types arguments loosely
    layouts = [(Ref(i), n.meta["val"]) for i, n in enumerate(inputs) if not n.meta["val"].is_contiguous()]
    viewed = [(i, value.shape, value.stride()) for i, value in layouts]
    given = cache(lambda: {Ref(i): made_up(n.meta["val"]) for i, n in enumerate(inputs)})

    def called() -> object:
        tensors = given().copy()
        for place, shape, stride in viewed:
            tensors[place] = tensors[place].as_strided(shape, stride)
        results = behind(*replaced(args, tensors), **replaced(kwargs, tensors))
        result = results if isinstance(results, Tensor) else results[0]
        seen = result.stride(), result.shape, result.dtype, result.data_ptr()
        until = time.perf_counter() + REST_OF_A_CALL
        while time.perf_counter() < until:
            pass
        return seen

    return called


def _inputs(region: GraphModule) -> list[Node]:
    return [node for node in region.graph.nodes if node.op == "placeholder"]
