"""Traces that torch 2.11 and 2.13 wrote, of an LSTM loop of eight steps, and of what this machine runs now.

Those in ``traces/`` are of ``models/lstm_loop.py`` with ``seq_length = 8``. The events of a GPU below are written by
hand, in the format that PyTorch's profiler documents and writes: no trace of one is checked in.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fuse
from fuse import cli
from fuse.check.oracle import check
from fuse.cost.count import by_source
from fuse.errors import FuseError
from fuse.graph.loading.load import LoadedModel, load
from fuse.report.tracing import trace_events
from fuse.report.tracing.trace_launches import kind_of_kernel
from fuse.report.tracing.trace_report import compare, trace

HERE = Path(__file__).parent
MODEL = str(HERE.parents[1] / "models" / "lstm_loop.py")
VERSIONS = ["2.11", "2.13"]


def written(version: str, which: str) -> Path:
    return HERE / "traces" / f"lstm_{which}_torch_{version}.json.gz"


@pytest.mark.parametrize("version", VERSIONS)
def test_launches_of_eager_are_those_that_capture_counts_kind_by_kind_and_line_by_line(version: str) -> None:
    loaded = load(MODEL, settings=["seq_length=8"])
    report = trace(written(version, "eager"), loaded, "lstm_loop.py")
    shown = fuse.show(loaded.model, loaded.args)
    assert report.launches == shown.before.launches == 99
    assert {share.name: share.launches for share in report.by_kind} == shown.before.by_kind
    assert {share.name: share.launches for share in report.by_line} == {
        line.source: line.before for line in shown.lines if line.before
    }
    assert report.formula == "3 + 12*T with T = 8"
    assert report.unknown == ()
    assert report.rewritten is not None
    assert (report.rewritten.calls, report.rewritten.before, report.rewritten.after) == (1, 99, 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_without_the_model_a_line_is_where_the_function_begins(version: str) -> None:
    report = trace(written(version, "eager"))
    assert [(share.name, share.launches) for share in report.by_line] == [("lstm_loop.py:32", 99)]
    assert 0 < report.busy < report.span
    assert report.gaps == 98


@pytest.mark.parametrize("version", VERSIONS)
def test_a_launch_of_fuse_stands_there_by_name_and_line(version: str) -> None:
    report = trace(written(version, "fused"))
    assert [(share.name, share.launches) for share in report.by_kind] == [("loop", 1)]
    assert [(share.name, share.launches) for share in report.by_line] == [("lstm_loop.py:38", 1)]


class Mixed(nn.Module):
    """Products, norms, a convolution whose operator fuse calls from Python, a loop, and a result that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        h = x
        for _ in range(5):
            h = torch.tanh(self.first(h)) * torch.sigmoid(self.second(x))
        ordered = torch.sort(self.norm(h), dim=-1).values
        return ordered.cumsum(0).reshape(-1)[:7] + seen


def profiled(model: nn.Module, arguments: tuple[Any, ...], path: Path) -> Path:
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], with_stack=True) as recorded:
        model(*arguments)
    recorded.export_chrome_trace(str(path))
    return path


@pytest.mark.parametrize("target", ["lstm_loop", "mlp", "mixed"])
def test_a_profile_has_the_launches_that_check_observes(target: str, tmp_path: Path) -> None:
    if target == "mixed":
        model: nn.Module = Mixed().eval()
        arguments: tuple[Any, ...] = torch.randn(4, 8), torch.zeros(7)
    else:
        loaded = load(str(Path(MODEL).with_stem(target)), real=True)
        model, arguments = loaded.model, loaded.args
    observed = check(model, arguments)
    file = profiled(model, arguments, tmp_path / "eager.json")
    eager = trace(file, LoadedModel(model, arguments, {}, (), "Model"))
    assert eager.launches == observed.observed[0]
    assert {share.name: share.launches for share in eager.by_line} == {
        line.source: line.before for line in fuse.show(model, arguments).lines if line.before
    }
    fused = fuse.compile(model)
    with torch.no_grad():
        fused(*arguments)
    after = trace(profiled(fused, arguments, tmp_path / "fused.json.gz"))
    assert after.launches == fused.last_run.launches == observed.observed[1]
    expected = by_source(fuse.show(model, arguments).graph)
    assert {share.name: share.launches for share in after.by_line} == {
        source.rpartition("/")[2]: count for source, count in expected.items()
    }


def test_nothing_is_recorded_while_no_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuse.runtime.programs import program

    def fail(_title: str) -> None:
        raise AssertionError

    monkeypatch.setattr(program, "_RecordFunctionFast", fail)
    fused = fuse.compile(nn.Linear(3, 2))
    with torch.no_grad():
        assert fused(torch.zeros(4, 3)).shape == (4, 2)


def test_bench_writes_a_trace_with_a_part_for_each_contender(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json.gz"
    assert cli.run(["bench", MODEL, "--set", "seq_length=8", "--seconds", "0.01", "--profile", str(path)]) == 0
    said = capsys.readouterr().err
    assert f"fuse: wrote {path}; next: fuse trace {path} --model {MODEL}" in said
    parts = {part.name: part for part in trace(path).parts}
    assert {name: part.launches for name, part in parts.items()} == {"eager": 99, "fused": 1}
    assert cli.run(["trace", str(path), "--model", MODEL, "--set", "seq_length=8"]) == 0
    out = capsys.readouterr().out
    assert f"{MODEL}: 1 call of 99 launches in the trace; fuse's passes make 1 of each" in out
    assert "3 + 12*T with T = 8" in out


def test_a_model_that_is_not_in_the_trace_is_told_by_the_first_difference() -> None:
    longer = trace(written("2.13", "eager"), load(MODEL, settings=["seq_length=9"]), "lstm_loop.py")
    assert longer.rewritten is not None
    assert longer.rewritten.calls == 0
    assert longer.rewritten.obstacle.startswith("98 of its 111 launches are in the trace, and then not aten::addmm at")


def test_two_traces_are_compared_by_kind_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = trace(written("2.13", "eager")), trace(written("2.13", "fused"))
    changes = compare(first, second)
    assert changes["launches"] == [99, 1]
    assert changes["by_kind"]["pointwise"][0] == [80, 0]
    assert changes["by_line"]["lstm_loop.py:38"][0] == [0, 1]
    assert compare(first, first)["by_kind"] == {}
    files = [str(written("2.13", which)) for which in ("eager", "fused")]
    assert cli.run(["trace", files[0], "--against", files[1], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["launches"] == [99, 1]
    assert cli.run(["trace", files[0], "--against", files[1]]) == 0
    assert "  pointwise" in capsys.readouterr().out


def test_the_report_is_plain_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["trace", str(written("2.13", "eager")), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema_version"] == 1
    assert report["launches"] == 99
    assert report["formula"] == "3 + 12*T with T = 8"


def event(category: str, name: str, start: float, duration: float, where: object = 1, **args: object) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": where, "args": args,
    }  # fmt: skip


def on_gpu() -> list[dict[str, Any]]:
    """Two steps: each an addmm of two kernels, a tanh, and a kernel of which nobody knows; then a copy."""
    made = []
    for step in range(2):
        t, e = 100.0 * step, 10 * step
        made += [
            event("user_annotation", f"ProfilerStep#{step}", t, 90),
            event("python_function", "model.py(7): forward", t, 80),
            event("cpu_op", "aten::linear", t + 1, 20, **{"External id": e + 1}),
            event("cpu_op", "aten::addmm", t + 2, 18, **{"External id": e + 2}),
            event("cuda_runtime", "cudaLaunchKernel", t + 3, 5, correlation=e + 2),
            event("kernel", "splitKreduce_kernel", t + 20, 4, 7, **{"External id": e + 2}),
            event("kernel", "ampere_sgemm_32x32", t + 10, 9, 7, **{"External id": e + 2}),
            event("cpu_op", "aten::tanh", t + 25, 5, **{"External id": e + 3}),
            event("kernel", "vectorized_elementwise_kernel", t + 30, 30, 7, **{"External id": e + 3}),
            event("kernel", "mine", t + 70, 20, 7),
        ]
    return [*made, event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 200, 2, 7)]


def test_on_a_gpu_its_kernels_are_the_launches(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": on_gpu()}))
    report = trace(path)
    assert report.on_device
    assert {share.name: share.launches for share in report.by_kind} == {
        "gemm": 4, "pointwise": 2, "movement": 1, "other": 2,
    }  # fmt: skip
    assert {share.name: share.launches for share in report.by_line} == {"model.py:7": 6}
    assert report.unknown == ("mine",)
    assert (report.tiny.launches, report.busy, report.span) == (5, 128.0, 192.0)
    assert report.launching == 10.0
    assert report.steps == 2
    assert "2 steps of the profiler, 4.5 launches each" in str(report)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cudnn::winograd_nonfused::winogradForwardData4x4", "convolution"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp>", "reduction"),
        ("triton_poi_fused_add_tanh_0", "pointwise"),
        ("triton_per_fused_native_layer_norm_3", "reduction"),
        ("nvjet_tst_64x8_64x16_1x2_h_bz_TNT", "gemm"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy", "movement"),
        ("void at::native::distribution_elementwise_grid_stride_kernel", "random"),
        ("cudnn_ampere_scudnn_128x64_relu_xregs_large_nn_v1", "convolution"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>", "movement"),
        ("void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>", "reduction"),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float>", "reduction"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>>", "pointwise"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", None),
        ("kernel_of_someone", None),
    ],
)
def test_kernels_that_no_operator_is_known_of_are_told_by_their_names(name: str, kind: str | None) -> None:
    assert kind_of_kernel(name) == kind


def test_operators_of_libraries_that_are_not_here_are_named_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([event("cpu_op", "my_library::op", 0, 5), event("cpu_op", "aten::t", 7, 1)]))
    report = trace(path)
    assert (report.launches, report.unknown) == (1, ("my_library::op",))


def test_operators_with_overloads_that_cannot_be_called_are_known(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([event("cpu_op", "aten::to", 0, 9), event("cpu_op", "aten::_to_copy", 1, 7)]))
    assert [(one.name, one.known) for one in trace(path).read] == [("aten::_to_copy", True)]


def test_long_traces_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [event("cpu_op", "aten::tanh", 10 * i, 5, note="]}" + "x" * (i % 50)) for i in range(3000)]
    text = json.dumps({"before": "y" * 1000, "traceEvents": many, "after": [1, 2]}, indent=1)
    path = tmp_path / "long.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(trace_events, "_CHUNK", 64)
    report = trace(path)
    assert report.launches == 3000
    assert Counter(one.name for one in report.read) == {"aten::tanh": 3000}
    assert report.formula == "0 + 1*T with T = 3,000"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{}", "has no traceEvents"),
        (b"", "has no traceEvents"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph"', "cut off"),
        (b"\x1f\x8b\x08\x00broken", "cannot read"),
        (b"\xff\xfe\x00", "cannot read"),
    ],
)
def test_files_that_are_no_traces_are_named_in_one_line(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "no.json"
    path.write_bytes(content)
    with pytest.raises(FuseError, match=problem):
        trace(path)
    with pytest.raises(FuseError, match="cannot read"):
        trace(tmp_path / "missing.json")


def test_an_empty_trace_has_no_launches(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"traceEvents": []}')
    assert trace(path).launches == 0
    assert "no launch ran" in str(trace(path))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["bench", MODEL, "--profile", "out.txt"], ".json or .json.gz"),
        (["bench", MODEL, "--profile", "o.json", "--scan", "seq_length=1:2:+1"], "leave one of the two flags out"),
        (["trace", "t.json", "--set", "a=1"], "--model"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    assert problem in capsys.readouterr().err
