"""What a newcomer meets in the first hour: a pattern is used where it is right, and says why where it is not."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn

import fuse
from fuse.check import trials
from fuse.check.pattern import verify
from fuse.graph.function import Function
from fuse.rewrite.patterns import forms, pattern_cache
from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.forms import known_runs
from fuse.rewrite.patterns.operand_filters import OperandFilter


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing is known of any pattern."""
    monkeypatch.setenv("FUSE_CACHE_DIR", str(tmp_path / "cache"))
    known_runs.cache_clear()
    trials.refusal.cache_clear()
    trials._known.clear()
    trials._numbers.clear()


def became(function: Any, *arguments: Tensor) -> tuple[list[tuple[str, int]], set[str]]:
    """What fired in a model of ``function``, and why patterns did not."""
    report = fuse.show(Function(function), arguments)
    fired = [(one.pattern, one.count) for one in report.fired if one.pattern]
    return fired, {one.reason for one in report.rejected if one.pattern}


def test_cosine_similarity_matches_itself(registered):
    def cosine(a, b):
        return F.cosine_similarity(a, b, dim=1)

    registered(cosine)
    for shape in ((4, 8), (4, 8, 3), (2, 8, 4, 4)):
        fired, _ = became(cosine, randn(*shape), randn(*shape))
        assert fired == [("cosine", 1)]


def test_a_number_first_is_a_number(registered):
    def gate(z, h):
        return (1 - z) * h

    registered(gate)
    fired, _ = became(lambda z, h: torch.sub(1, z) * h, randn(4, 8), randn(4, 8))
    assert fired == [("gate", 1)]


class LayerNorm:
    """A layer norm, written out."""

    def pattern(self, x, weight, bias):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + fuse.const("eps")) * weight + bias

    def replace(self, x, weight, bias):
        return F.layer_norm(x, (x.shape[-1],), weight, bias, fuse.const("eps"))

    def examples(self):
        return randn(4, 8), randn(8), randn(8)


def layer_norm(x, weight, bias):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias


def test_a_pattern_is_used_where_it_is_right_and_declined_where_its_replacement_raises(registered):
    registered(finite=True)(LayerNorm)
    fired, _ = became(layer_norm, randn(4, 8), randn(8), randn(8))
    assert fired == [("LayerNorm", 1)]
    fired, reasons = became(layer_norm, randn(4, 8).double(), randn(8), randn(8))
    assert fired == []
    (reason,) = [one for one in reasons if one.startswith("refused")]
    told = "float64[n, n], float32[n], float32[n]; eps=1e-05"
    assert reason.startswith(f"refused: replace is not used for {told}; raised: replace")
    assert "mixed dtype (CPU)" in reason


def test_the_domain_is_printed():
    found = verify(define(LayerNorm, finite=True))
    assert found.passed, str(found)
    assert found.domain["float32[n, n], float32[n], float32[n]"].outcome == "right"
    assert found.domain["float64[n, n], float32[n], float32[n]"].outcome == "raised"
    assert "  calls        float64[n, n], float32[n], float32[n]: declined, raised: replace fails" in str(found)
    assert "  calls        as usual, other sizes, all float64, all bfloat16" in str(found)


def test_a_class_that_was_never_tried_is_tried_when_it_is_first_met(registered, monkeypatch):
    """Right for matrices, wrong for vectors: a matrix is what is tried first."""

    class Halves:
        def pattern(self, x):
            return torch.tanh(x) * 0.5

        def replace(self, x):
            return torch.tanh(x) * (0.5 if x.dim() > 1 else 0.25)

    registered(Halves)
    calls: list[str] = []
    judged = trials.judged_call
    monkeypatch.setattr(trials, "judged_call", lambda *given: calls.append("tried") or judged(*given))
    assert became(lambda x: torch.tanh(x) * 0.5, randn(4, 8))[0] == [("Halves", 1)]
    assert calls
    fired, reasons = became(lambda x: torch.tanh(x) * 0.5, randn(4))
    assert fired == []
    assert any("replace is not used for float32[n]; wrong: result 0: error" in reason for reason in reasons)
    calls.clear()
    for _ in range(2):  # neither class is tried again, nor in the next process
        became(lambda x: torch.tanh(x) * 0.5, randn(6, 3))
        became(lambda x: torch.tanh(x) * 0.5, randn(7))
        trials._known.clear()
    assert calls == []


class Powers:
    """Wrong for numbers other than those that trying it as a whole comes upon: 2, 3 and 6."""

    def pattern(self, x):
        return torch.pow(x, fuse.const("n", 2)).sum(-1)

    def replace(self, x):
        power = {2: lambda: x * x, 3: lambda: x * x * x, 6: lambda: x.pow(6)}
        return power.get(fuse.const("n", 2), lambda: x)().sum(-1)


def powers(*numbers):
    return lambda x: [torch.pow(x, number).sum(-1) for number in numbers]


def test_a_number_that_was_never_tried_is_tried_when_it_is_first_met(registered):
    registered(Powers)
    fired, reasons = became(powers(2, 5, 3), randn(4, 6))
    assert fired == [("Powers", 2)]
    assert any("replace is not used for float32[n, n]; n=5.0; wrong: result 0: error" in reason for reason in reasons)


def test_numbers_are_tried_up_to_so_many(registered, monkeypatch):
    """A loop may give each step a number of its own: what nobody tried is declined."""
    monkeypatch.setattr(trials, "MAX_NUMBERS", 2)
    registered(Powers)
    for _ in range(2):  # the same again where the verdicts are cached
        fired, reasons = became(powers(3, 2, 6), randn(4, 6))
        assert fired == [("Powers", 2)]
        assert any("n=6.0; not tried: 2 calls that differ in numbers alone were tried" in reason for reason in reasons)
        trials._known.clear()
        trials._numbers.clear()


def test_a_pattern_of_the_library_is_tried_on_each_class_of_calls_too(registered):
    """What holds of a pattern everywhere is held by tests of the library, what depends on a call is tried there."""

    class Means:
        def pattern(self, x, y):
            return torch.tanh(x - y).mean(0)

        def replace(self, x, y):
            return torch.tanh(x - y).sum(0) / y.shape[0]

    Means.__module__ = "fuse.passes.patterns.means"
    registered(Means)

    def means(x, y):
        return torch.tanh(x - y).mean(0)

    assert became(means, randn(4, 6), randn(4, 6))[0] == [("Means", 1)]
    fired, reasons = became(means, randn(4, 6), randn(1, 6))
    assert fired == []
    assert any("replace is not used for float32[n, n], float32[1, n]; wrong" in reason for reason in reasons)


def test_a_pattern_is_tried_once_for_the_same_code(registered, monkeypatch):
    """Neither as a whole nor on the classes of its calls, in this process or in another one."""

    class Halves:
        def pattern(self, x):
            return torch.tanh(x) * 0.5

        def replace(self, x):
            return 0.5 * torch.tanh(x)

    calls: list[str] = []
    judged, verified = trials.judged_call, trials.verify
    monkeypatch.setattr(trials, "judged_call", lambda *given: calls.append("class") or judged(*given))
    monkeypatch.setattr(trials, "verify", lambda *given, **named: calls.append("whole") or verified(*given, **named))
    registered(Halves)
    assert became(lambda x: torch.tanh(x) * 0.5, randn(4, 8))[0] == [("Halves", 1)]
    assert calls.count("whole") == 1
    assert 0 < calls.count("class") <= 8
    trials.refusal.cache_clear()  # as in the next process
    trials._known.clear()
    monkeypatch.setattr(trials, "verify", lambda *given, **named: pytest.fail("tried as a whole once more"))
    monkeypatch.setattr(trials, "judged_call", lambda *given: pytest.fail("its class is tried once more"))
    registered(Halves)
    assert became(lambda x: torch.tanh(x) * 0.5, randn(4, 8))[0] == [("Halves", 1)]


def test_wrong_on_nan_is_refused_unless_finite(registered):
    class Relu:
        def pattern(self, x):
            return torch.relu(x) * 2

        def replace(self, x):
            return torch.where(x > 0, x, 0) * 2

    registered(Relu)
    fired, reasons = became(lambda x: torch.relu(x) * 2, randn(4, 8))
    assert fired == []
    assert any(reason.startswith("refused: result 0: 0.0 at") for reason in reasons)
    assert any("finite=True allows this" in reason for reason in reasons)
    registered(finite=True)(Relu)
    assert became(lambda x: torch.relu(x) * 2, randn(4, 8))[0] == [("Relu", 1)]


def test_a_class_of_calls_that_is_wrong_where_values_are_infinite_says_how_to_allow_it(registered):
    @registered
    class ShiftedScale:
        def pattern(self, x=fuse.tensor(..., "n"), b=fuse.tensor("n"), s=fuse.tensor("n")):
            return (x + b) * s

        def replace(self, x, b, s):
            return torch.addcmul(b * s, x, s)  # inf - inf where x is finite and below zero

    fired, reasons = became(lambda x, b, s: (x + b) * s, randn(4, 8), randn(8), randn(8))
    assert fired == []
    assert any("replace is not used for" in one and one.endswith("; finite=True allows this)") for one in reasons)


def test_a_gradient_that_is_exactly_zero_is_no_counterexample():
    """Over one key the softmax is 1, whatever the scores: what is computed of its gradient is rounding."""

    class Attention:
        def pattern(self, q, k, v):
            return torch.softmax(q @ k.transpose(-2, -1) / fuse.const("c"), dim=-1) @ v

        def replace(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, scale=1 / fuse.const("c"))

        def examples(self):
            return randn(2, 4, 16, 8), randn(2, 4, 1, 8), randn(2, 4, 1, 8)

    found = verify(define(Attention, finite=True), quick=True)
    assert found.passed, str(found)
    assert found.gradients


def test_a_pattern_whose_operators_are_not_in_the_graph_is_neither_run_nor_tried(registered, monkeypatch):
    class Loud:
        def pattern(self, x):
            return torch.erfinv(torch.tanh(x))

        def replace(self, x):
            return torch.erfinv(torch.tanh(x))

    registered(Loud)
    became(lambda x: torch.erfinv(torch.tanh(x)), randn(4))  # somebody has used it
    known_runs.cache_clear()
    forms.forms.cache_clear()
    monkeypatch.setattr(forms, "trace", lambda *given: pytest.fail("the pattern is run"))
    monkeypatch.setattr(trials, "verify", lambda *given, **named: pytest.fail("the pattern is tried"))
    became(lambda x: torch.tanh(x) * 2, randn(4))
    became(lambda x: torch.erfinv(x) * torch.tanh(x), randn(4))  # both are there, but no erfinv of a tanh


def test_what_is_known_of_a_pattern_is_kept_by_its_code():
    def swish(x):
        return x * torch.sigmoid(x)

    known = known_runs(define(swish), 1)
    content = pattern_cache.find(define(swish), "runs", "1", str(forms.MAX_FORMS))
    assert content is not None
    assert (
        pickle.loads(content).needs
        == known.needs
        == ((OperandFilter("mul", 2, ("sigmoid",)), OperandFilter("sigmoid", 1, ())),)
    )
    swish.__code__ = (lambda x: x * torch.sigmoid(x + 1)).__code__
    assert pattern_cache.find(define(swish), "runs", "1", str(forms.MAX_FORMS)) is None


def test_nothing_is_logged_while_patterns_are_tried(registered, capfd):
    registered(LayerNorm)
    registered(lambda_named("cosine", lambda a, b: F.cosine_similarity(a, b, dim=1)))
    became(layer_norm, randn(4, 8), randn(8), randn(8))
    became(layer_norm, randn(4, 8).double(), randn(8), randn(8))
    became(lambda a, b: F.cosine_similarity(a, b, dim=1), randn(4, 8), randn(4, 8))
    verify(define(LayerNorm))
    assert capfd.readouterr() == ("", "")
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def lambda_named(name: str, function: Any) -> Any:
    function.__name__ = name
    return function
