"""Measure everything that the README quotes, then write its tables: about ten minutes on an idle machine."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import ROOT

if __name__ == "__main__":
    for name in ("overhead", "capture", "recurrent", "lstm", "models", "tables"):
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT, check=True)
