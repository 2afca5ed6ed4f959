"""Products, convolutions, attention and loops in the IR alone, run in Python, against eager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fuse.check.compare import compare
from fuse.graph.capture import capture
from fuse.graph.loop import StepInput, Stop
from fuse.kernel.definitions import defined, defined_loop
from fuse.kernel.ir import Comment, For
from fuse.kernel.recipes.reading import computation_of
from fuse.kernel.recipes.registry import Unsupported
from tests.kernel.python_target import run
from tests.kernel.test_loop_kernel import Example, lstm
from tests.kernel.test_python_target import Function, numbers


def of_weight(g: Tensor, x: Tensor, w: Tensor, *how: Any) -> Tensor:
    result: Tensor = torch.ops.aten.convolution_backward(g, x, w, None, *how, [False, True, False])[1]
    return result


IMAGE = numbers(2, 4, 5, 6)
REGIONS: Mapping[str, tuple[Any, ...]] = {
    "product": (lambda x, w, b: torch.relu(torch.addmm(b, x, w)) * 2, numbers(3, 4), numbers(4, 5), numbers(5)),
    "turned": (lambda x, w: torch.mm(x.t(), w.t()), numbers(4, 3), numbers(5, 4)),
    "reduced": (lambda x, w: torch.softmax(x @ w, -1), numbers(3, 4), numbers(4, 5)),
    "computed operand": (lambda x, w: torch.mm(torch.tanh(x), w), numbers(3, 4), numbers(4, 5)),
    "batch": (lambda x, y: torch.bmm(x, y) + 1, numbers(2, 3, 4), numbers(2, 4, 5)),
    "an input called product": (lambda product_0, w: torch.mm(product_0, w), numbers(3, 4), numbers(4, 5)),
    "attention": (
        lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.5, -1), v),
        numbers(2, 3, 4),
        numbers(2, 5, 4),
        numbers(2, 5, 3),
    ),
    "convolution": (lambda x, w, b: functional.conv2d(x, w, b, 2, 1), IMAGE, numbers(3, 4, 3, 2), numbers(3)),
    "dilated": (lambda x, w: functional.conv2d(x, w, None, 1, 2, 2), IMAGE, numbers(3, 4, 3, 2)),
    "groups": (lambda x, w: torch.tanh(functional.conv2d(x, w, None, 1, 1, 1, 2)), IMAGE, numbers(6, 2, 3, 3)),
    "one dimension": (lambda x, w: functional.conv1d(x, w, None, 2, 3), numbers(2, 4, 9), numbers(3, 4, 5)),
    "gradient of a weight": (
        lambda g, x, w: of_weight(g, x, w, [2, 1], [1, 2], [1, 2], False, [0, 0], 1),
        numbers(2, 6, 3, 6),
        IMAGE,
        numbers(6, 4, 3, 3),
    ),
    "gradient of a weight, in groups, transposed": (
        lambda g, x, w: of_weight(g, x, w, [2, 2], [1, 1], [1, 1], True, [0, 0], 2),
        numbers(2, 6, 9, 11),
        IMAGE,
        numbers(4, 3, 3, 3),
    ),
    "channels last": (
        lambda x, w: functional.conv2d(x, w, None, 1, 1),
        IMAGE.to(memory_format=torch.channels_last),
        numbers(3, 4, 3, 3).to(memory_format=torch.channels_last),
    ),
}


@pytest.mark.parametrize("name", list(REGIONS))
def test_a_region_with_products_is_defined_by_its_sums(name: str) -> None:
    function, *args = REGIONS[name]
    graph = capture(Function(function), tuple(args))
    inputs = [args[s.index] if s.kind == "argument" else s.value for s in graph.meta["signature"].inputs]
    (expected,) = torch.utils._pytree.tree_leaves(function(*args))
    out = torch.empty_strided(expected.shape, expected.stride()).fill_(7)
    assert run(defined(computation_of(graph)), [*inputs, out])
    assert not (problem := compare("", out, expected).problem), problem


def test_a_transposed_convolution_has_no_affine_loops() -> None:
    graph = capture(Function(lambda x, w: functional.conv_transpose2d(x, w, None, 2)), (IMAGE, numbers(4, 3, 3, 4)))
    with pytest.raises(Unsupported, match="not affine"):
        defined(computation_of(graph))


def normed(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(functional.layer_norm(h @ w + x, (3,)), -1)


H, W = numbers(2, 3), numbers(12, 3)
LOOPS = {
    "lstm": Example(lstm, [H, numbers(2, 3)], [numbers(4, 2, 12)], [W]),
    "batch first, from behind": Example(
        lstm, [H, numbers(2, 3)], [numbers(2, 4, 12)], [W], [StepInput(1, 3, -1)], trip_count=4
    ),
    "reductions": Example(normed, [H], [numbers(4, 2, 3)], [numbers(3, 3)]),
    "an expanded state, a weight turned over": Example(
        lambda h, x, w: torch.tanh(x + h @ w.t()), [numbers(1, 3).expand(2, 3)], [numbers(4, 2, 3)], [numbers(3, 3)]
    ),
    "a product of what changes": Example(lambda h, x: torch.bmm(h, x), [numbers(2, 3, 3)], [numbers(4, 2, 3, 3)]),
    "a state that is a number": Example(lambda h, x: h + x.sum(), [torch.tensor(0.5)], [numbers(4, 5)]),
    "states that change places": Example(lambda a, b, x: (b + x, a), [H, H + 1], [numbers(4, 2, 3)]),
}


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", list(LOOPS))
def test_a_loop_is_defined_by_its_step(name: str, backwards: bool) -> None:
    example = LOOPS[name]
    loop = example.loop()
    loop.spec = replace(loop.spec, backwards=backwards)
    expected = loop(*example.operands)
    results = [torch.full_like(e, 7, memory_format=torch.contiguous_format) for e in expected]
    assert run(defined_loop(loop, example.operands, results), [*example.operands, *results])
    for mine, theirs in zip(results, expected, strict=True):
        assert not (problem := compare("", mine, theirs.contiguous()).problem), problem


def test_a_loop_that_may_end_early_says_when() -> None:
    example = Example(lambda h, x: (h + x, (h > 3).any()), [H], [numbers(4, 2, 3)])
    loop = example.loop()
    loop.spec = replace(loop.spec, stop=Stop(0, goes_on=False, whole=True))
    body = defined_loop(loop, example.operands, loop(*example.operands))
    (steps,) = (s for s in body.statements if isinstance(s, For) and s.atom == "step")
    assert isinstance(steps.body[-1], Comment)
    assert steps.body[-1].text.endswith("is True: the last states are those behind that step")
