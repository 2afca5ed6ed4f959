"""Models that convert sizes by ``int``: a size stays symbolic, and nobody else sees that ``int`` was replaced."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import threading
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fuse
from fuse.runtime.size_uses import int_uses, unrecorded_uses
from tests.runtime.test_reaching import captures

WIDTH = 8
LENGTHS = 11, 27, 19, 31, 23, 14, 29, 17, 21, 25
MODEL = f"""
import torch
from torch import nn

class Converts(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear({WIDTH}, {WIDTH})
    def forward(self, x):
        steps, batch = map(int, x.shape[:2]), int(x.size(1))
        return self.one(x).reshape(int(x.shape[0]) * batch, {WIDTH}) / next(steps)
"""
AS_DTYPE = "def other(): return torch.zeros(1, dtype=int)\n"
AS_TYPE = "def other(): assert type(len('abc')) is int\n"
AS_TEXT = "def other(): assert int.__repr__(len('abc')) == '3' and int.__name__ == 'int'\n"
ASKED = "def other(n: int = 1) -> int: assert isinstance(n, (int, float)); return int.from_bytes(bytes(2), 'big')\n"

__all__ = ["captures"]  # a fixture


def module_of(tmp_path: Path, source: str) -> ModuleType:
    path = tmp_path / "model.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("a_users_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calls(model: nn.Module) -> None:
    """Calls of all lengths, with right results."""
    fused = fuse.compile(model)
    for length in LENGTHS:
        x = torch.randn(length, 3, WIDTH)
        torch.testing.assert_close(fused(x), model(x))
        assert not fused.last_run.fallbacks


def of_lengths(captures: list[tuple[int, ...]]) -> int:
    return len([size for size in captures if size[0] in LENGTHS])


@pytest.mark.parametrize("other", [AS_DTYPE, AS_TYPE, AS_TEXT, ASKED])
def test_other_threads_run_code_of_the_module_meanwhile(
    other: str, tmp_path: Path, captures: list[tuple[int, ...]]
) -> None:
    module = module_of(tmp_path, MODEL + other)
    done, failed, interval = threading.Event(), list[Exception](), sys.getswitchinterval()

    def run() -> None:
        while not done.is_set() and not failed:
            try:
                module.other()
            except Exception as error:
                failed.append(error)

    thread = threading.Thread(target=run)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        calls(module.Converts())
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failed
    assert of_lengths(captures) == (2 if other is ASKED else len(LENGTHS))
    assert "int" not in vars(module)


@pytest.mark.usefixtures("captures")
def test_containers_that_forward_fills_keep_pythons_int(tmp_path: Path) -> None:
    source = MODEL.replace("        steps,", "        self.made = collections.defaultdict(int)\n        steps,")
    model = module_of(tmp_path, "import collections\n" + source).Converts()
    calls(model)
    assert model.made.default_factory is int


@pytest.mark.parametrize("other", [AS_DTYPE, ASKED])
def test_cells_of_a_notebook_share_their_names(other: str, captures: list[tuple[int, ...]]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate((MODEL, other)):
        file = f"<cell {number} {hash(other)}>"
        linecache.cache[file] = len(cell), None, cell.splitlines(keepends=True), file
        exec(compile(cell, file, "exec"), names)
    calls(names["Converts"]())
    assert of_lengths(captures) == (2 if other is ASKED else len(LENGTHS))


def test_code_without_a_source_is_captured_at_its_sizes(captures: list[tuple[int, ...]]) -> None:
    names: dict[str, Any] = {"__name__": "made_up"}
    exec(MODEL, names)
    calls(names["Converts"]())
    assert of_lengths(captures) == len(LENGTHS)


@pytest.mark.usefixtures("captures")
def test_the_source_is_read_once_and_not_in_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[CodeType] = []

    def may_replace(code: CodeType, names: dict[str, Any]) -> bool:
        asked.append(code)
        return int_uses.may_replace_int(code, names)

    monkeypatch.setattr(unrecorded_uses, "may_replace_int", may_replace)
    step = "\ndef width(y): return int(y.shape[-1])\n"
    loop = "        for y in x: x = x + y / width(y)\n        steps,"
    model = module_of(tmp_path, step + MODEL.replace("        steps,", loop)).Converts()
    fused = fuse.compile(model)
    for length in LENGTHS[:4]:
        fused(torch.randn(length, 3, WIDTH))
    of_steps = [code for code in asked if code.co_name == "width"]
    assert 0 < len(of_steps) < LENGTHS[0]
