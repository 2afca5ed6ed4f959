"""A function, given as a pattern, matches itself; ``python -m benchmarks.reflexive`` asks it of every operator."""

from __future__ import annotations

import pytest
import torch

from benchmarks import op_db
from benchmarks.reflexive import SETTINGS, _case, pattern_of, sweep

FUNCTIONS = (
    "addmm clamp masked.cumsum nn.functional.cosine_similarity nn.functional.cross_entropy nn.functional.layer_norm "
    "nn.functional.pad.circular nn.functional.smooth_l1_loss std where"
)


TOLD = {
    "ravel": "views and casts alone are not a pattern",
    "linalg.diagonal": "views and casts alone are not a pattern",
    "as_strided_scatter": "pattern 'Sample' has `as_strided_scatter`, which depends on how tensors lie in memory",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS.split())
def test_a_function_matches_itself_alone_in_a_larger_graph_and_in_a_loop(name: str) -> None:
    for op in op_db.operators([name]):
        found = sweep(op, samples=1)
        assert [one for one in found if not (one.matched or one.registration)] == []
        assert {one.setting for one in found} == set(SETTINGS)


@pytest.mark.parametrize("last", [lambda x: x.view(2, 12), lambda x: x[None].squeeze(0).flatten()])
def test_a_view_behind_what_is_computed_is_part_of_the_pattern(last) -> None:
    given = (torch.randn(4, 6), torch.randn(6, 6))
    for function in (lambda x, y: last(torch.tanh(x)) + 0 * y.sum(), lambda x, y: last(torch.relu(x @ y))):
        assert _case("", 0, "alone", pattern_of(function, given), function, given).matched


@pytest.mark.parametrize("name", ["ravel", "linalg.diagonal", "as_strided_scatter"])
def test_what_cannot_match_is_told_before_any_graph_is(name: str) -> None:
    (op,) = op_db.operators([name])
    (told,) = {(one.registration, one.reason) for one in sweep(op, samples=1)}
    assert told[0]
    assert told[1].startswith(TOLD[name])
