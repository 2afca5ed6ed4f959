"""The random numbers that Python draws, in a call of a compiled model: drawn before the program runs.

states of the generators  ->  draws  ->  comparisons as at capture?   yes: the program, with these numbers as tensors
                                                                      no:  states put back; the call is missed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuse.devices import HOST
from fuse.graph.numbers.drawn_numbers import Drawn, put_back
from fuse.graph.signature import Signature
from fuse.runtime.variants.specialised import Missed

LARGEST_APART = 3
"""Most draws in which a call may differ from all specialisations, so that it gets one of its own: with more, it is
likely that no call is like another."""


@dataclass(frozen=True, eq=False)
class CallDraws:
    """The draws of one variant; ``inputs``: positions of placeholders for drawn numbers, the draws, and dtypes. Draw -1
    stands for the choices that are data."""

    drawn: Drawn
    inputs: tuple[tuple[int, int, torch.dtype], ...]

    def begin(self, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[tuple[Any, Any]]]:
        """The tensors of a call with the numbers that it draws; and the states of the generators before.

        Raises:
            Missed: the program does not serve these numbers; the generators are as before.
        """
        states = self.drawn.states()
        try:
            numbers = self.drawn.draw()
            if different := self.drawn.difference(numbers):
                raise Missed(different, self.drawn.values_by_key(numbers))
            if self.inputs:
                given = list(tensors)
                for position, draw, dtype in self.inputs:
                    chosen = draw < 0
                    made = (
                        self.drawn.chosen(numbers) if chosen else torch.tensor(numbers[draw], dtype=dtype, device=HOST)
                    )
                    given[position] = made
                tensors = tuple(given)
        except BaseException:
            put_back(states)
            raise
        return tensors, states


def drawing_of(signature: Signature) -> CallDraws | None:
    """The draws of a captured call; None if there are none."""
    if signature.drawn is None:
        return None
    inputs = [(position, spec) for position, spec in enumerate(signature.inputs) if spec.kind == "draw"]
    dtypes = [spec.value.dtype for _, spec in inputs if isinstance(spec.value, Tensor)]
    return CallDraws(
        signature.drawn,
        tuple((position, spec.index, dtype) for (position, spec), dtype in zip(inputs, dtypes, strict=True)),
    )


def fewest_apart(drawings: Sequence[CallDraws | None], values: dict[int, object]) -> int:
    """The number of draws in which a call that learns ``values`` differs from the closest of these variants."""
    return min((one.drawn.apart(values) for one in drawings if one is not None), default=0)
