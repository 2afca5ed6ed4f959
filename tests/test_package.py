"""The package is whole wherever Python finds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_python_started_in_a_clone_finds_the_passes_beside_the_package(tmp_path: Path) -> None:
    for folder in ("fuse", "passes"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    question = "import fuse; print(fuse.__file__, fuse.passes.__file__)"
    asked = subprocess.run([sys.executable, "-c", question], cwd=tmp_path, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    package, passes = asked.stdout.split()
    assert package == str(tmp_path / "fuse" / "__init__.py")
    assert passes == str(tmp_path / "passes" / "__init__.py")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which the package lies as it does once installed."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "fuse", site / "fuse", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "passes", site / "fuse" / "passes", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "models", site / "fuse" / "models", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "torch_fuse.py", site)
    return site


def command(path: list[Path], *arguments: str, start: str = "-m torch_fuse") -> subprocess.CompletedProcess[str]:
    """The command in an empty folder, with these folders first on the path, and without numpy."""
    folder = path[-1].parent
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "blocked").mkdir(exist_ok=True)
    (folder / "blocked" / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy', name='numpy')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, folder / "blocked"]))}
    line = [sys.executable, *start.split(), *arguments]
    return subprocess.run(line, cwd=folder / "empty", env=environment, capture_output=True, text=True)


def test_the_first_command_in_an_empty_folder_prints_a_table_and_nothing_of_torchs(installed: Path) -> None:
    made = command([installed], "example", "lstm_loop", "-o", "lstm.py")
    assert made.stderr == "fuse: wrote lstm.py; next: fuse show lstm.py\n"
    shown = command([installed], "show", "lstm.py", "--quiet")
    assert shown.returncode == 0
    assert shown.stderr == ""
    assert "launches                771        1        -770" in shown.stdout


def test_all_examples_are_listed_and_an_unknown_one_is_named(installed: Path) -> None:
    listed = command([installed], "example")
    assert {path.stem for path in (ROOT / "models").glob("*.py")} <= set(listed.stdout.split())
    unknown = command([installed], "example", "lstmloop")
    assert unknown.returncode == 2
    assert unknown.stderr == "fuse: error: there is no example 'lstmloop'; did you mean 'lstm_loop'?\n"


@pytest.mark.parametrize("name", ["fuse.py", "fuse/__init__.py"])
def test_another_module_that_python_finds_first_is_named(installed: Path, tmp_path: Path, name: str) -> None:
    other = tmp_path / "other" / name
    other.parent.mkdir(parents=True)
    other.write_text("raise RuntimeError('not ours')")
    done = command([tmp_path / "other", installed], "--version")
    assert done.returncode == 2
    assert done.stderr.startswith(f"fuse: error: {other} is another module called fuse, which Python finds before")
    assert done.stderr.count("\n") == 1


def test_a_package_that_was_installed_over_this_one_is_named(installed: Path) -> None:
    (installed / "fuse" / "__init__.py").write_text('"""Bindings of a file system."""')
    done = command([installed], "--version")
    assert done.returncode == 2
    assert "is another module called fuse" in done.stderr


def test_a_module_that_this_one_hides_is_named_and_the_command_runs(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "fuse.py").write_text("")
    done = command([installed, tmp_path / "later"], "--version")
    assert done.returncode == 0
    assert done.stderr.startswith(f"fuse: warning: {tmp_path / 'later' / 'fuse.py'} is another module called fuse")
    assert done.stdout.startswith("fuse, version")


def test_python_m_fuse_is_the_command_and_names_another_program_of_its_name(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    plain = command([installed], "--version", start="-m fuse")
    assert (plain.stderr, plain.returncode) == ("", 0)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "fuse").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "fuse").chmod(0o755)
    other = command([installed], "--version", start="-m fuse")
    assert other.stderr == (
        f"fuse: warning: the command {tmp_path / 'bin' / 'fuse'} is another program; python -m fuse is this one\n"
    )
    assert other.stdout == plain.stdout
