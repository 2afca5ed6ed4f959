"""Split a schedule into an outline without numbers, and its numbers.

kernel tanh(n = 100)  reads 0 + 0  writes 1 + 256        ->   outline "kernel tanh, reads 0, writes 1",  (100, 0, 256)

Schedules of one outline differ in their numbers only: :mod:`fuse.runtime.resizing.sized_code` copies them with other
numbers. The values of a copy are tensors without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuse.graph.signature import OutputSpec, Signature
from fuse.kernel.kernel import Kernel
from fuse.kernel.sizes.region_text import Numbers, SizedTensor
from fuse.runtime.programs import layout
from fuse.runtime.programs.layout import is_lazy
from fuse.runtime.programs.steps import (
    Allocation,
    BufferView,
    CallStep,
    CopyStep,
    KernelStep,
    LoopStep,
    Place,
    ProductStep,
    ProgramResult,
    Ref,
    Schedule,
    Step,
)
from fuse.runtime.resizing.resized import NotResized

_BYTES = torch.empty(0, dtype=torch.uint8, device="meta")
_PLAIN = (bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class SizedPart:
    """One graph of a call at some sizes: its schedule, its signature, and further tensors whose layouts belong to it
    (tangents)."""

    plan: Schedule
    signature: Signature
    tensors: tuple[Tensor, ...] = ()


def outline_and_numbers(parts: Sequence[SizedPart]) -> tuple[tuple[Hashable, ...], Numbers]:
    """The outline and the numbers of parts; constants are left out.

    Raises:
        NotResized: something has no outline.
    """
    outline: list[Hashable] = []
    numbers: list[Any] = []

    def take(number: Any) -> Any:
        numbers.append(number)
        return number

    mapped = Mapped(take, outline.append)
    for part in parts:
        mapped.part(part)
    return tuple(outline), tuple(numbers)


class Mapped:
    """Copies with each number ``n`` replaced by ``take(n)``; ``same`` is called with everything else."""

    def __init__(self, take: Callable[[Any], Any], same: Callable[[Hashable], None]) -> None:
        self.take = take
        self.same = same

    def part(self, part: SizedPart) -> SizedPart:
        self.same((len(part.signature.outputs), len(part.tensors)))
        plan, outputs = self.schedule(part.plan), tuple(map(self.output, part.signature.outputs))
        return SizedPart(plan, replace(part.signature, outputs=outputs), tuple(map(self.tensor, part.tensors)))

    def schedule(self, plan: Schedule) -> Schedule:
        self.same((len(plan.steps), len(plan.buffers), plan.fallbacks, plan.regions, plan.confirmed))
        steps = tuple(map(self.step, plan.steps))
        kernels = (step for step in steps if isinstance(step, KernelStep) and step.kernel.workspace_bytes)
        workspaces = {step.writes[-1].buffer: step.kernel.workspace_bytes for step in kernels}
        buffers = [self.buffer(one, workspaces.get(i)) for i, one in enumerate(plan.buffers)]
        views, results = tuple(map(self.view, plan.views)), tuple(map(self.result, plan.results))
        return replace(plan, steps=steps, buffers=tuple(buffers), views=views, results=results)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def buffer(self, buffer: Allocation, workspace: int | None) -> Allocation:
        self.same((buffer.origin, workspace is None))
        if workspace is not None:
            return Allocation("made", SizedTensor(_BYTES, (workspace,), (1,)), workspace)
        return replace(buffer, value=self.tensor(buffer.value), size=self.take(buffer.size))

    def view(self, view: BufferView) -> BufferView:
        self.same(view.buffer)
        return BufferView(view.buffer, self.tensor(view.value))

    def result(self, result: ProgramResult | None) -> ProgramResult | None:
        self.same(None if result is None else result.buffer)
        return None if result is None else ProgramResult(result.buffer, self.tensor(result.value))

    def tensor(self, value: Tensor) -> Tensor:
        if value.layout is not torch.strided or is_lazy(value):
            raise NotResized("a tensor is sparse, or lazily conjugated or negated")
        self.same((value.dtype, value.device, value.dim()))
        size = tuple(map(self.take, value.shape))
        return SizedTensor(value, size, tuple(map(self.take, value.stride())))

    def place(self, place: Place) -> Place:
        self.same(place.buffer)
        return Place(place.buffer, self.take(place.offset))

    def output(self, output: OutputSpec) -> OutputSpec:
        plain = type(output.value) is not int
        self.same((output.kind, output.index, output.freed, output.detached, repr(output.value) if plain else None))
        view = output.view
        self.same(None if view is None else len(view.size))
        if view is not None:
            size, stride = tuple(map(self.take, view.size)), tuple(map(self.take, view.stride))
            view = replace(view, size=size, stride=stride, offset=self.take(view.offset))
        return replace(output, view=view, value=output.value if plain else self.take(output.value))

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(self, step: Step) -> Step:
        self.same(type(step).__name__)
        if isinstance(step, CallStep):
            return self.call(step)
        if isinstance(step, LoopStep):
            return self.loop(step)
        reads, writes = tuple(map(self.place, step.reads)), tuple(map(self.place, step.writes))
        self.same((len(reads), len(writes), step.source))
        if isinstance(step, KernelStep):
            self.same((step.shareable, step.kind))
            return replace(step, kernel=self.kernel(step.kernel), reads=reads, writes=writes)
        if isinstance(step, CopyStep):
            self.same((step.item, len(step.size)))
            size, source, target = (
                tuple(map(self.take, of)) for of in (step.size, step.source_stride, step.target_stride)
            )
            return CopyStep((reads[0],), (writes[0],), step.item, size, source, target, step.source)
        return self.product(step, reads, writes)

    def kernel(self, kernel: Kernel) -> Kernel:
        self.same((kernel.name, kernel.parallel, kernel.served is None, tuple(name for name, _ in kernel.sizes)))
        if kernel.served is not None:
            found = kernel.served.at(tuple(map(self.take, kernel.served.sizes)))
            if found is None:
                raise NotResized(f"{kernel.name} does not serve the other sizes")
            return found
        sizes = tuple((name, self.take(number)) for name, number in kernel.sizes)
        return replace(kernel, sizes=sizes, workspace_bytes=self.take(kernel.workspace_bytes))

    def product(self, step: ProductStep, reads: tuple[Place, ...], writes: tuple[Place, ...]) -> ProductStep:
        one = step.product
        transposed = one.left_layout[0], one.right_layout[0]
        self.same((one.dtype, repr((one.alpha, one.beta)), transposed, one.batch > 1, one.bias_layout is None))
        m, n, k, batch, leading = map(self.take, (one.m, one.n, one.k, one.batch, one.result_leading))
        left, right = self.take(one.left_layout[1]), self.take(one.right_layout[1])
        first, second, third = map(self.take, one.batch_strides)
        bias = one.bias_layout
        if bias is not None:
            self.same(len(bias[0]))
            bias = tuple(map(self.take, bias[0])), tuple(map(self.take, bias[1]))
        made = replace(
            one,
            m=m,
            n=n,
            k=k,
            batch=batch,
            result_leading=leading,
            left_layout=(transposed[0], left),
            right_layout=(transposed[1], right),
            batch_strides=(first, second, third),
            bias_layout=bias,
        )
        return replace(step, product=made, reads=reads, writes=writes)

    def call(self, step: CallStep) -> CallStep:
        if not (isinstance(step.function, OpOverload) or step.function is layout.part):
            raise NotResized("a module or a part of an operator's result is called")
        self.same((step.function, step.results, step.source))
        args, kwargs = self.argument(step.args), self.argument(step.kwargs)
        return replace(
            step, args=args, kwargs=kwargs, launches=self.take(step.launches), passing=self.take(step.passing)
        )

    def loop(self, step: LoopStep) -> LoopStep:
        spec = step.spec
        dims = tuple(read.dim for read in spec.step_inputs)
        self.same((replace(spec, trip_count=0, step_inputs=()), dims, step.results, step.source))
        body = self.schedule(step.body)
        reads = tuple(
            replace(read, start=self.take(read.start), step=self.take(read.step)) for read in spec.step_inputs
        )
        layouts = []
        for size, stride, dtype in step.layouts:
            self.same((len(size), dtype))
            layouts.append((tuple(map(self.take, size)), tuple(map(self.take, stride)), dtype))
        return replace(
            step,
            body=body,
            spec=replace(spec, trip_count=self.take(spec.trip_count), step_inputs=reads),
            args=self.argument(step.args),
            kwargs=self.argument(step.kwargs),
            layouts=tuple(layouts),
        )

    def argument(self, argument: Any) -> Any:
        if type(argument) is int:
            return self.take(argument)
        if isinstance(argument, (tuple, list)):
            self.same((type(argument), len(argument)))
            return type(argument)([self.argument(one) for one in argument])
        if isinstance(argument, dict):
            self.same(tuple(argument))
            return {name: self.argument(one) for name, one in argument.items()}
        if isinstance(argument, (float, complex)):
            self.same(repr(argument))
        elif isinstance(argument, (Ref, *_PLAIN)):
            self.same(argument)
        else:
            raise NotResized(f"an argument is a {type(argument).__name__}")
        return argument
