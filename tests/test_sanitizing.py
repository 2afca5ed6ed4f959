"""Kernels under GCC's sanitizers: what reads outside of a tensor ends the process. ``python -m tests.fuzz --sanitize``
looks longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.sanitizing import sanitized

TOO_FAR = 'extern "C" float sum(float *x, long n) { float s = 0; for (long i = 0; i <= n; ++i) s += x[i]; return s; }'
CALL = """
import ctypes, sys, torch
function = ctypes.CDLL(sys.argv[1]).sum
function.argtypes = [ctypes.c_void_p, ctypes.c_long]
x = torch.ones(25)
function(x.data_ptr(), int(sys.argv[2]))
print("ran")
"""


KEPT = """
import sys, torch, fuse

class Model(torch.nn.Module):
    def forward(self, x, y):
        first = torch.sigmoid(x) * torch.tanh(x)
        second = first * y[:, None] + first.sum() * 0.5
        third = torch.sigmoid(second) * torch.tanh(second)
        return third.mT.contiguous(), third.sum()

for shape in sys.argv[1:]:
    fused, (rows, columns) = fuse.compile(Model()), map(int, shape.split("x"))
    with torch.no_grad():
        args = torch.randn(rows, columns, dtype=torch.float64), torch.arange(rows)
        torch.testing.assert_close(fused(*args), Model()(*args))
    assert not fused.last_run.fallbacks, fused.last_run
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    try:
        found = sanitized(tmp_path_factory.mktemp("sanitized"))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs g++")
    if not all(Path(library).is_absolute() for library in found["LD_PRELOAD"].split(":")):
        pytest.skip("needs GCC's sanitizers")
    return found


def test_a_read_behind_the_end_of_a_tensor_ends_the_process(environment: dict[str, str], tmp_path: Path) -> None:
    source, library = tmp_path / "sum.cpp", tmp_path / "sum.so"
    source.write_text(TOO_FAR)
    subprocess.run([environment["CXX"], "-O3", "-shared", "-fPIC", source, "-o", library], env=environment, check=True)
    for count, ends in ((24, False), (25, True)):
        command = [sys.executable, "-c", CALL, library, str(count)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (ran.returncode != 0) is ends, ran.stderr
        assert ("heap-buffer-overflow" in ran.stderr) is ends
        assert ("ran" in ran.stdout) is not ends


@pytest.mark.usefixtures("environment")
def test_random_programs_run_clean(tmp_path: Path) -> None:
    """The first one copies tensors without elements, whose address is null."""
    command = ["--sanitize", "--unoptimised", "--programs", "3", "--seed", "500185"]
    assert main([*command, "--log", str(tmp_path / "log.jsonl")]) == 0


def test_values_that_are_kept_for_a_second_pass_fit(environment: dict[str, str]) -> None:
    """A row of several dimensions ends in vectors that are stored whole, also where its size is that of whole ones."""
    command = [sys.executable, "-c", KEPT, "4x24", "3x16", "5x7", "1x48"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
