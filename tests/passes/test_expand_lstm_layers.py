"""A layer that eager gives to a library becomes a loop of ours; what is no such layer, or not in float32, stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.testing import assert_fuses

NAME = "expand_lstm_layers"


@pytest.mark.parametrize(
    ("settings", "layers", "launches"),
    [
        ({}, 1, 1),  # both last states are stacked in the loop's kernel
        ({"bias": False}, 1, 1),
        ({"batch_first": True}, 1, 2),  # a copy turns the batch round, as eager's does
        ({"num_layers": 2}, 2, 2),
        ({"bidirectional": True}, 2, 3),  # both directions joined, one of them turned round, in the copy of the states
        ({"num_layers": 2, "bidirectional": True}, 4, 6),
    ],
    ids=str,
)
def test_a_layer_becomes_a_loop(settings: dict[str, Any], layers: int, launches: int) -> None:
    assert_fuses(nn.LSTM(8, 16, **settings), torch.randn(5, 3, 8), launches=launches, fired={NAME: layers})


class Decoder(nn.Module):
    """A layer that is called with one step at a time, on what it computed before."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(8, 16, **settings), nn.Linear(16, 8)

    def forward(self, y: Tensor, steps: int = 6) -> tuple[Tensor, Tensor]:
        h = c = y.new_zeros(self.cell.num_layers, len(y), 16)
        found = []
        for _ in range(steps):
            output, (h, c) = self.cell(y.unsqueeze(1 if self.cell.batch_first else 0), (h, c))
            y = torch.tanh(self.out(output.view(len(y), 16)))
            found.append(y)
        return torch.stack(found), c


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2}, {"bias": False, "batch_first": True}], ids=str)
def test_a_layer_that_is_a_step_of_a_loop_becomes_part_of_it(settings: dict[str, Any]) -> None:
    layers = settings.get("num_layers", 1)
    y = torch.randn(4, 8)
    assert_fuses(Decoder(**settings), y, launches=1, fired={NAME: 6 * layers, "roll_whole_loops": 1})
    checked = check(Decoder(**settings), (y,), train=True)
    assert checked.passed, checked
    few = fuse.show(Decoder(**settings), (y, 3))
    assert [loop.trip_count for one in few.loops for loop in one.rolled] == [1] * 3 * layers


def test_states_of_the_caller_start_the_loop() -> None:
    x, h, c = torch.randn(5, 3, 8), torch.randn(1, 3, 16), torch.randn(1, 3, 16)
    assert_fuses(nn.LSTM(8, 16), x, (h, c), fired={NAME: 1})


def test_large_weights_and_few_rows_are_one_product_before_the_loop() -> None:
    assert_fuses(nn.LSTM(1024, 256), torch.randn(6, 1, 1024), launches=2, fired={NAME: 1})


def test_launches_do_not_grow_with_the_length() -> None:
    for steps in (1, 4, 70):
        assert_fuses(nn.LSTM(8, 16), torch.randn(steps, 2, 8), launches=1, fired={NAME: 1})


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("model", [nn.LSTM(8, 16, proj_size=4), nn.LSTM(8, 16).double()])
def test_layers_that_eager_unrolls_are_loops_to_the_other_passes(model: nn.LSTM) -> None:
    x = torch.randn(5, 3, 8, dtype=model.weight_ih_l0.dtype)
    assert_fuses(model, x, fired={NAME: 0, "roll_whole_loops": 1})


def test_another_dtype_is_declined_with_the_reason() -> None:
    report = fuse.show(nn.LSTM(8, 16).bfloat16(), (torch.randn(5, 3, 8, dtype=torch.bfloat16),))
    reasons = [one.reason for one in report.rejected if one.pass_name == NAME]
    # Without instructions for bfloat16 eager does not call the library for this layer.
    assert reasons == ["it is not in float32"] * torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_without_the_pass_the_library_runs_and_leaves_out_what_nobody_reads() -> None:
    model, x = nn.LSTM(8, 16).eval(), torch.randn(5, 3, 8)
    with torch.no_grad():
        fused = fuse.compile(model, passes=[])
        torch.testing.assert_close(fused(x), model(x))
    assert fused.last_run.aten
    assert not fused.last_run.fallbacks


def test_weights_that_change_take_effect() -> None:
    model, x = nn.LSTM(8, 16).eval(), torch.randn(5, 3, 8)
    fused = fuse.compile(model)
    with torch.no_grad():
        fused(x)
        model.weight_hh_l0.mul_(2)
        torch.testing.assert_close(fused(x), model(x))


@given(
    steps=st.integers(1, 9),
    batch=st.integers(1, 5),
    width=st.integers(1, 9),
    units=st.integers(1, 33),
    layers=st.integers(1, 2),
    backwards=st.booleans(),
    turned=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_any_size(steps: int, batch: int, width: int, units: int, layers: int, backwards: bool, turned: bool) -> None:
    model = nn.LSTM(width, units, layers, bidirectional=backwards, batch_first=turned).eval()
    x = torch.randn(batch, steps, width) if turned else torch.randn(steps, batch, width)
    with torch.no_grad():
        report = check(model, (x,))
    assert report.passed, report
