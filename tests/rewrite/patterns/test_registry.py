from __future__ import annotations

import json
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
import torch

import fuse
from fuse import cli, verbs
from fuse.errors import FuseError
from fuse.rewrite import installed
from fuse.rewrite.patterns import registry

FILE = """
    import torch
    import fuse

    @fuse.pattern
    def swish(x):
        "x * sigmoid(x)"
        return x * torch.sigmoid(x)

    @fuse.pattern(priority=2)
    class Other:
        def pattern(self, x):
            return torch.exp(torch.sin(x))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(FILE))
    return path


def test_registering_gives_the_function_back(registered):
    @registered
    def twice(x):
        """2 * tanh(x)"""
        return torch.tanh(x) * 2

    assert twice(torch.zeros(1)) == 0
    pattern = registry.find("twice")
    assert (pattern.summary, pattern.enabled, pattern.priority) == ("2 * tanh(x)", True, 0)
    assert pattern.source.startswith("test_registry.py:")


def test_defining_again_in_the_same_module_replaces(registered):
    for number in (1, 2):

        @registered(priority=number)
        def again(x):
            return torch.tanh(x) * 2

    assert registry.find("again").priority == 2


def test_a_name_of_another_module_is_taken(registered):
    def taken(x):
        return torch.tanh(x) * 2

    registered(taken)
    taken.__module__ = "elsewhere"
    with pytest.raises(FuseError, match=r"pattern 'taken' is registered twice, by .* and by elsewhere"):
        registered(taken)


def test_an_unknown_name_is_an_error_with_a_suggestion(registered):
    @registered
    def swish(x):
        return x * torch.sigmoid(x)

    with pytest.raises(FuseError, match=r"no pattern 'swosh' \(did you mean 'swish'\?\)"):
        registry.find("swosh")


def test_a_file_is_run_and_leaves_nothing_registered(file):
    before = registry.registered()
    assert registry.load(file, "Other").priority == 2
    assert registry.load(file, "swish").summary == "x * sigmoid(x)"
    assert registry.registered() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, r"mine.py does not have exactly one pattern; choose one with FILE:Name \(it has swish, Other\)"),
        ("swosh", r"mine.py has no pattern 'swosh' \(it has swish, Other\)"),
    ],
)
def test_a_file_without_the_pattern_says_what_it_has(file, name, message):
    with pytest.raises(FuseError, match=message):
        registry.load(file, name)


def test_a_file_that_cannot_be_run_says_why(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("import no_such_module_anywhere")
    with pytest.raises(FuseError, match=r"wrong.py:1 cannot be run \(ModuleNotFoundError: No module named"):
        registry.load(path)
    path.write_text("x = 1\ndef pattern(:")
    with pytest.raises(FuseError, match=r"wrong.py:2 cannot be run \(SyntaxError: invalid syntax\)$"):
        registry.load(path)
    with pytest.raises(FuseError, match=r"^no file .*nowhere.py; 'fuse patterns' lists"):
        registry.load(tmp_path / "nowhere.py")


def test_a_broken_plugin_is_listed_and_harms_no_other(monkeypatch, capsys, registered):
    @registered
    def swish(x):
        "x * sigmoid(x)"
        return x * torch.sigmoid(x)

    entry = metadata.EntryPoint("crooked", "no_such_module_anywhere:patterns", "fuse.patterns")
    monkeypatch.setattr(installed, "entry_points", lambda group: [entry])
    monkeypatch.setattr(registry._installed, "_broken", None)
    assert cli.run(["patterns", "--json"]) == verbs.GOOD
    printed = capsys.readouterr()
    listed = json.loads(printed.out)
    assert "swish" in [one["name"] for one in listed["patterns"]]
    assert listed["broken"] == [
        {
            "name": "crooked",
            "origin": "no_such_module_anywhere:patterns",
            "error": "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
        }
    ]
    assert "warning: plugin crooked of no_such_module_anywhere:patterns does not load" in printed.err


def test_patterns_are_listed_by_priority(capsys, registered):
    def one(x):
        """exp(x) * 2"""
        return torch.exp(x) * 2

    def other(x):
        """exp(x) * 3"""
        return torch.exp(x) * 3

    registered(one)
    registered(priority=5)(other)
    assert cli.run(["patterns"]) == verbs.GOOD
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["pattern", "from", "is"]
    names = [line.split()[0] for line in lines[1:] if not line.startswith(" ")]
    assert [name for name in names if name in ("one", "other")] == ["other", "one"]
    assert names[0] == "other"
    assert "CrossEntropy" in names


def test_a_disabled_pattern_does_not_run(registered):
    @registered(enabled=False)
    def swish(x):
        return x * torch.sigmoid(x)

    report = fuse.show(torch.nn.SiLU(), (torch.randn(3),), passes=["match_patterns"])
    assert report.fired == ()
    assert report.rejected == ()


MODEL = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x) @ x
def get_init_inputs(): return []
def get_inputs(): return [torch.randn(4, 4)]
"""


def test_a_file_of_patterns_is_matched_by_the_verbs_for_as_long_as_they_run(file, tmp_path, capsys):
    before = registry.registered()
    (tmp_path / "model.py").write_text(MODEL)
    for verb in ("show", "check"):
        given = [verb, str(tmp_path / "model.py"), "--patterns", f"{file}:swish", "--json"]
        assert cli.run(given) == verbs.GOOD
        report = json.loads(capsys.readouterr().out)
        if verb == "show":
            said = [one["pattern"] for one in (*report["fired"], *report["rejected"])]
            assert "swish" in said
            assert "Other" not in said
    assert registry.registered() == before


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("swish", "no pattern 'swish'"),
        ("FILE:swosh", "has no pattern 'swosh'"),
        ("no_such_file.py", "no file no_such_file.py"),
    ],
)
def test_a_file_without_the_pattern_is_an_error(file, tmp_path, capsys, given, reason):
    (tmp_path / "model.py").write_text(MODEL)
    arguments = ["show", str(tmp_path / "model.py"), "--patterns", given.replace("FILE", str(file))]
    assert cli.run(arguments) == cli.ERROR
    assert reason in capsys.readouterr().err


def test_a_name_that_is_taken_is_an_error(file, registered):
    @registered
    def swish(x):
        return x * torch.sigmoid(x)

    with pytest.raises(FuseError, match="a pattern 'swish' is installed already"), registry.also([str(file)]):
        pass
