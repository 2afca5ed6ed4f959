"""Views move towards the leaves and disappear where they can, and stay where they cannot."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fuse.rewrite.patterns import rules, views
from fuse.rewrite.patterns.terms import TensorType, Term, Terms


class Values:
    """Leaves of a table, by name and shape."""

    def __init__(self) -> None:
        self.terms = Terms()

    def __call__(self, name: str, *shape: int) -> Term:
        return self.terms.leaf(name, TensorType(shape, torch.float32, None))

    def add(self, x: Term, y: Term) -> Term:
        return rules.add(
            self.terms, x, y, TensorType(tuple(torch.broadcast_shapes(x.shape, y.shape)), torch.float32, None)
        )

    def matmul(self, a: Term, b: Term) -> Term:
        return views.matmul(self.terms, a, b, torch.float32)

    def reshape(self, x: Term, *shape: int) -> Term:
        return views.reshape(self.terms, x, shape)

    def cut(self, x: Term, *bounds: int) -> Term:
        return views.cut(self.terms, x, *bounds)


@pytest.fixture
def of() -> Values:
    return Values()


@pytest.mark.parametrize(
    ("one", "other", "shape", "expected"),
    [
        ((4, 6), (4, 6), (24,), "add(reshape(x), reshape(y))"),
        ((4, 6), (), (24,), "add(y, reshape(x))"),
        ((4, 6), (1,), (6, 4), "add(y, reshape(x))"),
        ((4, 6), (6,), (2, 2, 6), "add(y, reshape(x))"),
        ((4, 6), (1, 6), (2, 2, 6), "add(reshape(x), reshape(y))"),
        ((4, 6), (6,), (6, 4), "reshape(add(x, y))"),
        ((4, 6), (4, 1), (2, 2, 6), "reshape(add(x, y))"),
        ((6, 6), (6, 1), (6, 1, 6), "reshape(add(x, y))"),
        ((2, 3, 6), (3, 6), (6, 6), "reshape(add(x, y))"),
        ((4, 0), (0,), (0, 4), "reshape(add(x, y))"),
        ((4, 0, 6), (0, 6), (0, 6), "reshape(add(x, y))"),
    ],
)
def test_an_elementwise_result_in_another_shape(of, one, other, shape, expected):
    assert str(of.reshape(of.add(of("x", *one), of("y", *other)), *shape)) == expected


def test_a_number_has_no_shape_to_change(of):
    x = of("x")
    doubled = rules.scaled(of.terms, x, 2)
    assert str(of.reshape(doubled, 1, 1)) == "mul(2, reshape(x))"


@pytest.mark.parametrize(
    ("a", "b", "shape", "expected"),
    [
        ((6, 4), (4, 5), (2, 3, 5), "matmul(reshape(a), b)"),
        ((2, 3, 4), (4, 5), (6, 5), "matmul(reshape(a), b)"),
        ((6, 4), (4, 5), (30,), "reshape(matmul(a, b))"),
        ((1, 4), (4, 5), (5,), "reshape(matmul(a, b))"),
        ((6, 4), (4, 5), (3, 10), "reshape(matmul(a, b))"),
        ((6, 4), (4, 5), (10, 3), "reshape(matmul(a, b))"),
        ((6, 3, 4), (6, 4, 5), (2, 3, 3, 5), "matmul(reshape(a), reshape(b))"),
        ((2, 3, 3, 4), (2, 3, 4, 5), (6, 3, 5), "matmul(reshape(a), reshape(b))"),
        ((1, 3, 4), (1, 4, 5), (3, 5), "matmul(reshape(a), reshape(b))"),
        ((6, 3, 4), (6, 4, 5), (18, 5), "reshape(matmul(a, b))"),
        ((6, 3, 4), (6, 4, 5), (3, 6, 5), "reshape(matmul(a, b))"),
        ((6, 3, 4), (6, 4, 5), (6, 5, 3), "reshape(matmul(a, b))"),
        ((6, 3, 4), (6, 4, 5), (90,), "reshape(matmul(a, b))"),
    ],
)
def test_a_product_in_another_shape(of, a, b, shape, expected):
    product = of.reshape(of.matmul(of("a", *a), of("b", *b)), *shape)
    assert str(product) == expected
    assert product.shape == shape


def test_what_has_the_shape_stays(of):
    x = of("x", 4, 6)
    assert of.reshape(x, 4, 6) is x
    assert of.reshape(of.reshape(x, 24), 4, 6) is x


@pytest.mark.parametrize(
    ("shape", "order", "expected"),
    [
        ((3, 1, 4), (1, 0, 2), "reshape(x)"),
        ((3, 1, 4), (1, 2, 0), "reshape(permute(reshape(x), dims=(1, 0)))"),
        ((0, 1, 4), (1, 2, 0), "reshape(permute(reshape(x), dims=(1, 0)))"),
    ],
)
def test_dimensions_of_one_element_do_not_count(of, shape, order, expected):
    assert str(views.permute(of.terms, of("x", *shape), order)) == expected


def test_what_is_repeated_twice_is_repeated_once(of):
    x = of("x", 1, 6)
    twice = views.expand(of.terms, views.expand(of.terms, x, (4, 6)), (2, 4, 6))
    assert str(twice) == "expand(x)"
    assert twice.shape == (2, 4, 6)
    assert views.expand(of.terms, x, (1, 6)) is x


def test_a_slice_of_everything_is_no_slice(of):
    x = of("x", 4, 6)
    assert of.cut(x, 1, 0, 6) is x
    assert of.cut(x, 1, 0, 99) is x


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ((1, 1, 5), (1, 1, 3), "slice(x, dim=1, start=2, count=2, step=1)"),
        ((1, 1, 5), (0, 1, 3), "slice(slice(x, dim=1, start=1, count=4, step=1), dim=0, start=1, count=2, step=1)"),
        ((0, 1, 3), (1, 1, 5), "slice(slice(x, dim=0, start=1, count=2, step=1), dim=1, start=1, count=4, step=1)"),
        ((1, 0, 6, 2), (1, 1, 3), "slice(slice(x, dim=1, start=0, count=3, step=2), dim=1, start=1, count=2, step=1)"),
        ((1, 1, 6), (1, 0, 5, 2), "slice(slice(x, dim=1, start=1, count=5, step=1), dim=1, start=0, count=3, step=2)"),
    ],
)
def test_a_slice_of_a_slice(of, inner, outer, expected):
    assert str(of.cut(of.cut(of("x", 4, 6), *inner), *outer)) == expected


@pytest.mark.parametrize(
    ("shape", "bounds", "expected"),
    [
        ((4, 2, 3), (1, 1, 2), "reshape(slice(x, dim=1, start=3, count=3, step=1))"),
        ((4, 3, 2), (2, 1, 2), "reshape(slice(x, dim=1, start=1, count=3, step=2))"),
        ((2, 2, 6), (0, 1, 2), "reshape(slice(x, dim=0, start=2, count=2, step=1))"),
        ((2, 2, 2, 3), (2, 0, 1), "reshape(slice(x, dim=1, start=0, count=3, step=1))"),
        ((2, 2, 3, 2), (3, 1, 2), "reshape(slice(x, dim=1, start=1, count=3, step=2))"),
        ((4, 2, 3, 1), (1, 1, 2), "reshape(slice(x, dim=1, start=3, count=3, step=1))"),
        ((8, 3), (0, 1, 3), "slice(reshape(x), dim=0, start=1, count=2, step=1)"),
        ((4, 2, 3), (2, 1, 3), "slice(reshape(x), dim=2, start=1, count=2, step=1)"),
        ((2, 12), (1, 6, 12), "slice(reshape(x), dim=1, start=6, count=6, step=1)"),
    ],
)
def test_a_slice_of_a_dimension_that_was_split_is_one_of_the_whole(of, shape, bounds, expected):
    assert str(of.cut(views.reshape(of.terms, of("x", 4, 6), shape), *bounds)) == expected


def test_slices_of_dimensions_that_were_split_have_the_same_elements(of):
    for shape in ((4, 2, 3), (4, 3, 2), (2, 2, 6), (2, 2, 1, 6), (4, 1, 6), (1, 4, 6, 1), (4, 3, 1, 2), (2, 2, 2, 3)):
        data = torch.arange(24).view(4, 6)
        for dim, size in enumerate(shape):
            for start, end in itertools.combinations(range(size + 1), 2):
                term = of.cut(views.reshape(of.terms, of("x", 4, 6), shape), dim, start, end)
                wanted = data.view(shape).narrow(dim, start, end - start)
                assert torch.equal(elements(term, data), wanted), (shape, dim, start, end)


def elements(term: Term, data: Tensor) -> Tensor:
    """What a term of views is, of ``data``."""
    if term.name == "reshape":
        return elements(term.operands[0], data).reshape(term.shape)
    if term.name == "slice":
        dim, start, count, step = (dict(term.constants)[name] for name in ("dim", "start", "count", "step"))
        of_all = elements(term.operands[0], data)
        return of_all.index_select(dim, torch.arange(start, start + count * step, step))
    return data
