"""The loops that are chosen: how many nests, in which order they walk memory, what is split, what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional


def source_of(lowered: Callable[..., Any], function: Callable[..., Any], *args: Tensor) -> str:
    source: str = lowered(function, *args).kernel.source
    return source


def loops(source: str) -> int:
    return source.count("for (int64_t")


def test_contiguous_dimensions_are_one_loop(lowered: Callable[..., Any]) -> None:
    source = source_of(lowered, lambda x, y: torch.tanh(x) * y, torch.randn(3, 4, 5), torch.randn(3, 4, 5))
    assert loops(source) == 1
    assert "< 60;" in source


def test_a_result_in_channels_last_is_walked_in_the_order_of_its_memory(lowered: Callable[..., Any]) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert loops(source_of(lowered, lambda x: x * 2, image)) == 1


def test_results_of_one_shape_share_a_nest_and_others_do_not(lowered: Callable[..., Any]) -> None:
    x = torch.randn(4, 6)
    assert loops(source_of(lowered, lambda x: (x + 1, x * 2), x)) == 1
    assert loops(source_of(lowered, lambda x: (x + 1, x[0] * 2), x)) == 2


def test_each_piece_of_a_concatenation_is_written_in_place(lowered: Callable[..., Any]) -> None:
    source = source_of(lowered, lambda x: torch.cat([x * 2, x + 1, x]), torch.randn(4, 6))
    assert loops(source) == 3
    assert "?" not in source


def test_a_loop_is_split_where_a_view_needs_it(lowered: Callable[..., Any], run: Callable[..., Any]) -> None:
    def heads(x: Tensor) -> Tensor:
        return (x + 1).view(6, 4, 8).transpose(0, 1).contiguous()

    source = source_of(lowered, heads, torch.randn(6, 32))
    assert "%" not in source
    assert "/" not in source.partition("{")[2]
    run(heads, torch.randn(6, 32)).check(exact=True)


def test_a_costly_row_is_kept_between_the_stages_of_a_softmax(lowered: Callable[..., Any]) -> None:
    source = source_of(lowered, lambda x: functional.softmax(x, -1), torch.randn(8, 64))
    assert source.count("fuse_exp(") == 1
    assert "_row[64]" in source


def test_what_does_not_change_in_a_loop_is_computed_outside_of_it(lowered: Callable[..., Any]) -> None:
    source = source_of(lowered, lambda x, c: x * torch.tanh(c), torch.randn(8, 64), torch.randn(8, 1))
    before_inner_loop = source.rpartition("for (int64_t")[0]
    assert "fuse_tanh(" in before_inner_loop


def test_reductions_over_the_same_rows_share_their_loop(lowered: Callable[..., Any]) -> None:
    one = source_of(lowered, lambda x: x.sum(1), torch.randn(8, 64))
    three = source_of(lowered, lambda x: (x.sum(1), x.amax(1), x.mean(1)), torch.randn(8, 64))
    assert loops(three) == loops(one)


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_summed_as_it_is_is_stored_where_it_is_summed(
    lowered: Callable[..., Any], run: Callable[..., Any], dim: int
) -> None:
    def masked(g: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        d = torch.where(y > 0, g, 0.0)
        return d, d.sum(dim)

    arguments = torch.randn(32, 48), torch.randn(32, 48)
    assert source_of(lowered, masked, *arguments).count(" ? ") == 1
    run(masked, *arguments).check()


def test_what_a_sum_reads_in_another_place_is_stored_behind_it(run: Callable[..., Any]) -> None:
    def doubled(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, (x.flip(1) * x).sum(1)

    run(doubled, torch.randn(32, 48)).check()


def test_costly_work_is_done_once_for_results_in_two_orders(
    lowered: Callable[..., Any], run: Callable[..., Any]
) -> None:
    def both(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x)
        return y, y.contiguous()

    x = torch.randn(20, 30).t()
    assert source_of(lowered, both, x).count("fuse_tanh(") == 1
    run(both, x).check()


def test_loops_run_along_what_most_loads_and_stores_are_contiguous_in(
    lowered: Callable[..., Any], run: Callable[..., Any]
) -> None:
    def summed(x: Tensor, y: Tensor) -> Tensor:
        return (x.t() + y.t()).contiguous()

    x, y = torch.randn(20, 30), torch.randn(20, 30)
    assert source_of(lowered, summed, x, y).rpartition("for (int64_t ")[2].startswith("i0 = 0; i0 < 30;")
    run(summed, x, y).check(exact=True)


def test_a_row_of_a_vector_or_more_is_reduced_in_lanes(lowered: Callable[..., Any], run: Callable[..., Any]) -> None:
    for width, lanes in ((64, True), (60, True), (31, True), (12, False)):
        x = torch.randn(8, width)
        assert ("fuse_across" in source_of(lowered, lambda x: (x.sum(1), x.amax(1)), x)) == lanes
        run(lambda x: (x.sum(1), x.amax(1), x.prod(1), x.amin(1), x.logsumexp(1)), x).check()
    x[2, 3] = torch.nan
    run(lambda x: (x.sum(1), x.amax(1), x.amin(1), x.softmax(1), x.logsumexp(1), x.log_softmax(1)), x).check()


@pytest.mark.sampled
@pytest.mark.parametrize("width", range(16, 34))
def test_what_is_left_behind_whole_vectors_is_reduced_in_lanes(run: Callable[..., Any], width: int) -> None:
    def masked(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        chosen = x.masked_fill(mask, -1e9)
        return chosen.softmax(-1), torch.where(mask, 2.0, x).prod(-1), chosen.amax(-1)

    whole, mask = torch.full((5, 2 * width), 1e30), torch.full((5, 2 * width), True)
    whole[:, :width], mask[:, :width] = torch.randn(5, width), torch.rand(5, width) < 0.5
    run(masked, whole[:, :width], mask[:, :width]).check()


def test_small_kernels_run_in_one_thread_and_large_ones_in_many(lowered: Callable[..., Any]) -> None:
    small = lowered(lambda x: x + 1, torch.randn(64)).kernel
    large = lowered(lambda x: x + 1, torch.randn(1000, 1000)).kernel
    assert (small.parallel, large.parallel) == (False, True)
    assert "parallel for" in large.source


def test_pieces_of_a_concatenation_that_are_computed_from_each_other_share_a_nest(
    lowered: Callable[..., Any], run: Callable[..., Any]
) -> None:
    """Each would repeat the steps before it: 40 sines, exponentials and the like took 41 s to compile."""

    def steps(x: Tensor) -> Tensor:
        states = [x]
        for _ in range(40):
            states.append(states[-1].tanh() * 0.5)
        return torch.stack(states)

    x = torch.randn(4, 6)
    assert source_of(lowered, steps, x).count("fuse_tanh(") == 40
    run(steps, x).check()


def test_pieces_of_other_shapes_and_with_reductions_have_nests_of_their_own(run: Callable[..., Any]) -> None:
    def pieces(x: Tensor) -> Tensor:
        a = x.tanh() * 0.5
        b = a.exp().tanh()
        rest = [torch.cat([b.sin(), b], 1)[:, :3], b.exp(), torch.softmax(b, 1), (b * 2).tanh(), b.t()[:5].t().tanh()]
        return torch.cat([a, b, *rest], 1)

    x = torch.randn(4, 6)
    run(pieces, x).check()
