"""A pattern is held to what it says: each fault of a replacement is found, and named by a call that shows it."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import randn

import fuse
from fuse import cli, verbs
from fuse.check.pattern import Verification, verify
from fuse.check.trials import refusal
from fuse.rewrite.patterns.definition import Pattern, define
from fuse.rewrite.patterns.pattern_cache import source_of


def pattern(function: Any, replace: Any = None, check: Any = None) -> Pattern:
    """``function`` as a pattern that is replaced by ``replace``."""
    parts = {"pattern": staticmethod(function)}
    parts |= {} if replace is None else {"replace": staticmethod(replace)}
    parts |= {} if check is None else {"check": check}
    return define(type(function.__name__.strip("<>") + "_", (), parts))


def counterexample(verification: Verification) -> str:
    assert verification.counterexample is not None, str(verification)
    return str(verification.counterexample)


def test_a_right_replacement_passes_on_all_that_is_tried():
    found = verify(pattern(lambda x, y: torch.relu(x - y) * 2, lambda x, y: (x - y).clamp(min=0) * 2))
    assert found.passed, str(found)
    assert found.fired > 20
    assert (found.near_fired, found.missed) == (1, 4)  # swapped; a literal, an operator and two extra users
    assert (
        found.gradients > 20
    )  # of other sizes, dtypes and strides, too; not at 0 and NaN, where relu and clamp differ
    assert found.kernels == 1


def test_a_pattern_without_replacement_is_run_as_a_kernel():
    found = verify(pattern(lambda x: x * torch.sigmoid(x)))
    assert found.passed
    assert (found.gradients, found.kernels) == (0, 1)


@pytest.mark.parametrize(
    ("function", "replace", "told"),
    [
        (lambda x, y: torch.exp(x - y), lambda x, y: torch.exp(y - x), "result 0: error"),
        (lambda x: torch.tanh(x * 2), lambda x: torch.tanh(x * 2.001), "result 0: error"),
        (lambda x: torch.relu(x) * 2, lambda x: (x + x).clamp(min=0, max=1e4), "result 0: 10000.0"),
        (lambda x: x.exp() * 0 + x, lambda x: x * 1.0, "inf in one place"),
        (lambda x, y: torch.exp(x) + y, lambda x, y: torch.exp(x) + x, "result 0: error"),
        (lambda x: torch.exp(x).sum(-1), lambda x: torch.exp(x).sum(0), "result 0: error"),
    ],
    ids=["operands", "a literal", "the largest values", "infinity", "aliased inputs", "a dimension"],
)
def test_a_wrong_replacement_is_refused_with_its_counterexample(function, replace, told):
    text = counterexample(verify(pattern(function, replace)))
    assert told in text


def test_a_replacement_that_is_right_for_one_size_only():
    """The sizes are equal in what is first tried: a transposed result then has the right shape."""

    def function(x, y):
        return torch.exp(x @ y)

    def replace(x, y):
        return torch.exp((y.t() @ x.t()).t())

    assert verify(pattern(function, replace)).passed

    def mean_of_eight(x, y):
        return torch.exp(x[:, :8] @ y[:8])

    assert "other sizes" in counterexample(verify(pattern(function, mean_of_eight)))


def test_a_replacement_that_forgets_a_constant():
    def function(x):
        return torch.tanh(x * fuse.const("factor", 0.5))

    assert "1.5 for 0.5 in `mul`" in counterexample(verify(pattern(function, lambda x: torch.tanh(x * 0.5))))
    right = verify(pattern(function, lambda x: torch.tanh(fuse.const("factor") * x)))
    assert right.passed, str(right)


def test_a_replacement_that_is_wrong_for_one_dtype_is_declined_there():
    def function(x):
        return torch.tanh(x) * 2

    def replace(x):
        return (torch.tanh(x.double()) * 2).to(x.dtype) if x.dtype != torch.bfloat16 else torch.tanh(x) * 2.5

    found = verify(pattern(function, replace))
    assert found.passed, str(found)
    assert {told for told, one in found.domain.items() if one.outcome == "wrong"} == {"bfloat16[n, n]"}
    assert "declined, wrong: result 0: error" in str(found)
    checked = verify(pattern(function, replace, lambda self, m: m.fail("bfloat16") if is_bfloat16(m["x"]) else None))
    assert {one.outcome for one in checked.domain.values()} == {"right"}


def is_bfloat16(node: torch.fx.Node) -> bool:
    return node.meta["val"].dtype == torch.bfloat16


def test_a_gradient_that_is_wrong_for_some_sizes_only_is_found():
    def replace(x):
        y = torch.exp(x)
        return y if x.shape[0] == 8 else y.detach() + 0 * x

    wrong = counterexample(verify(pattern(lambda x: torch.exp(x), replace)))
    assert "gradient" in wrong
    assert "other sizes" in wrong


def test_gradients_are_compared_where_both_have_them():
    def replace(x):
        return torch.tanh(x.detach()) * 2 + 0 * x

    text = counterexample(verify(pattern(lambda x: torch.tanh(x) * 2, replace)))
    assert text.startswith("gradient: error"), text


def test_a_pattern_that_never_fires_is_refused():
    text = counterexample(verify(pattern(lambda x: torch.tanh(x) * 2, check=lambda self, m: m.fail("never"))))
    assert text == "it does not match its own computation: constraint: never (every sample)"


def test_a_check_that_fails_is_named():
    """In a model it would take all patterns with it."""
    two_rows = pattern(lambda x: torch.tanh(x) * 2, check=lambda self, m: None if rows(m["x"]) > 1 else m.fail("a row"))
    text = counterexample(verify(two_rows))
    assert "check failed, IndexError" in text


def rows(node: torch.fx.Node) -> int:
    sizes = list(node.meta["val"].shape)
    return sizes[0] if sizes[0] < 9 else sizes[5]


class Wrong:
    def pattern(self, x):
        return torch.tanh(x) * 2

    def replace(self, x):
        return torch.tanh(x) * 3


def test_a_wrong_pattern_does_not_run_in_any_model(registered):
    registered(Wrong)

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.tanh(x) * 2

    report = fuse.show(Model(), (randn(3),), passes=["match_patterns"])
    assert report.fired == ()
    (reason,) = [one.reason for one in report.rejected]
    assert reason.startswith("refused: result 0: error"), reason
    assert "(as usual: float32[8, 8])" in reason


def test_what_was_found_is_remembered_by_the_source(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSE_CACHE_DIR", str(tmp_path / "cache"))
    tried: list[Pattern] = []
    monkeypatch.setattr("fuse.check.trials.verify", lambda one, quick: tried.append(one) or verify(one, quick=quick))
    for _ in range(2):
        assert str(refusal(define(Wrong))).startswith("refused: ")
        assert refusal(pattern(lambda x: F.silu(x) * 2, lambda x: 2 * F.silu(x))) is None
    assert len(tried) == 2


def test_the_source_of_a_pattern_is_all_that_it_depends_on():
    def made(factor: float) -> Pattern:
        return pattern(lambda x: torch.tanh(x) * factor)

    assert source_of(made(2.0)) == source_of(made(2.0))
    assert source_of(made(2.0)) != source_of(made(3.0))


FILE = """
    import torch
    import fuse

    @fuse.pattern
    class Doubled:
        "2 * tanh(x)"
        def pattern(self, x):
            return torch.tanh(x) * 2
        def replace(self, x):
            return torch.tanh(x) * {factor}
"""


@pytest.mark.parametrize(("factor", "status"), [(2.0, verbs.GOOD), (3.0, verbs.FAILED)])
def test_the_command_says_what_was_tried(tmp_path, capsys, factor, status):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(FILE.format(factor=factor)))
    assert cli.run(["check-pattern", str(path)]) == status
    text = capsys.readouterr().out
    assert text.startswith("Doubled (mine.py:8): 2 * tanh(x)\n  samples      ")
    assert cli.run(["check-pattern", f"{path}:Doubled", "--json"]) == status
    (told,) = json.loads(capsys.readouterr().out)["patterns"]
    assert told["passed"] == (status == verbs.GOOD)
    assert (told["counterexample"] is None) == told["passed"]


def test_a_file_without_patterns_is_an_error(tmp_path, capsys):
    (tmp_path / "empty.py").write_text("")
    assert cli.run(["check-pattern", str(tmp_path / "empty.py")]) == cli.ERROR
    assert "has no pattern" in capsys.readouterr().err
