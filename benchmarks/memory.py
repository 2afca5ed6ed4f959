"""Every model's peak memory: as eager's was predicted and measured, as fuse's was predicted and measured.

Parameters and arguments are included. Predicted and measured bytes are those that a call takes from torch's allocator,
workspaces of our kernels included; what libraries take by themselves for the same purpose is in the third figure only,
that of a first run with all that it takes from ``malloc`` (:mod:`fuse.report.timing.heap`).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fuse
from benchmarks.common import ROOT, save
from fuse.cost.allocated import peak_allocated
from fuse.graph.loading.load import load
from fuse.report.timing.heap import heap_peaks

HEAD = f"{'model':20} {'eager':>36} {'fused':>36}  fused/eager  with libraries  predicted/measured"


def held(model: torch.nn.Module, arguments: object) -> int:
    """Bytes of parameters, buffers and arguments, each storage once."""
    tensors = [*model.parameters(), *model.buffers(), *(t for t in tree_leaves(arguments) if isinstance(t, Tensor))]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def measured(target: str, *settings: str) -> dict[str, Any]:
    """The peaks of one model file."""
    loaded = load(target, settings=settings, real=True)
    model, args, kwargs = loaded.model, loaded.args, loaded.kwargs
    report = fuse.show(model, args, kwargs)
    fused = fuse.compile(model)
    inputs = held(model, (args, kwargs))
    with torch.no_grad():
        model(*args, **kwargs)
        fused(*args, **kwargs)
        fused(*args, **kwargs)
        fused.compiled.program.forget_workspaces()
        after = inputs + peak_allocated(lambda: fused(*args, **kwargs))
        before = inputs + peak_allocated(lambda: model(*args, **kwargs))
    heap = {side: inputs + peak for side, peak in heap_peaks(str(ROOT / target), settings=settings).items()}
    return {
        "target": target,
        "eager": {"predicted": report.before.peak_bytes, "measured": before, "with_libraries": heap["eager"]},
        "fused": {"predicted": report.after.peak_bytes, "measured": after, "with_libraries": heap["fused"]},
    }


def row(case: dict[str, Any]) -> str:
    """One line of the table."""
    eager, ours = case["eager"], case["fused"]
    sides = [f"{s['predicted']:11,} {s['measured']:12,} {s['with_libraries']:11,}" for s in (eager, ours)]
    ratios = f"{ours['measured'] / eager['measured']:11.2f}  {ours['with_libraries'] / eager['with_libraries']:14.2f}"
    ratios += f"  {ours['predicted'] / ours['measured']:18.3f}"
    return f"{case['target'].removeprefix('models/'):20} {sides[0]} {sides[1]}  {ratios}"


if __name__ == "__main__":
    targets = sys.argv[1:] or sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("models/*.py"))
    print(HEAD)
    cases = []
    for target in targets:
        cases.append(measured(target))
        print(row(cases[-1]), flush=True)
    if len(sys.argv) == 1:
        save("memory", cases)
