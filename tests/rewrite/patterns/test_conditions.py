"""What a match must meet besides its structure: each condition by a match that meets it and one that nearly does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, randn
from torch.fx.experimental.proxy_tensor import make_fx

import fuse
from fuse.errors import FuseError
from fuse.rewrite.patterns import conditions
from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.matching import match


def one_dtype(x=fuse.tensor(dtype="T"), y=fuse.tensor(dtype="T")):
    return torch.exp(x) * y


def test_a_named_dtype_is_the_same_in_all_tensors(try_pattern):
    def model(x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(x) * y

    assert try_pattern(one_dtype, model, randn(3).double(), randn(3).double()).matched
    found = try_pattern(one_dtype, model, randn(3), randn(3).double())
    assert found.reason == "constraint: `y` is float64, the pattern wants float32 (`T`)"


def narrow(x=fuse.tensor(dtype=(torch.float16, torch.bfloat16))):
    return torch.exp(x) * 2


def test_several_dtypes_may_do(try_pattern):
    for dtype in (torch.float16, torch.bfloat16):
        assert try_pattern(narrow, lambda x: torch.exp(x) * 2, randn(3).to(dtype)).matched
    found = try_pattern(narrow, lambda x: torch.exp(x) * 2, randn(3))
    assert found.reason == "constraint: `x` is float32, the pattern wants float16 or bfloat16"


def images(x=fuse.tensor(layout="channels_last")):
    return torch.exp(x) * 2


def test_channels_last(try_pattern):
    x = randn(2, 3, 4, 4)
    assert try_pattern(images, lambda x: torch.exp(x) * 2, x.contiguous(memory_format=torch.channels_last)).matched
    assert try_pattern(images, lambda x: torch.exp(x) * 2, x).reason == "constraint: `x` is not channels_last"


@pytest.mark.parametrize(
    ("spec", "shape", "reason"),
    [
        (fuse.tensor("n", ..., "n"), (3, 2, 5, 3), None),
        (fuse.tensor("n", ..., "n"), (3, 3), None),
        (fuse.tensor("n", ..., "n"), (3, 2, 4), "dimension 2 of `x` is 4, the pattern wants 3 (`n`)"),
        (fuse.tensor("n", ..., "n"), (3, 2, 2), "dimension 2 of `x` is 2, the pattern wants 3 (`n`)"),
        (fuse.tensor(2, ..., 5, 6), (2, 6), "`x` has 2 dimensions, the pattern wants 3"),
        (fuse.tensor(None, 4), (2, 4, 4), "`x` has 3 dimensions, the pattern wants 2"),
        (fuse.tensor(None, 4), (4,), "`x` has 1 dimensions, the pattern wants 2"),
        (fuse.tensor(None, 4), (9, 4), None),
        (fuse.tensor(None, 4), (4, 3), "dimension 1 of `x` is 3, the pattern wants 4"),
        (fuse.tensor(None, 4), (4, 5), "dimension 1 of `x` is 5, the pattern wants 4"),
    ],
)
def test_shapes(try_pattern, spec, shape, reason):
    def doubled(x=spec):
        return torch.exp(x) * 2

    found = try_pattern(doubled, lambda x: torch.exp(x) * 2, randn(*shape))
    assert bool(found.matched) if reason is None else found.reason == f"constraint: {reason}"


def test_what_is_made_of_weights_is_constant_and_what_meets_an_argument_is_not(try_pattern):
    def scaled(x, scale=fuse.tensor(constant=True)):
        return torch.tanh(x) * scale

    class Scaled(torch.nn.Module):
        def __init__(self, made) -> None:
            super().__init__()
            self.made, self.weight = made, torch.nn.Parameter(randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * self.made(self.weight, x)

    assert try_pattern(scaled, Scaled(lambda weight, x: weight.exp() + weight), randn(2, 3)).matched
    for made in (lambda weight, x: weight + x, lambda weight, x: torch.rand_like(weight) + weight):
        found = try_pattern(scaled, Scaled(made), randn(2, 3))
        assert found.reason == "constraint: `scale` changes from call to call"


def test_a_check_that_answers_something_else_is_told(try_pattern):
    class Answers:
        def pattern(self, x):
            return torch.exp(x) * 2

        def check(self, m):
            return True

    found = try_pattern(Answers, lambda x: torch.exp(x) * 2, randn(3))
    assert found.reason == "constraint: check returned True instead of None or m.fail(...)"


def test_a_check_that_raises_names_the_pattern(try_pattern):
    class Raises:
        def pattern(self, x):
            return torch.exp(x) * 2

        def check(self, m):
            return m["nothing"]

    with pytest.raises(FuseError, match=r"pattern 'Raises' .*check failed, KeyError: .*it has x"):
        try_pattern(Raises, lambda x: torch.exp(x) * 2, randn(3))


def divided(x, y):
    return torch.floor_divide(x, y) * 2 + x


def test_a_division_that_may_raise_stays_where_it_is(try_pattern):
    found = try_pattern(divided, divided, torch.arange(3), torch.ones(3, dtype=torch.int64))
    assert found.reason == "alias or mutation: `floor_divide` does more than give its value"
    assert try_pattern(divided, divided, randn(3), randn(3)).matched


def turned(x):
    return (torch.exp(x) * 2).t()


class Turned:
    def pattern(self, x):
        return (torch.exp(x) * 2).t()

    def replace(self, x):
        return (x.t().exp() * 2).clone()


def test_what_a_result_is_a_view_of_may_be_read_where_the_match_stays_what_it_is(try_pattern):
    def read(x):
        y = torch.exp(x) * 2
        return y.t() + 1, y.cos()

    assert try_pattern(turned, read, randn(2, 3)).matched  # a region gives the product, and the view of it
    found = try_pattern(Turned, read, randn(2, 3))
    assert found.reason == "used outside: `mul` is used outside: `cos` reads it, too"
    assert try_pattern(Turned, lambda x: turned(x) + 1, randn(2, 3)).matched


def test_what_lies_above_the_view_may_not_be_read(try_pattern):
    def read(x):
        y = torch.exp(x)
        return (y * 2).t() + 1, y.cos()

    assert try_pattern(turned, read, randn(2, 3)).reason == "used outside: `exp` is used outside: `cos` reads it, too"


def test_a_view_of_an_input_may_be_read_by_others(try_pattern):
    def read(x, y):
        turned = x.t()
        return torch.exp(turned) * y, turned.cos()

    assert try_pattern(lambda x, y: torch.exp(x.t()) * y, read, randn(2, 3), randn(3, 2)).matched


def test_a_view_of_a_result_is_the_results_business(try_pattern):
    assert try_pattern(Turned, lambda x: turned(x)[1:] + 1, randn(2, 3)).matched


class ViewOfAnInput:
    def pattern(self, x, y):
        turned = x.t()
        return turned, torch.exp(turned) * y

    def replace(self, x, y):
        turned = x.t()
        return turned.clone(), turned.exp() * y


def test_a_result_that_is_a_view_of_an_input_is_not_replaced_where_it_leaves_the_graph():
    def seen(x, y):
        turned = x.t()
        return turned, torch.exp(turned) * y

    def unseen(x, y):
        turned = x.t()
        return turned + 1, torch.exp(turned) * y

    # not by capture, which gives views of inputs back without a node for them
    for function, kind in ((seen, "alias or mutation"), (unseen, "matched")):
        graph = make_fx(function, tracing_mode="fake")(randn(2, 3), randn(3, 2))
        (outcome,) = match(graph, [define(ViewOfAnInput)], lambda found, around: found)
        assert outcome.kind == kind
    without = define(lambda x, y: ViewOfAnInput().pattern(x, y))
    graph = make_fx(seen, tracing_mode="fake")(randn(2, 3), randn(3, 2))
    assert [one.kind for one in match(graph, [without], lambda found, around: found)] == ["matched"]


def test_readers_of_an_input_are_no_readers_of_the_results():
    def both(x):
        return x, torch.exp(x) * 2

    def unread(x):
        both(x)
        return (torch.sin(x),)

    for function, kind in ((unread, "used outside"), (lambda x: (torch.sin(x), both(x)[1]), "matched")):
        graph = make_fx(function, tracing_mode="fake")(randn(3))
        (outcome,) = match(graph, [define(both)], lambda found, around: found)
        assert outcome.kind == kind


def far_apart(x, z):
    y = torch.exp(x)
    return y, torch.tanh(z) * y


def test_a_walk_that_is_too_long_is_given_up(try_pattern, monkeypatch):
    def model(x, z):
        y = torch.exp(x)
        for _ in range(4):
            z = torch.cos(y + z)
        return y.neg(), z, torch.tanh(x + 1) * y

    assert try_pattern(far_apart, model, randn(3), randn(3)).matched
    monkeypatch.setattr(conditions, "MAX_WALK", 9)  # four sums, four cosines, and what is negated
    assert try_pattern(far_apart, model, randn(3), randn(3)).matched
    for most in (8, 3):
        monkeypatch.setattr(conditions, "MAX_WALK", most)
        found = try_pattern(far_apart, model, randn(3), randn(3))
        assert found.reason.startswith("not convex: its nodes lie too far apart to be sure")


def test_what_lies_behind_the_last_node_is_not_walked(try_pattern, monkeypatch):
    def model(x, z):
        y = torch.exp(x)
        w = torch.tanh(z) * y
        for _ in range(9):
            y = torch.cos(y)
        return y, w

    monkeypatch.setattr(conditions, "MAX_WALK", 0)
    assert try_pattern(far_apart, model, randn(3), randn(3)).matched
