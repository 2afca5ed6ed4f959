"""Timing: fair rounds, honest statistics, and what a report says."""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from fuse.errors import FuseError
from fuse.report.timing.bench import BenchReport, bench
from fuse.report.timing.timing import Quartiles, interleaved, quartiles


@pytest.fixture(scope="module")
def report() -> BenchReport:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval()
    return bench(model, (torch.ones(4, 8),), seconds=0.05)


def test_a_slower_function_is_measured_as_slower() -> None:
    samples = interleaved({"slow": lambda: time.sleep(0.004), "quick": lambda: time.sleep(0.001)}, seconds=0.05)
    ratio = quartiles(samples["slow"]).median / quartiles(samples["quick"]).median
    assert 2.0 < ratio < 5.0


def test_every_round_has_a_sample_of_each() -> None:
    samples = interleaved({"a": lambda: None, "b": lambda: None, "c": lambda: None}, seconds=0.01)
    assert len({len(taken) for taken in samples.values()}) == 1


def test_garbage_collection_is_on_again_after_an_error() -> None:
    calls = iter(range(10))

    def fails_later() -> None:
        if next(calls) > 4:
            raise ValueError

    with pytest.raises(ValueError):
        interleaved({"a": fails_later}, seconds=0.01)
    assert gc.isenabled()


def test_fused_agrees_with_eager_and_both_are_observed(report: BenchReport) -> None:
    assert report.disagreements == ()
    assert report.observed_before == 2
    assert 0 < report.observed_after <= 2


def test_the_ratio_is_of_the_medians(report: BenchReport) -> None:
    timings = report.timings
    expected = timings["eager"].milliseconds.median / timings["fused"].milliseconds.median
    ratio = report.ratios["eager"]
    assert ratio.median == pytest.approx(expected)
    assert ratio.lower <= ratio.median <= ratio.upper


def test_json_states_machine_versions_threads_and_first_calls(report: BenchReport) -> None:
    values = json.loads(json.dumps(report.to_dict()))
    assert values["threads"] == torch.get_num_threads()
    assert values["versions"]["torch"] == torch.__version__
    assert set(values["first_call_seconds"]) == {"fused", "eager"}
    assert values["observed"] == {"before": 2, "after": report.observed_after}
    assert values["fallbacks"] == []


def test_the_table_says_what_was_measured(report: BenchReport) -> None:
    assert "forward, measured" in str(report).splitlines()[0]
    assert f"launches observed: 2 eager, {report.observed_after} fused" in str(report)


def test_quartiles_that_are_far_apart_are_said_to_be(report: BenchReport) -> None:
    for upper, expected in ((1.9, False), (2.1, True)):
        measured = replace(report, ratios={"eager": Quartiles(1.0, 1.5, upper)})
        assert ("against eager, the quartiles are far apart" in str(measured)) is expected


def test_the_users_cache_folder_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSE_CACHE_DIR", "/mine")
    bench(nn.Tanh(), (torch.ones(4),), seconds=0.01)
    assert os.environ["FUSE_CACHE_DIR"] == "/mine"


def test_the_model_and_its_inputs_stay_as_they_were() -> None:
    model, x = nn.BatchNorm1d(3).train(), torch.randn(4, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bench(model, (x,), seconds=0.01, train=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(FuseError, match="no peer 'onnx'"):
        bench(nn.Tanh(), (torch.ones(4),), against=["onnx"])


def test_the_hand_tuned_peer_is_timed_and_its_results_are_its_own() -> None:
    report = bench(nn.Tanh(), (torch.ones(4),), against=["tuned"], tuned=nn.Linear(4, 2), seconds=0.01)
    assert set(report.timings) == {"fused", "tuned"}
    assert report.ratios["tuned"].median > 0
    assert not report.disagreements


def test_a_tuned_peer_must_be_given() -> None:
    with pytest.raises(FuseError, match="tuned="):
        bench(nn.Tanh(), (torch.ones(4),), against=["tuned"])


def test_launches_of_training_are_counted_forward_and_backward_apart() -> None:
    report = bench(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.randn(3, 4),), seconds=0.01, train=True)
    assert (report.observed_before, report.observed_backward) == (2, (3, 3))
    assert report.launches_after == report.observed_after + 3
    assert "backward: 3 eager, 3 fused" in str(report)
    assert report.to_dict()["observed_backward"] == {"before": 3, "after": 3}
