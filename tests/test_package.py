"""The package is whole wherever Python finds it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

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
