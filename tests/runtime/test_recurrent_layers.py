"""``nn.LSTM`` and ``nn.GRU`` train fused: packed or not, stacked, in both directions; gradients are held to float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import fuse
from fuse.check.oracle import check

LAYERS = (nn.LSTM, nn.GRU)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Packed(nn.Module):
    """A layer over sequences of several lengths; all that it gives is a result."""

    def __init__(self, layer: nn.RNNBase, is_sorted: bool = False, total: int | None = None, padding: float = 0.0):
        super().__init__()
        self.layer, self.is_sorted, self.total, self.padding = layer, is_sorted, total, padding

    def forward(self, x: Tensor, lengths: Any, states: Any = None) -> Any:
        first = self.layer.batch_first
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.is_sorted)
        output, last = self.layer(packed, states)
        return *pad_packed_sequence(output, first, self.padding, self.total), last


def assert_trains(model: nn.Module, *args: Any) -> None:
    report = check(model, args, train=True)
    assert report.passed, report
    assert report.fallbacks == ()


def states_of(layer: nn.RNNBase, batch: int) -> Any:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    made = [torch.randn(count, batch, layer.hidden_size, requires_grad=True) for _ in range(2)]
    return tuple(made) if isinstance(layer, nn.LSTM) else made[0]


SETTINGS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "without biases": {"bias": False},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_trains_as_loops(layer: type[nn.RNNBase], name: str) -> None:
    model = layer(8, 16, **SETTINGS[name])
    assert_trains(model, torch.randn(6, 3, 8, requires_grad=True))


@pytest.mark.parametrize("layer", LAYERS)
def test_states_that_are_given_get_gradients(layer: type[nn.RNNBase]) -> None:
    model = layer(8, 16, 2)
    assert_trains(model, torch.randn(6, 3, 8), states_of(model, 3))


class Truncated(nn.Module):
    """A layer whose last states, or all but these, leave their gradients behind."""

    def __init__(self, layer: nn.RNNBase, cut: str) -> None:
        super().__init__()
        self.layer, self.cut = layer, cut

    def forward(self, x: Tensor, states: Any = None) -> Any:
        y, (h, c) = self.layer(x, states)
        if self.cut == "states":
            return y, h.detach(), c.detach()
        return (y.detach(), h, c) if self.cut == "sequence" else y + (y.round() - y).detach()


@pytest.mark.parametrize(
    ("name", "cut"), [("without biases", "sequence"), ("two layers, both directions", "straight through")]
)
def test_a_layer_trains_where_gradients_are_kept_from_something(name: str, cut: str) -> None:
    layer = nn.LSTM(8, 16, **SETTINGS[name])
    size = (3, 6, 8) if layer.batch_first else (6, 3, 8)
    assert_trains(Truncated(layer, cut), torch.randn(size, requires_grad=True), states_of(layer, 3))


def test_launches_of_such_a_step_do_not_grow_with_the_length() -> None:
    def launches(steps: int) -> tuple[int, int]:
        report = fuse.show(Truncated(nn.LSTM(8, 16), "states"), (torch.randn(steps, 3, 8),), train=True)
        assert report.backward is not None
        assert report.backward.before.by_kind["loop"] == 1
        return report.after.launches, report.backward.after.launches

    assert launches(6) == launches(17)


@pytest.mark.parametrize("layer", LAYERS)
def test_launches_of_a_training_step_do_not_grow_with_the_length(layer: type[nn.RNNBase]) -> None:
    def launches(steps: int) -> tuple[int, int]:
        report = fuse.show(layer(8, 16), (torch.randn(steps, 3, 8),), train=True)
        assert report.backward is not None
        return report.after.launches, report.backward.after.launches

    assert launches(6) == launches(17)


def test_eagers_launches_of_a_training_step_are_those_of_the_library() -> None:
    report = fuse.show(nn.LSTM(8, 16), (torch.randn(6, 3, 8),), train=True)
    assert report.before.by_kind["loop"] == 1
    assert report.backward is not None
    assert report.backward.before.by_kind["loop"] == 1


@pytest.mark.parametrize("layer", LAYERS)
def test_double_trains(layer: type[nn.RNNBase]) -> None:
    assert_trains(layer(8, 16).double(), torch.randn(6, 3, 8, dtype=torch.float64))


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["autocast", "bfloat16", "bfloat16, whose states are detached"])
@pytest.mark.parametrize("name", SETTINGS)
def test_bfloat16_trains_with_gradients_computed_in_float32(name: str, way: str) -> None:
    if way == "autocast" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("the library has no bfloat16 LSTM for this processor")
    layer = nn.LSTM(8, 16, **SETTINGS[name])
    model = Truncated(layer, "states") if "detached" in way else layer
    x = torch.randn((3, 6, 8) if layer.batch_first else (6, 3, 8))
    if way != "autocast":
        model, x = model.bfloat16(), x.bfloat16()
    exact = copy.deepcopy(model).double()
    exact(x.double())[0].square().sum().backward()
    fused = fuse.compile(copy.deepcopy(model))
    for run in (fused, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            result = run(x)[0]
        result.square().sum().backward()
    assert fused.last_run.fallbacks == ()
    for mine, eager, true in zip(fused.parameters(), model.parameters(), exact.parameters(), strict=True):
        assert mine.grad.dtype == eager.grad.dtype
        error, others = ((p.grad.double() - true.grad).norm() for p in (mine, eager))
        assert error <= 1.5 * others + 1e-3 * true.grad.norm()


@pytest.mark.parametrize("layer", LAYERS)
def test_halves_train_without_the_library_which_takes_them_in_inference_only(layer: type[nn.RNNBase]) -> None:
    model, x = layer(8, 16).half(), torch.randn(6, 3, 8).half()
    assert_trains(model, x)
    assert check(model, (x,)).passed


@pytest.mark.parametrize("layer", LAYERS)
def test_dropout_between_layers_draws_eagers_numbers(layer: type[nn.RNNBase]) -> None:
    model, x = layer(8, 16, 3, dropout=0.5), torch.randn(6, 3, 8)
    other, fused = copy.deepcopy(model), fuse.compile(model)
    for seed in range(3):
        torch.manual_seed(seed)
        mine = fused(x)[0]
        torch.manual_seed(seed)
        theirs = other(x)[0]
        torch.testing.assert_close(mine, theirs)
        mine.square().sum().backward()
        theirs.square().sum().backward()
        assert fused.last_run.fallbacks == ()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_steps_of_an_optimizer_are_eagers(layer: type[nn.RNNBase], packed: bool) -> None:
    model = layer(8, 16, bidirectional=True)
    args: tuple[Any, ...] = (torch.randn(6, 3, 8), *([torch.tensor([4, 6, 2])] if packed else []))
    whole = Packed(model) if packed else model
    other, fused = copy.deepcopy(whole), fuse.compile(whole)
    steps = [(run, torch.optim.SGD(run.parameters(), 0.1)) for run in (fused, other)]
    for _ in range(4):
        losses = []
        for run, optimizer in steps:
            optimizer.zero_grad()
            loss = run(*args)[0].square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        assert fused.last_run.fallbacks == ()
    for a, b in zip(whole.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


# ---- packed --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("layer", LAYERS)
def test_packed_sequences_train_as_loops(layer: type[nn.RNNBase], name: str) -> None:
    model = Packed(layer(8, 16, **SETTINGS[name]))
    x = torch.randn(6, 4, 8, requires_grad=True)
    assert_trains(model, x.transpose(0, 1).detach() if model.layer.batch_first else x, torch.tensor([3, 6, 1, 6]))


@pytest.mark.parametrize("layer", [*LAYERS, nn.RNN, lambda *sizes: nn.RNN(*sizes, nonlinearity="relu")])
def test_packed_sequences_run_as_loops(layer: Callable[..., nn.RNNBase]) -> None:
    model = Packed(layer(8, 16), is_sorted=True).eval()
    with torch.no_grad():
        report = check(model, (torch.randn(6, 3, 8), torch.tensor([6, 4, 4])))
    assert report.passed, report
    assert report.fallbacks == ()


def test_packed_sequences_start_from_given_states_and_are_padded_as_asked() -> None:
    for layer in LAYERS:
        model = Packed(layer(8, 16, bidirectional=True), total=9, padding=-1.5)
        assert_trains(model, torch.randn(6, 3, 8), torch.tensor([5, 2, 3]), states_of(model.layer, 3))


def test_what_lies_behind_the_end_of_a_sequence_does_not_matter() -> None:
    model, lengths, x = Packed(nn.LSTM(8, 16)), torch.tensor([5, 2]), torch.randn(6, 2, 8)
    spoiled = x.clone()
    spoiled[2:, 1] = float("nan")
    spoiled[5:] = float("inf")
    fused = fuse.compile(model)
    found = []
    for one in (x, spoiled):
        model.zero_grad()
        y = fused(one, lengths)[0]
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in model.parameters())])
    assert fused.last_run.fallbacks == ()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_other_lengths_are_the_same_program() -> None:
    model, x = Packed(nn.GRU(8, 16)), torch.randn(6, 3, 8)
    fused = fuse.compile(model)
    programs = []
    for lengths in ([6, 2, 3], [1, 6, 6], [6, 6, 6]):
        torch.testing.assert_close(fused(x, torch.tensor(lengths))[0], model(x, torch.tensor(lengths))[0])
        programs.append(fused.compiled)
    assert programs[0] is programs[1] is programs[2]


def test_launches_do_not_depend_on_lengths_and_eagers_are_counted_as_it_runs() -> None:
    reports = [
        fuse.show(Packed(nn.LSTM(8, 16)), (torch.randn(9, 3, 8), torch.tensor(lengths)), train=True)
        for lengths in ([9, 5, 4], [9, 9, 9])
    ]
    assert reports[0].after.launches == reports[1].after.launches
    assert reports[0].before.launches > reports[1].before.launches  # eager narrows the state where a sequence ends


class ReadsRows(nn.Module):
    """Looks at the rows of a packed sequence, whose number follows from the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 16)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return self.layer(PackedSequence(packed.data * 2, *packed[1:]))[0].data


DECLINED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rows are read": (ReadsRows, "a packed sequence is read at"),
    "dropout draws a number a row": (
        lambda: Packed(nn.GRU(8, 16, 2, dropout=0.5)),
        "draws a random number for each row in its dropout",
    ),
    "projections": (lambda: Packed(nn.LSTM(8, 16, proj_size=4)), "has projections"),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", DECLINED)
def test_what_masks_cannot_say_runs_eager_with_the_reason(name: str) -> None:
    make, reason = DECLINED[name]
    model, x, lengths = make(), torch.randn(6, 3, 8), torch.tensor([4, 6, 2])
    fused = fuse.compile(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(3)
        mine = fused(x, lengths)
    torch.manual_seed(3)
    torch.testing.assert_close(mine, model(x, lengths), rtol=0, atol=0)
    assert len(caught) == 1
    assert reason in fused.last_run.fallbacks[0].reason


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lengths", [[2, 4, 6], [6, 3, 0], [7, 3, 1]])
def test_lengths_that_eager_refuses_raise_as_eager(lengths: list[int]) -> None:
    model, x = Packed(nn.GRU(8, 16), is_sorted=True), torch.randn(6, 3, 8)
    fused = fuse.compile(model)
    fused(x, torch.tensor([6, 3, 1]))
    with pytest.raises(RuntimeError) as theirs:
        model(x, torch.tensor(lengths))
    with pytest.raises(RuntimeError) as mine:
        fused(x, torch.tensor(lengths))
    assert str(mine.value) == str(theirs.value)


@given(
    layer=st.sampled_from(LAYERS),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    units=st.integers(1, 17),
    layers=st.integers(1, 2),
    both=st.booleans(),
    turned=st.booleans(),
)
@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_any_lengths(
    layer: type[nn.RNNBase], lengths: list[int], units: int, layers: int, both: bool, turned: bool
) -> None:
    model = Packed(layer(5, units, layers, bidirectional=both, batch_first=turned))
    x = torch.randn(*((len(lengths), 7) if turned else (7, len(lengths))), 5, requires_grad=True)
    assert_trains(model, x, torch.tensor(lengths))
