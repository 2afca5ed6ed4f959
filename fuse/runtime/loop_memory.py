"""Where a step of a loop finds its memory, when the body of the loop is a program.

    step t     states            inputs               program of the body          states            kept
               h (of t - 1)      x.select(0, t)  ->   kernels, calls          ->   h (of t)          hs.select(0, t)

Inputs are addresses that move evenly, what is kept is written into its place in the whole, and a state is handed on as
it is: beside what the body launches, nothing is launched. A state that is not kept lies in one of a ring of tensors,
of which no step overwrites one that is still read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fuse.runtime.steps import LoopStep

_guards: Any = torch._C._dynamo.guards
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = getattr(
    _guards, "_empty_strided_cpu", lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
)
"""``torch.empty_strided`` without the dispatcher, as the code that ``torch.compile`` writes makes its results."""

State = tuple[int, Tensor]
"""Address and tensor of a state."""


class Drive:
    """One call of a loop. ``bases`` are addresses of inputs and results that :meth:`begin` sets for each step.

    ``results`` are the buffers of the body that get memory here, ``called_upon`` those that a Python call takes.
    """

    def __init__(
        self,
        loop: LoopStep,
        operands: Sequence[Tensor],
        results: Sequence[int],
        called_upon: Collection[int],
        bases: array[int],
    ) -> None:
        spec = loop.spec
        self.bases = bases
        self.carries = spec.carries
        self.kept = [empty(*layout) for layout in loop.layouts[spec.carries :]]
        self.states: list[State] = [(state.data_ptr(), state) for state in operands[: spec.carries]]
        handed = [result.buffer for result in loop.body.results if result]
        collected = handed[spec.carries :]
        inputs = len(operands)
        self.shown = [i for i in range(spec.carries) if i in called_upon]  # states that a call takes
        self.moving: list[tuple[int, int, int]] = []  # base, address in the first step, bytes from step to step
        self.views: list[tuple[int, Sequence[Tensor], int, int]] = []  # slot, parts of the whole, first, step
        for i, how in enumerate(spec.step_inputs, start=spec.carries):
            source = operands[i]
            stride = source.stride(how.dim) * source.itemsize
            self.moving.append((i, source.data_ptr() + how.start * stride, how.step * stride))
            if i in called_upon:
                self.views.append((i, source.unbind(how.dim), how.start, how.step))
        places: dict[int, Sequence[Tensor]] = {}  # where each step's part of what is kept lies
        rings: dict[int, list[State]] = {}
        for base, buffer in enumerate(results, start=inputs):
            if buffer in collected:
                whole = self.kept[collected.index(buffer)]
                self.moving.append((base, whole.data_ptr(), whole.stride(0) * whole.itemsize))
                if buffer in called_upon or buffer in handed[: spec.carries]:
                    places[buffer] = whole.unbind(0)
                if buffer in called_upon:
                    self.views.append((buffer, places[buffer], 0, 1))
            else:
                value = next(r.value for r in loop.body.results if r and r.buffer == buffer)
                layout = tuple(value.shape), value.stride(), value.dtype
                tensors = [empty(*layout) for _ in range(2 + _handed_on(handed, buffer, spec.carries))]
                rings[buffer] = [(tensor.data_ptr(), tensor) for tensor in tensors]
        self.rings = [(base, buffer, rings[buffer]) for base, buffer in enumerate(results, inputs) if buffer in rings]
        self.places = places
        # what becomes of a state: another of this step, a part of what is kept, one of a ring, or what a call gave
        self.next: list[tuple[int, Sequence[Tensor] | None, list[State] | None]] = [
            (buffer, places.get(buffer), rings.get(buffer)) for buffer in handed[: spec.carries]
        ]
        self.gathered: list[tuple[int, Tensor, list[Tensor]]] = [
            (buffer, self.kept[n], [])
            for n, buffer in enumerate(collected)
            if buffer not in results or collected.index(buffer) != n
        ]

    def begin(self, t: int, slots: list[Any]) -> None:
        """Set the addresses of step ``t``, and the tensors that calls take."""
        bases = self.bases
        for i, (address, _) in enumerate(self.states):
            bases[i] = address
        for i in self.shown:
            slots[i] = self.states[i][1]
        for base, first, stride in self.moving:
            bases[base] = first + t * stride
        for slot, parts, start, step in self.views:
            slots[slot] = parts[start + t * step]
        for base, buffer, ring in self.rings:
            bases[base], slots[buffer] = ring[t % len(ring)]

    def end(self, t: int, slots: list[Any]) -> None:
        """Hand the states on to the next step."""
        states: list[State] = []
        for buffer, parts, ring in self.next:
            if buffer < self.carries:
                states.append(self.states[buffer])
            elif ring is not None:
                states.append(ring[t % len(ring)])
            else:
                tensor = parts[t] if parts is not None else slots[buffer]
                states.append((tensor.data_ptr(), tensor))
        for buffer, _, pieces in self.gathered:
            pieces.append(slots[buffer])
        self.states = states

    def results(self) -> tuple[tuple[Tensor, ...], int]:
        """The last states, then what is kept; and the launches by which it was put together."""
        for _, whole, pieces in self.gathered:
            torch.stack(pieces, out=whole)
        return (*(tensor for _, tensor in self.states), *self.kept), len(self.gathered)


def _handed_on(handed: Sequence[int], buffer: int, carries: int) -> int:
    """How many steps longer than one a value of ``buffer`` is a state, from one carry to the next."""
    held, longer = {i for i in range(carries) if handed[i] == buffer}, 0
    while (held := {i for i in range(carries) if handed[i] in held}) and longer < carries:
        longer += 1
    return longer
