"""Ten fusions are found in every spelling, and no near miss is rewritten wrongly; the page says what was found."""

from __future__ import annotations

import json
import re

import pytest
import torch

from benchmarks.common import RESULTS
from benchmarks.comparison import AS_WRITTEN, FOUND, PAGE, WRONG, fused, page
from benchmarks.fusions import SPELLINGS
from benchmarks.more_fusions import FUSIONS


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
def test_a_fusion_is_found_in_every_spelling(fusion):
    found = {kind: fused(fusion, function) for kind, function in fusion.spellings.items()}
    assert found == dict.fromkeys(fusion.spellings, FOUND)
    assert fused(fusion, fusion.pattern) == FOUND


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
def test_no_near_miss_is_rewritten_wrongly(fusion):
    assert WRONG not in {kind: fused(fusion, function) for kind, function in fusion.near_misses.items()}.values()


def test_spellings_mean_what_the_pattern_means():
    """Or to be found would be wrong."""
    for fusion in FUSIONS:
        arguments = fusion.arguments()
        wanted = fusion.pattern(*arguments)
        for kind, function in fusion.spellings.items():
            assert kind in SPELLINGS
            for one, other in zip(_listed(function(*arguments)), _listed(wanted), strict=True):
                assert (one - other).abs().max() < 1e-5, (fusion.name, kind)


def _listed(result):
    return list(result) if isinstance(result, tuple) else [result]


def test_the_page_says_what_was_found():
    results = json.loads((RESULTS / "comparison.json").read_text())["cases"]
    written = re.sub(r"PyTorch [\w.+]+\.\n", f"PyTorch {torch.__version__}.\n", PAGE.read_text())
    assert written == page(results)
    ours = [one["fuse"] for one in results if one["change"] in (AS_WRITTEN, *SPELLINGS)]
    assert set(ours) == {FOUND}
    assert WRONG not in [one["fuse"] for one in results]
    assert len(results) == sum(1 + len(one.spellings) + len(one.near_misses) for one in FUSIONS)
