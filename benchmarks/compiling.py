"""What of a first call the C++ compiler takes, and what for: ``python -m benchmarks.compiling``.

    another model -> first call        what is made once on a machine: the runner, the forms of patterns
    model         -> first call, its kernels in no cache -> the units that were compiled -> each compiled again

Processor seconds: of the calls in this process, of the compilers that it started, and of the same units read and
checked only (headers and syntax), compiled without optimising, as fuse does, and linked. Other programs hardly matter
to them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fuse
from benchmarks.common import ROOT, processor_seconds, save
from fuse.graph.loading.load import load
from fuse.runtime.cpu import toolchain

MODELS = ("lstm_loop", "ligru", "lstm_layernorm", "transformer_encoder", "mobilenet")
WAYS: dict[str, tuple[str, ...]] = {
    "read": ("-fsyntax-only",),
    "O0": ("-O0", "-c"),
    "as fuse does": ("-O2", "-c"),
}


def units_of(model: nn.Module, *args: Any) -> tuple[dict[str, float], list[tuple[str, tuple[str, ...]]]]:
    """Seconds of a first call, and the sources that it compiled with their options."""
    units: list[tuple[str, tuple[str, ...]]] = []
    original = toolchain.compile_in

    def noted(directory: Path, source: str, compiler: toolchain.Toolchain, options: Any) -> toolchain.Outcome:
        units.append((source, tuple(options)))
        return original(directory, source, compiler, options)

    toolchain.compile_in = noted
    own, all_of_it, started = time.process_time(), processor_seconds(), time.perf_counter()
    with torch.no_grad():
        fuse.compile(model)(*args)
    found = {"seconds": time.perf_counter() - started, "own": time.process_time() - own}
    found["compilers"] = processor_seconds() - all_of_it - found["own"]
    toolchain.compile_in = original
    return found, units


def compiled_again(source: str, options: tuple[str, ...], directory: Path) -> dict[str, float]:
    """Processor seconds of one unit, compiled in each way, and of linking it."""
    compiler = toolchain.find()
    (directory / toolchain.SOURCE_NAME).write_text(source, encoding="utf-8", errors="surrogateescape")
    required = [option for option in toolchain.REQUIRED_OPTIONS if option not in ("-O2", "-shared")]
    found = {}
    for name, way in WAYS.items():
        target = [] if name == "read" else ["-o", "unit.o"]
        before = processor_seconds()
        command = [*compiler.command, *required, *way, toolchain.SOURCE_NAME, *target, *options]
        subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
        found[name] = processor_seconds() - before
    before = processor_seconds()
    subprocess.run([*compiler.command, "-shared", "unit.o", "-o", "unit.so", *options], cwd=directory, check=True)
    return {**found, "link": processor_seconds() - before}


def measured(name: str) -> dict[str, Any]:
    loaded = load(str(ROOT / "models" / f"{name}.py"), real=True)
    once, _ = units_of(nn.Tanh(), torch.ones(4))
    call, units = units_of(loaded.model, *loaded.args)
    with tempfile.TemporaryDirectory() as scratch:
        again = [compiled_again(source, options, Path(scratch)) for source, options in units]
    total = {way: sum(one[way] for one in again) for way in (*WAYS, "link")} if again else {}
    sizes = [len(source.splitlines()) for source, _ in units]
    return {"model": name, "once": once, "call": call, "units": len(units), "lines": sum(sizes), "again": total}


def case(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fuse-bench-") as cache:
        os.chmod(cache, 0o700)
        command = [sys.executable, "-m", "benchmarks.compiling", name]
        environment = {**os.environ, "FUSE_CACHE_DIR": cache}
        ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1])))
    else:
        cases = []
        for model in MODELS:
            cases.append(case(model))
            print(cases[-1], file=sys.stderr)
        save("compiling", cases)
