"""The command: statuses, streams, flags; the figures themselves are tested where they are made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuse import cli

MODEL = """
import torch

steps = 4

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(steps):
            x = torch.tanh(self.linear(x)) + torch.tanh(self.linear(x))
        return x

def get_init_inputs():
    return []

def get_inputs():
    return [torch.rand(2, 8)]
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model file in an otherwise empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return "model.py"


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["passes", "--help"], ["show", "--help"], ["--version"]])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    done = python(f"import sys; from fuse import cli; sys.exit(cli.run({arguments}) or 'torch' in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("verb", ["show", "check", "bench"])
def test_help_says_that_the_file_runs_with_the_users_rights(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([verb, "--help"]) == 0
    assert "runs with your rights" in " ".join(capsys.readouterr().out.split())


def test_show_prints_a_table_on_stdout(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", model, "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("model.py on cpu, predicted\n")
    assert captured.out.rstrip().splitlines()[-1].startswith("next: fuse check model.py")
    assert captured.err == ""


def test_show_prints_json_that_a_constant_of_the_file_changes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", model, "--json", "--set", "steps=2"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["schema_version"], values["target"], values["before"]["launches"]) == (2, "model.py", 10)


def test_passes_are_selected_and_ignored_by_name(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", model, "--json", "--select", "no_ops,dead_code", "--ignore", "no_ops"]) == 0
    assert json.loads(capsys.readouterr().out)["passes"] == ["dead_code"]


def test_without_fuel_nothing_fires(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", model, "--json", "--fuel", "0"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["fired"] == []
    assert values["after"]["launches"] == values["before"]["launches"] == 20


def test_a_result_file_takes_the_place_of_stdout(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", model, "--json", "-o", "out.json"]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(Path("out.json").read_text())["target"] == "model.py"


@pytest.mark.parametrize("suffix", ["dot", "svg", "html"])
def test_graphs_are_drawn_into_the_named_file(suffix: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", model, "--graph", f"out.{suffix}"]) == 0
    assert Path(f"out.{suffix}").stat().st_size > 1000
    assert f"wrote out.{suffix}" in capsys.readouterr().err


def test_kernels_are_printed_instead_of_the_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", model, "--kernels"]) == 0
    source = capsys.readouterr().out
    assert source.startswith("//")
    assert 'extern "C"' in source
    assert cli.run(["show", "--kernels", model]) == 0
    assert capsys.readouterr().out == source


def test_kernels_are_printed_in_the_ir(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", model, "--kernels=ir"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#")
    assert "kernel " in text
    assert " = load " in text
    assert 'extern "C"' not in text


def test_a_budget_that_is_exceeded_fails_and_says_why(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", model, "--max-launches", "1000"]) == 0
    assert cli.run(["show", model, "--max-launches", "1", "--fuel", "0"]) == 1
    assert "more than --max-launches 1" in capsys.readouterr().err


def test_an_increase_over_a_saved_report_fails(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    unfused = ["show", model, "--fuel", "0"]  # launches that grow with the steps
    assert cli.run([*unfused, "--json", "-o", "base.json"]) == 0
    assert cli.run([*unfused, "--fail-on-increase", "base.json"]) == 0
    assert cli.run([*unfused, "--fail-on-increase", "base.json", "--set", "steps=8"]) == 1
    assert "of base.json" in capsys.readouterr().err


def test_two_saved_reports_are_compared(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["show", model, "--json", "-o", "a.json", "--fuel", "0"])
    cli.run(["show", model, "--json", "-o", "b.json", "--fuel", "0", "--set", "steps=5"])
    assert cli.run(["diff", "a.json", "b.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["launches"] == [20, 25]


def test_check_passes_and_states_what_it_observed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", model, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["observed"]["before"] == 20
    assert 0 < values["observed"]["after"] <= 20
    assert values["fallbacks"] == []


def test_bench_measures_the_peers_that_were_asked_for(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", model, "--json", "--seconds", "0.05", "--against", "eager"]) == 0
    assert set(json.loads(capsys.readouterr().out)["ratios"]) == {"eager"}


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        ("check", ("--device", "v100")),
        ("bench", ("--fuel", "1")),
        ("bisect", ("--max-launches", "1")),
        ("explain", ("--train",)),
        ("precision", ("--train",)),
    ],
)
def test_a_verb_has_no_flag_that_it_would_ignore(
    verb: str, flags: tuple[str, ...], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([verb, model, *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_passes_are_listed_with_origin_and_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["passes", "--json"]) == 0
    installed = {one["name"]: one for one in json.loads(capsys.readouterr().out)["passes"]}
    assert installed["dead_code"]["origin"] == "fuse.passes.dead_code"
    assert installed["dead_code"]["stage"] == "clean"
    assert all(one["summary"] for one in installed.values())
    assert cli.run(["passes"]) == 0
    assert "dead_code" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "missing.py"], "missing.py"),
        (["show", "model.py:Modell"], "did you mean 'Model'"),
        (["show", "model.py", "--select", "dead_cod"], "did you mean 'dead_code'"),
        (["show", "model.py", "--device", "h20"], "did you mean 'h200'"),
        (["show", "not_even_loaded.py", "--graph", "out.png"], "must end in"),
        (["show", "model.py", "--fail-on-increase", "none.json"], "none.json"),
        (["show", "model.py", "--kernels", "--json"], "--kernels"),
        (["show", "model.py", "--kernels=ptx"], "'source', 'ir'"),
        (["show", "model.py", "--jason"], "--jason"),
        (["show"], "TARGET"),
        (["shwo"], "shwo"),
        (["model.py:Model"], "`fuse show model.py:Model` counts its launches"),
        (["bench", "model.py", "--against", "onnx", "--seconds", "0.01"], "no peer 'onnx'"),
        (["bench", "model.py", "--against", "tuned", "--seconds", "0.01"], "define `tuned`"),
    ],
)
def test_errors_are_one_line_on_stderr_with_status_two(
    arguments: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*arguments, "--quiet"] if len(arguments) > 1 else arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("fuse: error: ")
    assert message in line


def test_inputs_that_do_not_fit_are_one_line_without_the_log_of_torch(model: str) -> None:
    done = python(f"from fuse import cli; cli.main(['show', {model!r}, '--quiet', '--input', 'x=f32[2,3]'])")
    (line,) = done.stderr.splitlines()
    assert line.startswith("fuse: error: forward failed at model.py:")


def test_verbose_adds_the_traceback_even_when_it_comes_last(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", "missing.py", "-v"]) == 2
    captured = capsys.readouterr().err
    assert "Traceback (most recent call last)" in captured
    assert captured.splitlines()[-1].startswith("fuse: error: ")


def test_an_internal_error_is_one_line_too(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {}  # a function in this file would be the user's
    exec("def fail(*args, **kwargs): raise ZeroDivisionError('first\\nsecond')", names)
    monkeypatch.setattr("fuse.report.show.show", names["fail"])
    assert cli.run(["show", model, "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "fuse: error: internal error, ZeroDivisionError: first second; -v shows where"


MODEL_THAT_FAILS = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return {expression}

get_init_inputs = list
get_inputs = lambda: [torch.ones(2, 3, requires_grad=True)]
"""


@pytest.mark.parametrize("verb", ["check", "bench"])
@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("x @ x", "cannot be multiplied"),
        (
            "torch.autograd.grad(x.exp().sum(), x)[0]",
            "does not require grad.*; inference runs without gradients, --train",
        ),
        ("x.no_such_attribute", "no_such_attribute"),
    ],
)
def test_an_error_of_the_model_names_its_line(
    verb: str, expression: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failing.py").write_text(MODEL_THAT_FAILS.format(expression=expression))
    assert cli.run([verb, str(tmp_path / "failing.py"), "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"fuse: error: failing.py:7 raised \w+: .*{said}", line)


def test_an_interrupt_is_no_traceback(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fuse.graph.loading.load.load", interrupt)
    assert cli.run(["show", model]) == 130
    assert capsys.readouterr().err.strip() == "fuse: interrupted"


def test_settings_of_pyproject_are_defaults_that_flags_override(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text('[tool.fuse]\ndevice = "h200"\nselect = ["dead_code"]')
    assert cli.run(["show", model, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["device"], values["passes"]) == ("h200", ["dead_code"])
    assert cli.run(["show", model, "--json", "--device", "v100"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "v100"


def test_colour_is_for_those_who_ask(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.run(["show", model, "--color", "always"])
    assert "\x1b[1m" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    cli.run(["show", model])
    assert "\x1b" not in capsys.readouterr().out


def test_a_reader_that_closes_early_is_no_error(model: str) -> None:
    command = f"{sys.executable} -m fuse.cli show {model} --json | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_what_takes_long_is_said_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    import time

    from fuse.report.progress import stage

    with stage("thinking", patience=0.01):
        time.sleep(0.2)
    with stage("thinking again", patience=10.0):
        pass
    with stage("in silence", quiet=True, patience=0.01):
        time.sleep(0.05)
    assert capsys.readouterr().err == "fuse: thinking ...\n"


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("fuse")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout.startswith("fuse, version ")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parent.parent / "models").glob("*.py")), ids=lambda path: path.stem
)
def test_showing_a_model_prints_no_log_of_another_library(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", str(file), "--quiet"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert out.splitlines()[2].startswith("predicted")
