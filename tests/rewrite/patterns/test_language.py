"""Each word of the language: where it matches, and the near miss that it must not take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

import fuse
from fuse.errors import FuseError
from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.forms import forms


def swish(x):
    """x * sigmoid(x)"""
    return x * torch.sigmoid(x)


class ResidualTail:
    """relu(conv(x) + skip), the end of a residual block."""

    def pattern(self, x, weight, bias, skip):
        return torch.relu(F.conv2d(x, weight, bias, padding=fuse.const("padding")) + skip)

    def check(self, m):
        if m["skip"].meta["val"].shape != m.outputs[0].meta["val"].shape:
            return m.fail("skip must have the convolution's shape", m["skip"])
        return None


class Attention:
    def pattern(self, q, k, v):
        return torch.softmax(q @ k.transpose(-2, -1) / fuse.const("scale"), -1) @ v


def gates(gates, c):
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def test_a_bare_function_is_a_pattern(try_pattern):
    assert try_pattern(swish, lambda x: torch.sigmoid(x) * x, randn(3, 4)).kinds == {"matched": 1}


def test_a_class_with_a_constant_and_a_check(try_pattern):
    image, weight, bias, skip = randn(1, 2, 8, 8), randn(2, 2, 3, 3), randn(2), randn(1, 2, 8, 8)
    found = try_pattern(
        ResidualTail, lambda x, w, b, s: F.relu(s + F.conv2d(x, w, b, padding=1)), image, weight, bias, skip
    )
    (outcome,) = found.matched
    assert outcome.found.constants == {"padding": 1}
    assert {key[0]: given.node.name for key, given in outcome.found.inputs.items()} == {
        "x": "args_0",
        "weight": "args_1",
        "bias": "args_2",
        "skip": "args_3",
    }


def test_a_padding_of_two_sizes_is_a_constant_too(try_pattern):
    def model(x, w, b, s):
        return F.relu(F.conv2d(x, w, b, padding=(0, 1)) + s)

    (outcome,) = try_pattern(
        ResidualTail, model, randn(1, 2, 8, 8), randn(2, 2, 1, 3), randn(2), randn(1, 2, 8, 8)
    ).matched
    assert outcome.found.constants == {"padding": (0, 1)}


def test_check_declines_with_its_own_reason(try_pattern):
    image, weight, bias = randn(1, 2, 8, 8), randn(2, 2, 3, 3), randn(2)
    found = try_pattern(
        ResidualTail, lambda x, w, b, s: F.relu(F.conv2d(x, w, b, padding=1) + s), image, weight, bias, randn(2, 1, 1)
    )
    assert found.reason == "constraint: skip must have the convolution's shape"
    assert found.outcomes[0].node.name == "args_3"


def test_a_literal_matches_exactly(try_pattern):
    def scaled(x):
        return torch.tanh(x * 2)

    assert try_pattern(scaled, lambda x: torch.tanh(2.0 * x), randn(3)).kinds == {"matched": 1}
    assert try_pattern(scaled, lambda x: torch.tanh(3 * x), randn(3)).reason == (
        "structure: the number is 3, the pattern wants 2"
    )


@pytest.mark.parametrize(
    ("pattern", "model", "value"),
    [
        (lambda x: torch.exp(x * fuse.const("c")), lambda x: torch.exp(x * 2.5), 2.5),
        (lambda x: torch.exp(x / fuse.const("c")), lambda x: torch.exp(x * 0.125), 8),
        (lambda x: torch.exp(x - fuse.const("c")), lambda x: torch.exp(x - 3), 3),
        (lambda x: torch.softmax(x * x, fuse.const("c")), lambda x: torch.softmax(x * x, -1), 1),
        (lambda x: torch.sum(x * x, fuse.const("c")), lambda x: (x * x).sum(0), 0),
        (lambda x: torch.cat([x, x * x], fuse.const("c")), lambda x: torch.cat([x, x * x], 1), 1),
        (lambda x: F.leaky_relu(x * x, fuse.const("c")), lambda x: F.leaky_relu(x * x, 0.2), 0.2),
        (lambda x: F.gelu(x, approximate=fuse.const("c", "none")), lambda x: F.gelu(x, approximate="tanh"), "tanh"),
        (lambda x: (x * x).masked_fill(x > 0, fuse.const("c")), lambda x: (x * x).masked_fill(x > 0, -9.0), -9.0),
    ],
)  # fmt: skip
def test_a_constant_takes_the_value_that_the_graph_has(try_pattern, pattern, model, value):
    pattern.__name__ = "unnamed"
    (outcome,) = try_pattern(pattern, model, randn(4, 5)).matched
    assert outcome.found.constants == {"c": value}


def test_one_constant_in_two_places_must_be_one_value(try_pattern):
    def twice(x):
        return torch.tanh(x * fuse.const("c")) + fuse.const("c")

    assert try_pattern(twice, lambda x: torch.tanh(x * 3) + 3, randn(4)).kinds == {"matched": 1}
    assert try_pattern(twice, lambda x: torch.tanh(x * 3) + 4, randn(4)).reason.startswith("structure: the number is")


def test_either_takes_any_of_its_alternatives_and_says_which(try_pattern):
    def activated(x, w, b):
        h = F.linear(x, w, b)
        return fuse.either(F.gelu(h), F.silu(h), name="activation")

    arguments = randn(3, 4), randn(5, 4), randn(5)
    for position, activation in enumerate((F.gelu, F.silu)):
        (outcome,) = try_pattern(activated, lambda x, w, b, f=activation: f(F.linear(x, w, b)), *arguments).matched
        assert outcome.found.form.choices == {"activation": position}
    assert try_pattern(activated, lambda x, w, b: F.tanh(F.linear(x, w, b)), *arguments).matched == []


def test_the_first_alternative_that_fits_is_taken_and_the_other_not_counted_again(try_pattern):
    def activated(x, w):
        return fuse.optional(torch.relu, x @ w)

    found = try_pattern(activated, lambda x, w: torch.relu(x @ w).exp(), randn(3, 4), randn(4, 4))
    assert found.kinds == {"matched": 1}
    assert [node.name for node in found.matched[0].found.inside] == ["mm", "relu"]


def test_an_optional_part_may_be_missing_with_what_only_it_reads(try_pattern):
    class Tail:
        def pattern(self, x, skip):
            return torch.tanh(fuse.optional(lambda h: h + skip, torch.exp(x), name="skipped"))

        def check(self, m):
            return None if (m["skip"] is None) == (m["skipped"] == 1) else m.fail("they disagree")

    assert try_pattern(Tail, lambda x, y: torch.tanh(torch.exp(x) + y), randn(3), randn(3)).kinds == {"matched": 1}
    assert try_pattern(Tail, lambda x, y: torch.tanh(torch.exp(x)) + y, randn(3), randn(3)).kinds == {"matched": 1}
    assert try_pattern(Tail, lambda x, y: torch.tanh(torch.exp(x) - y * 2), randn(3), randn(3)).matched == []


def joined(pieces=fuse.many(at_least=2)):
    return torch.cat([torch.relu(piece) for piece in pieces], dim=1)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_many_takes_as_many_tensors_as_there_are(try_pattern, count):
    def model(*pieces: Tensor) -> Tensor:
        return torch.cat([torch.clamp(piece, min=0) for piece in pieces], -1)

    (outcome,) = try_pattern(joined, model, *(randn(2, size) for size in range(1, count + 1))).matched
    assert list(outcome.found.inputs) == [("pieces", place) for place in range(count)]


def test_many_wants_its_structure_for_each(try_pattern):
    found = try_pattern(joined, lambda x, y, z: torch.cat([x.relu(), y, z.relu()], 1), *[randn(2, 3)] * 3, near=True)
    assert found.reason == "structure: a given value where the pattern has `relu`"


def stacked(pieces=fuse.many(at_least=2)):
    return torch.stack([torch.relu(piece) for piece in pieces], dim=1)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda *pieces: torch.stack([piece.relu() for piece in pieces], -2), 2),
        (lambda *pieces: torch.cat([F.relu(piece)[:, None] for piece in pieces], 1), 5),
    ],
)
def test_many_are_stacked(try_pattern, model, count):
    (outcome,) = try_pattern(stacked, model, *(randn(2, 3) for _ in range(count))).matched
    assert len(outcome.found.inputs) == count


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda x, y: torch.stack([x.relu(), y.relu()], 0), "`cat` has dim 0, the pattern wants 1"),
        (lambda x, y: torch.cat([x.relu(), y.relu()], 1), "the pattern has `reshape` where the graph has none"),
    ],
)
def test_stacked_another_way(try_pattern, model, reason):
    assert try_pattern(stacked, model, randn(3, 3), randn(3, 3)).reason == f"structure: {reason}"


def test_several_results_and_a_repeated_structure(try_pattern):
    def cell(x, h, c, w, u):
        g = x @ w + h @ u
        i, f, o, z = g[:, :4], g[:, 4:8], g[:, 12:], g[:, 8:12]
        new = torch.tanh(z) * i.sigmoid() + c * f.sigmoid()
        return new.tanh() * torch.sigmoid(o), new

    arguments = randn(2, 3), randn(2, 4), randn(2, 4), randn(3, 16), randn(4, 16)
    (outcome,) = try_pattern(gates, cell, *arguments).matched
    assert len(outcome.found.outputs) == 2
    assert len(outcome.found.inside) == 13  # nine operators and four slices

    def swapped(x, h, c, w, u):
        f, i, g, o = (x @ w + h @ u).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    assert try_pattern(gates, swapped, *arguments).matched == []


@pytest.mark.parametrize(
    ("spec", "model", "reason"),
    [
        (fuse.tensor(4, 5), lambda x, w: x, None),
        (fuse.tensor(4, 6), lambda x, w: x, "dimension 1 of `x` is 5, the pattern wants 6"),
        (fuse.tensor(None, None, None), lambda x, w: x, "`x` has 2 dimensions, the pattern wants 3"),
        (fuse.tensor(..., 5), lambda x, w: x, None),
        (fuse.tensor(..., 4), lambda x, w: x, "dimension 1 of `x` is 5, the pattern wants 4"),
        (fuse.tensor("n", "n"), lambda x, w: x, "dimension 1 of `x` is 5, the pattern wants 4 (`n`)"),
        (fuse.tensor(dtype=torch.float32), lambda x, w: x, None),
        (fuse.tensor(dtype=torch.float64), lambda x, w: x, "`x` is float32, the pattern wants float64"),
        (fuse.tensor(device="cpu"), lambda x, w: x, None),
        (fuse.tensor(device="cuda"), lambda x, w: x, "`x` is on cpu, the pattern wants cuda"),
        (fuse.tensor(layout="contiguous"), lambda x, w: x, None),
        (fuse.tensor(layout="contiguous"), lambda x, w: w.t(), "`x` is not contiguous"),
        (fuse.tensor(constant=True), lambda x, w: w, None),
        (fuse.tensor(constant=True), lambda x, w: w.t(), None),
        (fuse.tensor(constant=True), lambda x, w: x, "`x` changes from call to call"),
        (fuse.tensor(constant=False), lambda x, w: w, "`x` is the same in every call"),
    ],
)
def test_constraints_on_a_tensor(try_pattern, spec, model, reason):
    def gelu_of_twice(x=spec):
        return F.gelu(torch.exp(x))

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(torch.exp(model(x, self.weight)))

    found = try_pattern(gelu_of_twice, Weighted(), randn(4, 5))
    assert (found.kinds == {"matched": 1}) if reason is None else (found.reason == f"constraint: {reason}")


def test_a_named_size_is_the_same_in_all_tensors(try_pattern):
    def scaled(x=fuse.tensor(..., "columns"), scale=fuse.tensor("columns")):
        return torch.exp(x) * scale

    assert try_pattern(scaled, lambda x, s: torch.exp(x) * s, randn(2, 3, 4), randn(4)).kinds == {"matched": 1}
    found = try_pattern(scaled, lambda x, s: torch.exp(x) * s, randn(2, 3, 4), randn(1))
    assert found.reason == "constraint: dimension 2 of `x` is 4, the pattern wants 1 (`columns`)"


def test_examples_say_what_cannot_be_guessed(try_pattern):
    class Masked:
        def pattern(self, scores, lengths):
            mask = scores.cumsum(1).long() < lengths.view(3, 1)
            return torch.softmax(scores.masked_fill(mask, -1e9), 1)

        def examples(self):
            return randn(3, 7), torch.ones(3, dtype=torch.int64)

    def model(scores, lengths):
        return torch.softmax(scores.masked_fill(lengths[:, None] > scores.cumsum(-1).to(torch.int64), -1e9), -1)

    assert try_pattern(Masked, model, randn(3, 9), torch.tensor([3, 4, 5])).kinds == {"matched": 1}


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_pattern_serves_all_ranks_and_dtypes(try_pattern, rank, dtype):
    class Norm:
        def pattern(self, x, weight):
            y = x.float()
            return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + fuse.const("eps"))).to(x.dtype) * weight

    x, weight = randn(2, 3, 4, 8)[(0,) * (4 - rank)].to(dtype), randn(8).to(dtype)

    def model(x, w):
        y = x.to(torch.float32)
        return w * (y / (1e-6 + y.square().sum(-1, True) / 8).sqrt()).to(dtype)

    (outcome,) = try_pattern(Norm, model, x, weight).matched
    assert outcome.found.constants == {"eps": 1e-6}


def test_attention_matches_where_heads_are_turned_before(try_pattern):
    def heads(x, w):
        return F.linear(x, w).view(2, 5, 3, 8).transpose(1, 2)

    def model(x, wq, wk, wv):
        q, k, v = heads(x, wq), heads(x, wk), heads(x, wv)
        return (torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1) @ v).transpose(1, 2).reshape(2, 5, 24)

    found = try_pattern(Attention, model, randn(2, 5, 24), *(randn(24, 24) for _ in range(3)))
    assert found.kinds == {"matched": 1}
    assert found.matched[0].found.constants["scale"] == pytest.approx(8**0.5)

    def along_queries(x, wq, wk, wv):
        q, k, v = heads(x, wq), heads(x, wk), heads(x, wv)
        return torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -2) @ v

    assert try_pattern(Attention, along_queries, randn(2, 5, 24), *(randn(24, 24) for _ in range(3))).matched == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: fuse.const("c"), "fuse.const can only be used inside of a pattern"),
        (lambda: fuse.either(1, 2), "fuse.either can only be used inside of a pattern"),
        (lambda: fuse.tensor(layout="blocked"), "layout 'blocked' is neither"),
        (lambda: fuse.tensor(..., 3, ...), r"a shape may have only one \.\.\."),
    ],
)
def test_words_out_of_place_are_errors(source, message):
    with pytest.raises(FuseError, match=message):
        source()


def no_tensor():
    return torch.zeros(3)


def with_keywords(x, *, y):
    return x + y


def with_a_default(x, y=2):
    return x + y


class WithoutPattern:
    def replace(self, x):
        return x


class WithAnUnknownMethod:
    def pattern(self, x):
        return x

    def chek(self, m):
        return None


class WithAnotherReplace:
    def pattern(self, x, y):
        return torch.exp(x) + y

    def replace(self, x):
        return x


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (no_tensor, "takes no tensor"),
        (with_keywords, "parameter 'y' must not be keyword-only or variadic"),
        (with_a_default, "the default of 'y' must be"),
        (WithoutPattern, "has no method 'pattern'"),
        (WithAnUnknownMethod, "has a method 'chek'; known are backward, check, examples, pattern, replace"),
        (WithAnotherReplace, "replace must take the parameters of pattern"),
    ],
)
def test_a_definition_that_is_none_is_an_error(source, message):
    with pytest.raises(FuseError, match=message):
        define(source)


def only_views(x):
    return x.t().unsqueeze(0)


def never_runs(x):
    raise ValueError("not today")


def writes(x):
    return x.add_(1)


def makes_a_tensor(x):
    return x + torch.tensor([1.0, 2.0])


def makes_a_mask(x):
    return x * (torch.arange(x.shape[0]) < 2)


def draws(x):
    return x * torch.rand(2)


def returns_a_number(x):
    return torch.exp(x), 3


def apart(x, y):
    return torch.exp(x), torch.exp(y) * 2


def hides_a_constant(x):
    return x * (fuse.const("c") ** 2 + 1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (only_views, "computes nothing"),
        (never_runs, r"does not run with any guess; give it examples\(\) that it runs with \(ValueError: not today\)"),
        (writes, "it writes to an input"),
        (returns_a_number, "must return a tensor, or a tuple of tensors"),
        (draws, r"makes a tensor from nothing \(`rand`\)"),
        (apart, "falls into parts that share no tensor"),
        (hides_a_constant, r"fuse.const\('c'\) stands in no operator's argument"),
    ],
)
def test_a_pattern_that_cannot_be_looked_for_says_why(source, message):
    with pytest.raises(FuseError, match=message):
        forms(define(source), 1)


def test_a_tensor_that_is_made_of_no_input_is_compared_by_its_value(try_pattern):
    assert try_pattern(makes_a_tensor, makes_a_tensor, randn(4, 2)).matched
    assert try_pattern(makes_a_tensor, lambda x: torch.tensor([1.0, 2.0]) + x, randn(4, 2)).matched
    assert not try_pattern(makes_a_tensor, lambda x: x + torch.tensor([1.0, 3.0]), randn(4, 2)).matched
    assert not try_pattern(makes_a_tensor, lambda x, y: x + y, randn(4, 2), randn(2)).matched
    assert try_pattern(makes_a_mask, makes_a_mask, randn(6)).matched
    assert not try_pattern(makes_a_mask, lambda x: x * (torch.arange(x.shape[0]) < 3), randn(6)).matched


def test_a_tensor_of_one_element_is_a_number(try_pattern):
    assert try_pattern(lambda x: torch.exp(x) * 2.5, lambda x: torch.tensor(2.5) * torch.exp(x), randn(4)).matched
    assert try_pattern(lambda x: torch.exp(x) * torch.tensor(2.5), lambda x: 2.5 * torch.exp(x), randn(4)).matched
    assert not try_pattern(lambda x: torch.exp(x) * 2.5, lambda x: torch.tensor(2.6) * torch.exp(x), randn(4)).matched
