"""Measure what README.md and docs/measured.md quote, but for the zoo, and write the tables: an hour, machine idle."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import ROOT

if __name__ == "__main__":
    for name in (
        "overhead",
        "capture",
        "recurrent",
        "limit",
        "busy",
        "first_call",
        "compiling",
        "sizes",
        "lengths",
        "lstm",
        "cells",
        "scans",
        "models",
        "frozen",
        "reads",
        "albert",
        "memory",
        "blocks",
        "convolutions",
        "training",
        "crf_share",
        "op_db",
        "module_db",
        "curves",
        "comparison",
        "patterns",
        "viewer",
        "tables",
    ):
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT, check=True)
