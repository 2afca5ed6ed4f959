"""Where a pattern's constants stand, which ways through it are forms of their own, and what is no pattern."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fuse
from fuse.errors import FuseError
from fuse.rewrite.patterns import forms
from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.matching import match
from fuse.rewrite.patterns.terms import TensorType, Term, Terms

PLAIN = TensorType((2, 3), torch.float32, None)
WIDE = TensorType((4, 9), torch.float32, None)


class Made:
    """Terms of one table."""

    def __init__(self) -> None:
        self.terms = Terms()
        self.x = self.leaf("x")

    def leaf(self, name: str) -> Term:
        return self.terms.leaf(name, PLAIN)

    def number(self, value: float) -> Term:
        return self.terms.number(value, self.x)

    def __call__(
        self, name: str, *operands: Term, tensor_type: TensorType = PLAIN, commutative: bool = False, **constants
    ) -> Term:
        return self.terms.make(name, operands, tensor_type, constants.items(), commutative=commutative)


@pytest.fixture
def of() -> Made:
    return Made()


@pytest.mark.parametrize(
    ("old", "new", "value", "other", "kind"),
    [
        (2, 3, 2, 3, "same"),
        (2, 5, 2, 3, None),
        (5, 3, 2, 3, None),
        ((2, 2), (3, 3), 2, 3, "spread"),
        ((2, 2), (5, 5), 2, 3, None),
        ((5, 5), (3, 3), 2, 3, None),
        (-2, -3, 2, 3, "negated"),
        (-2, -4, 2, 3, None),
        (-2, -2, 2, 3, None),
        (-1, -3, 2, 3, None),
        (-3, -3, 2, 3, None),
        (0.5, 1 / 3, 2, 3, "inverted"),
        (0.5, 0.9, 2, 3, None),
        (0.9, 1 / 3, 2, 3, None),
        (9.0, 0.5, 0, 2, None),
        (0.5, 9.0, 2, 0, None),
        (-1, 0, True, False, None),
        ("a", "b", "c", "d", None),
    ],
)
def test_how_a_constant_is_written(old, new, value, other, kind):
    assert forms._kind(old, new, value, other) == kind


def slots(ones: list[Term], others: list[Term]) -> list[tuple[str, str, str]]:
    return [(one.term.name, one.constant, one.kind) for one in forms._differences(ones, others, 0, 1)]


def test_where_a_constant_stands(of):
    one, two = (of("sum", of("add", of.x, of.number(value)), dim=value) for value in (0, 1))
    assert slots([one, one], [two, two]) == [("sum", "dim", "same"), ("add", "", "same")]


def test_a_constant_stands_in_no_operator_that_is_another_one(of):
    ones = [of("softmax", of.x, dim=0), of("cat", of.x, dim=0), of("cat", of.x, of.x, of.x, dim=0)]
    others = [of("log_softmax", of.x, dim=1), of("cat", of.x, of.x, dim=1), of("stack", of.x, of.x, dim=1)]
    ones, others = [*ones, of("cat", *[of.x] * 4, dim=0)], [*others, of("cat", of.x, of.x, dim=1)]
    assert slots(ones, others) == []


def test_a_constant_of_a_view_is_none(of):
    assert slots([of("permute", of.x, dims=0)], [of("permute", of.x, dims=1)]) == []


def test_operands_that_were_sorted_another_way(of):
    for name, commutative, expected in (("add", True, [("add", "", "same")]), ("lt", False, [])):
        one = of(name, of.x, of.number(0), commutative=commutative)
        two = of(name, of.number(1), of.x, commutative=commutative)
        assert slots([one], [two]) == expected


def test_a_text_is_found_where_it_stands(of):
    roots = [of("reshape", of("gelu", of("exp", of.x, mode="none"), approximate="tanh"), like="tanh")]
    (slot,) = forms._holding(roots, "tanh")
    assert (slot.term.name, slot.constant) == ("gelu", "approximate")


def test_what_tells_forms_apart(of):
    base = of("softmax", of.x, dim=0)
    view = of("reshape", base, tensor_type=WIDE)
    y = of("softmax", of.leaf("y"), dim=0)
    for other in (of("softmax", of.x, dim=1), of("softmax", of.x, dim=0, tensor_type=WIDE), view, y):
        assert forms.fingerprint([base]) != forms.fingerprint([other])
        assert (forms.fingerprint([base], bare=True) == forms.fingerprint([other], bare=True)) == (other is not y)


@pytest.mark.parametrize(("value", "inverse"), [(1 / 49, 49), (0.125, 8), (0.3, 1 / 0.3)])
def test_an_inverse_that_is_nearly_a_whole_number_is_one(value, inverse):
    found = forms._inverted(value)
    assert (found, type(found)) == (inverse, type(inverse))


@pytest.mark.parametrize("factor", [math.nan, 5e-324])
def test_a_factor_whose_inverse_is_no_number_is_looked_at(try_pattern, factor):
    found = try_pattern(lambda x: torch.exp(x / fuse.const("c")), lambda x: torch.exp(x * factor), torch.randn(3))
    assert sum(found.kinds.values()) == 1


def test_a_constant_that_only_one_way_reads_stands_nowhere_in_the_other():
    def scaled(x):
        factor = fuse.const("factor")
        return torch.exp(fuse.either(lambda: x * factor, lambda: torch.sin(x), name="way"))

    assert [set(one.slots) for one in forms.forms(define(scaled), 1)] == [{"factor"}, set()]


def test_ways_that_are_one_form_count_once():
    def activated(x):
        return torch.exp(fuse.either(torch.relu(x), x.clamp(min=0), torch.sin(x)))

    assert len(forms.forms(define(activated), 1)) == 2


def test_examples_of_several_ranks_are_one_form():
    class Last:
        def pattern(self, x):
            return torch.exp(x).sum(-1)

        def examples(self):
            return [(torch.randn(2, 3),), (torch.randn(2, 3, 4),)]

    assert len(forms.forms(define(Last), 1)) == 1


@pytest.mark.parametrize("most", [3, 2])
def test_a_pattern_of_too_many_forms_is_refused(monkeypatch, most):
    monkeypatch.setattr(forms, "MAX_FORMS", most)

    def activated(x):
        return torch.exp(fuse.either(torch.cos(x), torch.tanh(x), torch.sin(x)))

    pattern = define(activated)
    if most == 3:
        assert len(forms.forms(pattern, 1)) == 3
    else:
        with pytest.raises(FuseError, match="more than 2 forms"):
            forms.forms(pattern, 1)


def test_parts_that_share_a_number_alone_do_not_hang_together():
    with pytest.raises(FuseError, match="falls into parts"):
        forms.forms(define(lambda x, y: (torch.exp(x) * 2.5, torch.sin(y) * 2.5)), 1)


def test_a_sum_over_no_dimension_is_a_constants_value(try_pattern):
    found = try_pattern(lambda x: torch.exp(x).sum(fuse.const("dims")), lambda x: torch.exp(x).sum(), torch.tensor(1.0))
    (outcome,) = found.matched
    assert outcome.found.constants == {"dims": ()}


def test_a_number_may_be_a_tensor_of_equal_elements_in_the_graph():
    def filled(x, mask):
        return torch.exp(x).masked_fill(mask, fuse.const("value"))

    def chosen(x, mask):
        return (torch.where(mask, 2.0, torch.exp(x)),)

    mask = torch.tensor([True, False])
    for model in (lambda x, mask: (torch.exp(x).masked_fill(mask, 2.0),), chosen):
        graph = make_fx(model, tracing_mode="fake")(torch.randn(2), mask)
        (outcome,) = match(graph, [define(filled)], lambda found, around: found)
        assert outcome.kind == "matched"
        assert outcome.found is not None
        assert outcome.found.constants == {"value": 2.0}


def test_constants_are_found_beside_operators_of_one_name():
    @define
    def smoothed(x, y):
        return torch.exp(x) * fuse.const("c", 0.9) * -1 + torch.exp(y) * fuse.const("d", 0.1) * -1

    (form,) = forms.forms(smoothed, 1)
    assert form.slots.keys() == {"c", "d"}
