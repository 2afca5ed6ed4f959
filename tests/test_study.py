"""The model of the study's table: fitted on three batch sizes, right on the others."""

from __future__ import annotations

import json

import pytest

from benchmarks.common import RESULTS
from benchmarks.study import FITTED, PUBLISHED, fits


@pytest.mark.parametrize("name", PUBLISHED)
def test_batches_that_were_not_fitted_come_out(name: str) -> None:
    found = fits(name)
    tested = [str(batch) for batch in PUBLISHED[name]["V100"] if batch not in FITTED]
    assert tested == ["2", "4", "16"]
    assert max(abs(found["ratio_errors"][batch]) for batch in tested) < 0.15
    assert all(abs(one["errors"][batch]) < 0.18 for one in found["devices"].values() for batch in tested)


def test_the_file_holds_what_the_fit_gives() -> None:
    for case in json.loads((RESULTS / "study.json").read_text())["cases"]:
        assert {key: case[key] for key in ("model", "devices", "ratio_errors")} == fits(case["model"])
        assert case["launches"]["forward"][0] > case["launches"]["forward"][1]
