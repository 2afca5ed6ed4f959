"""Functions that copy a part with other numbers: they make what differs, and share all else."""

from __future__ import annotations

import pytest
import torch

import fuse
from fuse.kernel.sizes.sized import lowering_of
from fuse.runtime.programs.schedule import schedule
from fuse.runtime.resizing.resized import NotResized
from fuse.runtime.resizing.schedule_numbers import SizedPart, outline_and_numbers
from fuse.runtime.resizing.sized_code import copier


def part_of(rows: int) -> SizedPart:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8))
    graph = fuse.capture(model, (torch.ones(rows, 8),))
    return SizedPart(schedule(graph), graph.meta["signature"])


def numbers_of(part: SizedPart) -> tuple[int, ...]:
    return outline_and_numbers([part])[1]


def test_copies_have_their_numbers_and_share_what_has_none() -> None:
    part, others = part_of(16), [part_of(48), part_of(80)]
    columns = list(zip(*map(numbers_of, (part, *others)), strict=True))
    differ = list(dict.fromkeys(column for column in columns if len(set(column)) > 1))
    made = copier([part], [differ.index(one) if one in differ else None for one in columns], len(differ))
    copies = [made(*(column[of] for column in differ))[0] for of in (1, 2)]
    assert list(map(numbers_of, copies)) == list(map(numbers_of, others))
    first, second = (copy.plan.buffers for copy in copies)
    weights = [i for i, one in enumerate(part.plan.buffers) if one.origin == "input" and 16 not in one.value.shape]
    assert len(weights) >= 4
    assert all(first[i] is second[i] for i in weights)
    assert all(one is not other for i, (one, other) in enumerate(zip(first, second, strict=True)) if i not in weights)
    values = [one.value for one in first if tuple(one.value.shape) == (48, 8)]
    assert len(values) > 1
    assert len(set(map(id, values))) == 1


def test_a_part_without_numbers_that_vary() -> None:
    part = part_of(16)
    (made,) = copier([part], [None] * len(numbers_of(part)), 0)()
    assert numbers_of(made) == numbers_of(part)


def test_a_kernel_that_does_not_serve_the_sizes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    fused = fuse.compile(model)
    with torch.no_grad():
        for rows in (16, 48, 33):
            fused(torch.randn(rows, 8))
    compiled = fused.compiled
    part = SizedPart(compiled.program.schedule, compiled.graph.meta["signature"])
    (kernel,) = (step.kernel for step in part.plan.steps)
    assert kernel.served is not None
    numbers = numbers_of(part)
    position = [0 if number == 33 else None for number in numbers]
    made = copier([part], position, 1)
    assert made(40)[0].plan.steps[0].kernel.sizes != kernel.sizes
    with lowering_of(None), pytest.raises(NotResized):
        made(-1)
