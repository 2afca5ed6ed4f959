"""One kernel for all sizes of a region."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fuse
from fuse.kernel.arithmetic.extents import Conditions
from fuse.kernel.kernel import Kernel
from fuse.kernel.lower import lower, lower_for_sizes
from fuse.kernel.sizes.region_text import text_and_numbers, with_numbers
from fuse.kernel.sizes.relations import lifted, relation_of
from fuse.kernel.sizes.sized import Text, lowering_for
from tests.samples import Holder

Function = Callable[[Tensor], tuple[Tensor, ...]]
Shape = tuple[int, ...]

FUNCTIONS: dict[str, Function] = {
    "pointwise": lambda x: (torch.tanh(x) + 1,),
    "broadcast": lambda x: (x + x[:1],),
    "softmax": lambda x: (torch.softmax(x, -1),),
    "layer_norm": lambda x: (F.layer_norm(x, (16,)),),
    "mean over a size": lambda x: (x.mean(0),),
    "variance over a size": lambda x: (x.var(1),),
    "concatenation": lambda x: (torch.cat([x, x * 2], 1),),
    "padding": lambda x: (F.pad(x, (0, 0, 1, 2)),),
    "transposed": lambda x: (x.transpose(0, 1).contiguous(),),
    "two views": lambda x: (x.reshape(x.shape[0], -1) * 2, x + 1),
    "maximum": lambda x: (x.amax(1) + 1, x.argmax(1)),
    "gradient of the last": lambda x: (torch.ops.aten.select_backward.default(x[0], x.shape, 0, -1) + x,),
    "maps and a sum": lambda x: (x * 2, (x * 2).sum(0, keepdim=True)),
}


def kernels(function: Function, shapes: Sequence[Shape], name: str) -> list[Kernel]:
    """The kernels of calls one after another, each knowing which sizes differ from those of the first."""
    made = []
    for shape in shapes:
        graph = make_fx(function, tracing_mode="fake")(torch.empty(shape))
        for node in graph.graph.nodes:
            node.meta["source"] = name  # no test's texts are those of another
        sizes = frozenset(b for a, b in zip(shapes[0], shape, strict=True) if a != b)
        with lowering_for(sizes):
            kernel = lower(graph)
        assert isinstance(kernel, Kernel), kernel
        made.append(kernel)
    return made


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_third_call_runs_the_kernel_of_the_second(name: str) -> None:
    first, second, third = kernels(FUNCTIONS[name], [(5, 3, 16), (7, 4, 16), (31, 9, 16)], name)
    assert not first.sizes
    assert second.source == third.source
    assert second.sizes != third.sizes


def test_a_number_that_differs_with_the_length_is_told_at_every_length() -> None:
    """More lengths than families are kept: none gets one of its own."""
    shapes = [(length, 3, 16) for length in range(5, 17)]
    first, second, *others = kernels(lambda x: (x.sum(0) * (1 / x.shape[0]),), shapes, "a mean by hand")
    assert first.source != second.source
    assert {other.source for other in others} == {second.source}


def test_slices_are_written_in_the_sizes() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (x[1:] * 2, x[: x.shape[0] - 2] + x[2:], x[:, x.shape[1] // 2 :].exp())

    _, second, third = kernels(function, [(5, 4, 16), (9, 6, 16), (31, 10, 16)], "slices")
    assert second.source == third.source


@pytest.mark.sampled
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=10, deadline=None)
@given(sizes=st.tuples(*[st.integers(2, 90)] * 2), others=st.tuples(*[st.integers(2, 90)] * 2))
def test_a_text_depends_on_sizes_by_its_conditions_only(
    name: str, sizes: tuple[int, int], others: tuple[int, int]
) -> None:
    regions = [make_fx(FUNCTIONS[name], tracing_mode="fake")(torch.empty(*shape, 16)) for shape in ((91, 37), (43, 59))]
    now, before = (text_and_numbers(region, str)[1] for region in regions)
    found = relation_of(now, [before], frozenset({91, 37}))
    assert found is not None
    relation = found[1]
    conditions, numbers = lifted(relation, sizes, sizes)
    made = lower_for_sizes(with_numbers(regions[0], numbers)[0], conditions)
    if made is not None and conditions.met()(*others):
        again, numbers = lifted(relation, others, sizes)
        assert lower_for_sizes(with_numbers(regions[0], numbers)[0], again) == made


@pytest.mark.parametrize("name", ["broadcast", "gradient of the last", "maps and a sum"])
def test_a_size_of_one_has_the_kernel_of_others(name: str) -> None:
    _, second, single = kernels(FUNCTIONS[name], [(5, 3, 16), (7, 4, 16), (1, 4, 16)], f"size one of {name}")
    assert single.source == second.source


def in_windows(x: Tensor) -> tuple[Tensor, ...]:
    return (F.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % 8)).view(-1, 8, *x.shape[1:]).mean(1),)


def gradient_in_windows(x: Tensor) -> tuple[Tensor, ...]:
    padded = (-(-x.shape[0] // 8) * 8, *x.shape[1:])
    windows = torch.ops.aten.slice_backward.default(x, padded, 0, 0, x.shape[0], 1).view(-1, 8, *x.shape[1:])
    return (windows.exp(),)


@pytest.mark.parametrize("function", [in_windows, gradient_in_windows])
def test_whole_windows_have_the_kernel_of_padded_ones(function: Function) -> None:
    shapes = [(30, 3, 16), (13, 5, 16), (16, 5, 16), (8, 1, 16), (64, 7, 16)]
    _, second, *whole = kernels(function, shapes, function.__name__)
    assert {kernel.source for kernel in whole} == {second.source}


def test_a_float_of_the_length_is_told_behind_a_branch_too() -> None:
    """The first call of a text: its float is taken to differ in others."""
    shapes = [(7, 3, 16), (63, 5, 16), (110, 5, 16)]
    _, first, second = kernels(
        lambda x: (x.sum(0) * (1 / x.shape[0]) if x.shape[0] > 7 else x + 1,), shapes, "a mean behind a branch"
    )
    assert first.source == second.source


def test_a_loop_of_one_that_is_worth_threads_has_a_kernel_of_its_own() -> None:
    shapes = [(5, 3, 16), (7, 4, 16), (1, 4, 16), (1, 8192, 16), (2, 8192, 16)]
    _, second, single, threaded, several = kernels(FUNCTIONS["pointwise"], [(n, m * 16) for n, m, _ in shapes], "wide")
    assert single.source == second.source == several.source
    assert threaded.source != second.source


def test_another_dtype_or_number_has_a_kernel_of_its_own() -> None:
    _, second = kernels(lambda x: (x * 2.5,), [(5, 3, 16), (7, 4, 16)], "numbers")
    (other,) = kernels(lambda x: (x * 3.5,), [(9, 6, 16)], "numbers")
    assert second.sizes
    assert other.source != second.source


def test_without_a_call_nothing_is_remembered() -> None:
    graphs = [make_fx(FUNCTIONS["pointwise"], tracing_mode="fake")(torch.empty(n, 16)) for n in (3, 4, 5)]
    made = [lower(graph) for graph in graphs]
    assert not any(kernel.sizes for kernel in made if isinstance(kernel, Kernel))


def test_regions_of_one_text_in_one_call_are_told_apart() -> None:
    """Two layers of other widths, in calls whose rows vary: widths stay constants."""

    def layers(rows: int) -> list[Kernel]:
        graphs = [make_fx(FUNCTIONS["pointwise"], tracing_mode="fake")(torch.empty(rows, width)) for width in (32, 64)]
        with lowering_for(frozenset({rows}) if rows != 5 else frozenset()):
            made = [lower(graph) for graph in graphs]
        return [kernel for kernel in made if isinstance(kernel, Kernel)]

    layers(5)
    narrow, wide = layers(7)
    assert "32 * n0" in narrow.source
    assert "64 * n0" in wide.source


def test_numbers_are_related_to_the_fewest_sizes() -> None:
    now, before = (7, 4, 28, 28 * 16, 18), (5, 3, 15, 15 * 16, 16)
    found = relation_of(now, [before], frozenset({7, 4}))
    assert found is not None
    places, relation = found
    assert places == (0, 1)
    assert relation == (
        ((("n0",), 1),),
        ((("n1",), 1),),
        ((("n0", "n1"), 1),),
        ((("n0", "n1"), 16),),
        (((), 11), (("n0",), 1)),
    )


def test_equal_numbers_are_related_to_nothing() -> None:
    assert relation_of((7, 4), [(7, 4)]) is None
    assert relation_of((1, 4), [(7, 4)]) is None


def test_a_one_is_related_where_nothing_else_tells() -> None:
    assert relation_of((7, 4), [(1, 4)]) == ((0,), (((("n0",), 1),), 4))
    assert relation_of((14, 7), [(1, 1), (8, 4)]) == ((1,), (((("n0",), 2),), ((("n0",), 1),)))


def test_what_was_not_noted_is_found_at_sizes_of_no_call() -> None:
    def lowered(values: Sequence[int], _: Conditions) -> str:
        return f"{values[0] * 4} {len(range(values[0]))}"  # which is told the number behind the size's back

    text: Text[str] = Text()
    text.remember(0, (5,))
    assert text.member((7,), 0, frozenset({7}), lowered) is None
    assert len(text.failures) == 1
    found = Text[str]({0: [(5,)]}).member((7,), 0, frozenset({7}), lambda values, _: f"{values[0] * 4}")
    assert found is not None
    assert found[0].made == "(4 * n0)"


def test_a_comparison_without_effect_leaves_one_kernel() -> None:
    def lowered(values: Sequence[int], _: Conditions) -> str:
        return f"{values[0] * 4} {'one row' if values[0] > 64 and values[0] < 2 else 'rows'}"

    text = Text[str]({0: [(5,)]})
    assert text.member((99,), 0, frozenset({99}), lowered) == (text.families[0], (99,))
    assert not text.families[0].met(7)
    assert text.member((7,), 0, frozenset({7}), lowered) == (text.families[0], (7,))
    assert len(text.families) == 1
    assert all(text.families[0].met(size) for size in (3, 64, 65, 1000))


def test_a_comparison_that_chooses_a_kernel_gives_two() -> None:
    def lowered(values: Sequence[int], _: Conditions) -> str:
        return f"{values[0] * 4} {'in blocks' if values[0] > 64 else 'rows'}"

    text = Text[str]({0: [(5,)]})
    families = [text.member((size,), 0, frozenset({size}), lowered) for size in (99, 7, 80, 9)]
    assert [one and one[0].made for one in families] == ["(4 * n0) in blocks", "(4 * n0) rows"] * 2
    assert len(text.families) == 2


def test_numbers_that_are_equal_where_they_were_lowered_are_two_kernels() -> None:
    """The workspace of a kernel is no part of its source."""

    def lowered(values: Sequence[int], _: Conditions) -> Kernel:
        size = values[0]
        return Kernel("f", "", frozenset(), False, workspace_bytes=size * 4 if size > 150 else size * 8)

    text = Text[Kernel]({0: [(5,)]})
    families = [text.member((size,), 0, frozenset({size}), lowered) for size in (200, 100)]
    assert [str(one and one[0].made.workspace_bytes) for one in families] == ["(4 * n0)", "(8 * n0)"]


def test_a_scan_by_doubling_has_kernels_of_any_size() -> None:
    def scanned(_: Holder, a: Tensor, b: Tensor) -> Tensor:
        for step in (1, 2, 4):
            b = a * F.pad(b[:, :-step], (step, 0)) + b
            a = a * F.pad(a[:, :-step], (step, 0), value=1.0)
        return b

    model = Holder(scanned)
    fused = fuse.compile(model)
    for length in (9, 11, 14):
        given = torch.rand(2, length), torch.rand(2, length)
        torch.testing.assert_close(fused(*given), model(*given))
