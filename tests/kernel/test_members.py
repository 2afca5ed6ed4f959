"""Parts of a region that do the same are a loop, in one kernel for any number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fuse.kernel.kernel import Kernel
from fuse.kernel.lower import lower
from fuse.kernel.sizes.members import FEWEST, ArgumentPlace, Members, alike_parts
from fuse.kernel.sizes.sized import lowering_for

Rows = Sequence[Tensor]
LOOP = "for (int64_t member = 0; "


def separate(*rows: Tensor) -> tuple[Tensor, ...]:
    return tuple((row * rows[-1]).exp() for row in rows[:-1])


def stacked(*rows: Tensor) -> tuple[Tensor, ...]:
    return (torch.stack([row.exp() * 2 for row in reversed(rows)], 1),)


def joined(*rows: Tensor) -> tuple[Tensor, ...]:
    return (torch.cat(rows, -1),)


def two_each(*rows: Tensor) -> tuple[Tensor, ...]:
    return tuple(result for exp in [row.exp() for row in rows] for result in (exp + 1, exp.sum(-1)))


def normed(*rows: Tensor) -> tuple[Tensor, ...]:
    return tuple(row.softmax(-1) for row in rows)


def rows(count: int, size: int = 5) -> list[Tensor]:
    return list(torch.randn(count, size, 6, generator=torch.Generator().manual_seed(0)))


ALIKE = [separate, stacked, joined, two_each, normed]


@pytest.mark.parametrize("function", ALIKE)
def test_parts_that_do_the_same_are_a_loop(function: Callable[..., Any], run: Callable[..., Any]) -> None:
    ran = run(function, *rows(FEWEST + 1))
    assert ran.kernel.source.count(LOOP) == 1
    ran.check()


@pytest.mark.parametrize("function", ALIKE)
def test_the_kernel_of_some_parts_is_that_of_others(function: Callable[..., Any]) -> None:
    """Also of few, if their number is known to vary."""
    made = []
    for number, (count, size) in enumerate([(11, 5), (17, 7), (9, 13), (3, 4), (40, 9)]):
        graph = make_fx(function, tracing_mode="fake")(*rows(count, size))
        for node in graph.graph.nodes:
            node.meta["source"] = function.__name__  # no test's texts are those of another
        for node in graph.graph.find_nodes(op="placeholder"):
            node.name = f"row_{node.name.removeprefix('arg')}"
        _, members = alike_parts(graph) or (None, None)
        assert members is not None
        with lowering_for(frozenset({members.count, size}) if number else None):
            kernel = lower(graph)
        assert isinstance(kernel, Kernel)
        made.append(kernel)
    assert made[0].source != made[1].source
    assert {kernel.name for kernel in made[2:]} == {made[1].name}


def test_few_parts_stay_side_by_side(run: Callable[..., Any]) -> None:
    ran = run(separate, *rows(4))
    assert LOOP not in ran.kernel.source
    ran.check()


def test_members_are_where_their_arguments_are() -> None:
    graph = make_fx(stacked, tracing_mode="fake")(*rows(9))
    found = alike_parts(graph)
    assert found is not None
    assert found[1] == Members(9, (ArgumentPlace(8, -1, 0), ArgumentPlace(9, 0, 6)))


def a_part_that_differs(*rows: Tensor) -> tuple[Tensor, ...]:
    return (*(row.exp() for row in rows[1:]), rows[0].tanh())


def another_number(*rows: Tensor) -> tuple[Tensor, ...]:
    return tuple(row * (2 if i else 3) for i, row in enumerate(rows))


def another_layout(*rows: Tensor) -> tuple[Tensor, ...]:
    return tuple((row if i else row.t().contiguous().t()).exp() for i, row in enumerate(rows))


def a_value_that_all_share(*rows: Tensor) -> tuple[Tensor, ...]:
    shared = rows[0].exp()
    return tuple(row * shared for row in rows)


def a_part_that_reads_the_next(*rows: Tensor) -> tuple[Tensor, ...]:
    exps = [row.exp() for row in rows]
    return tuple(a * b for a, b in zip(exps, [*exps[1:], exps[0]], strict=True))


def unequal_distances(*rows: Tensor) -> tuple[Tensor, ...]:
    order = [0, 2, 1, *range(3, len(rows))]
    first = rows[0] * rows[1]  # the inputs come in their order
    return (*(rows[i].exp() for i in order[:-1]), first)


def pieces_of_another_dtype(*rows: Tensor) -> tuple[Tensor, ...]:
    return (torch.cat([row.exp() for row in rows[:-1]] + [rows[-1].double()]),)


def pieces_of_several_lengths(*rows: Tensor) -> tuple[Tensor, ...]:
    return (torch.cat([row[: 1 + i % 2].exp() for i, row in enumerate(rows)]),)


def an_input_that_is_gathered(*rows: Tensor) -> tuple[Tensor, ...]:
    """An index may be out of range, which must be noticed before anything is written."""
    return tuple(row[rows[-1]] for row in rows[:-1])


@pytest.mark.parametrize(
    "function",
    [
        a_part_that_differs,
        another_number,
        another_layout,
        a_value_that_all_share,
        a_part_that_reads_the_next,
        unequal_distances,
        pieces_of_another_dtype,
        pieces_of_several_lengths,
        an_input_that_is_gathered,
    ],
)
def test_near_misses_stay(function: Callable[..., Any], run: Callable[..., Any]) -> None:
    given = rows(FEWEST + 1)
    if function is an_input_that_is_gathered:
        given[-1] = torch.tensor([0, 3, 4])
    ran = run(function, *given)
    assert LOOP not in ran.kernel.source
    ran.check()
