"""The report of ``show``: its figures, its JSON and its table."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fuse
from fuse.cost.observe import CountingMode
from fuse.errors import FaultWarning, FuseError
from fuse.report.columns import as_text, columns, scaled
from fuse.rewrite import registry
from fuse.rewrite.verdict import Verdict, rewrite

COUNT_KEYS = [
    *("launches", "by_kind", "small_ops", "nodes", "flops", "bytes", "peak_bytes"),
    *("modelled_seconds", "launching_seconds"),
]


class Duplicates(nn.Module):
    """Computes tanh twice, so that one pass fires once."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + torch.tanh(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(2, 4)
        for t in range(8):
            h = torch.tanh(self.project(h) + x[:, t])
        return self.drop(h)


def test_json_has_exactly_the_documented_keys() -> None:
    values = fuse.show(Recurrent().eval(), (torch.ones(2, 8, 4),), target="m.py").to_dict()
    assert list(values) == [
        "schema_version",
        "target",
        "device",
        "torch",
        "passes",
        "before",
        "after",
        "loops",
        "fired",
        "rejected",
        "failed",
        "held",
        "unknown_ops",
        "reads",
        "fallbacks",
        "seconds",
    ]
    assert list(values["before"]) == list(values["after"]) == COUNT_KEYS
    (loop,) = values["loops"]
    assert list(loop)[:4] == ["trip_count", "launches_per_step_before", "launches_per_step_after", "source"]
    assert list(values["seconds"]) == ["capture", "passes"]
    assert json.loads(json.dumps(values)) == values


def test_launches_before_are_eagers_and_a_pass_that_fires_saves_what_it_says() -> None:
    report = fuse.show(Duplicates(), (torch.ones(4),), passes=["common_subexpressions"])
    assert (report.before.launches, report.after.launches) == (3, 2)
    assert [(one.pass_name, one.count, one.launches_saved) for one in report.fired] == [("common_subexpressions", 1, 1)]
    assert report.to_dict()["passes"] == ["common_subexpressions"]


def test_a_pass_that_fails_is_reported_and_the_others_count() -> None:
    @registry.register_pass(stage="clean", before="common_subexpressions", enabled=False)
    def crash(graph: GraphModule) -> Iterator[Verdict]:
        node = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)[0]
        yield rewrite(node, lambda: graph.meta["missing"])

    try:
        with pytest.warns(FaultWarning):
            report = fuse.show(Duplicates(), (torch.ones(4),), passes=["crash", "common_subexpressions"])
    finally:
        registry.unregister("crash")
    assert (report.before.launches, report.after.launches) == (3, 2)
    values = report.to_dict()
    assert values["passes"] == ["common_subexpressions"]
    (failed,) = values["failed"]
    assert (failed["pass"], failed["reason"]) == ("crash", "KeyError: 'missing'")
    assert failed["source"].startswith("test_show.py:")
    assert "pass 'crash'" in str(report)
    assert "was left out: KeyError: 'missing'" in str(report)


def test_without_fuel_nothing_fires() -> None:
    report = fuse.show(Duplicates(), (torch.ones(4),), fuel=0)
    assert report.fired == ()
    assert report.after.launches == 3
    assert "fired: nothing" in str(report)


def test_lines_are_the_users_with_the_most_expensive_first() -> None:
    report = fuse.show(Recurrent().eval(), (torch.ones(2, 8, 4),), passes=[])
    assert [line.before for line in report.lines] == [24, 1]
    assert all(line.source.startswith("test_show.py:") for line in report.lines)


def test_training_is_counted_forward_and_backward_apart() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    report = fuse.show(model, (torch.ones(3, 4),), train=True)
    assert report.backward is not None
    assert report.before.by_kind["gemm"] == 2
    assert report.backward.before.by_kind["gemm"] == 3  # the input needs no gradient
    assert report.launches_after == report.after.launches + report.backward.after.launches
    assert report.to_dict()["backward"]["before"]["launches"] == report.backward.before.launches
    assert "backward on cpu" in str(report)
    assert fuse.show(model, (torch.ones(3, 4),)).backward is None


def test_the_steps_of_optimizers_are_counted_for_the_parameters_that_get_gradients() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    report = fuse.show(model, (torch.ones(3, 4),), train=True)
    for name, made in (("SGD", torch.optim.SGD), ("AdamW", torch.optim.AdamW)):
        for way, options in (("loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
            more = {"momentum": 0.9} if name == "SGD" else {}
            optimizer = made([p for p in model.parameters() if p.requires_grad], lr=0.1, **options, **more)
            for _ in range(2):
                model(torch.ones(3, 4)).sum().backward()
                with CountingMode() as counting:
                    optimizer.step()
            assert report.optimizer[name][way] == counting.launches
    assert report.optimizer["AdamW"]["loop"] > report.optimizer["AdamW"]["foreach"] > report.optimizer["AdamW"]["fused"]
    assert report.to_dict()["optimizer"] == report.optimizer
    assert "optimizer: launches a step  loop  foreach  fused" in str(report)
    assert "optimizer" not in fuse.show(model, (torch.ones(3, 4),)).to_dict()


def test_training_mode_holds_for_the_capture_only() -> None:
    model = Recurrent().eval()
    model.project.train()
    plain = fuse.show(model, (torch.ones(2, 8, 4),), passes=[])
    trained = fuse.show(model, (torch.ones(2, 8, 4),), passes=[], train=True)
    assert trained.before.by_kind.get("random", 0) > plain.before.by_kind.get("random", 0) == 0
    assert (model.training, model.drop.training, model.project.training) == (False, False, True)


def test_an_unknown_device_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(FuseError, match="did you mean 'h200'"):
        fuse.show(nn.Tanh(), (torch.ones(1),), device="h20")


def test_the_table_says_predicted_and_ends_with_the_next_command() -> None:
    text = str(fuse.show(Recurrent().eval(), (torch.ones(2, 8, 4),), target="models/cell.py"))
    assert "predicted" in text.splitlines()[0]
    assert "next: fuse check models/cell.py" in text.splitlines()[-1]
    assert "!" not in text


def test_columns_of_figures_are_aligned_at_the_right() -> None:
    lines = str(fuse.show(Duplicates(), (torch.ones(4),), passes=[])).splitlines()
    heading = next(line for line in lines if line.startswith("predicted"))
    launches = next(line for line in lines if line.startswith("launches"))
    assert launches.index("3") == heading.index("before") + len("before") - 1
    assert not any(line.endswith(" ") for line in lines)


def test_text_from_a_model_is_never_read_as_markup() -> None:
    assert "[red]x[/red]" in as_text(columns(["reason"], [["[red]x[/red]"]], numbers_from=1))


def test_colour_codes_appear_only_on_request() -> None:
    table = columns(["reason"], [["x"]])
    assert "\x1b[1m" in as_text(table, color=True)
    assert "\x1b" not in as_text(table)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_999, "1.00 MB"), (12_345, "12.3 kB")]
)
def test_large_figures_have_three_digits(value: int, text: str) -> None:
    assert scaled(value, "B") == text


def test_a_tensor_in_place_of_the_tuple_of_arguments_is_told() -> None:
    with pytest.raises(FuseError, match=r"^the arguments of a call are of type Tensor; give a tuple, such as \(x,\)"):
        fuse.show(nn.Linear(4, 4), torch.ones(2, 4))  # type: ignore[arg-type]  # the mistake


def test_what_a_training_step_holds_is_told():
    class Gated(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            z = torch.sigmoid(x)
            return (1 - z) * torch.tanh(h) + z * x

    size = 4 * 64 * 64
    report = fuse.show(Gated(), tuple(torch.ones(64, 64, requires_grad=True) for _ in range(2)), train=True)
    assert report.step_memory is not None
    assert report.step_memory.saved == 2 * size  # sigmoid and tanh: 1 - z is computed again
    assert report.step_memory.after == 6 * size  # x, z, tanh and the gradient of the result; gradients of both
    assert report.step_memory.before > report.step_memory.after
    assert report.to_dict()["step_memory"]["saved"] == 2 * size
    assert "32.8 kB saved for the backward pass" in str(report)


def test_time_is_modelled_for_a_device_that_is_named() -> None:
    report = fuse.show(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(2, 4),), device="ascend910")
    assert "time modelled for ascend910, ms" in str(report)
    assert report.after.modelled_seconds <= report.before.modelled_seconds
    assert "modelled for" not in str(fuse.show(nn.Linear(4, 4), (torch.ones(2, 4),)))
