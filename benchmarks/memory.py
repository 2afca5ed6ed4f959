"""Every model's peak memory: as eager's was predicted and measured, as fuse's was predicted and measured.

Parameters and arguments are included. Bytes are those that a call takes from torch's allocator, workspaces included;
what libraries take from the system by themselves is in none of the figures.
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
from fuse.graph.load import load

HEAD = f"{'model':20} {'eager':>24} {'fused':>24}  fused/eager  predicted/measured"


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
    return {
        "target": target,
        "eager": {"predicted": report.before.peak_bytes, "measured": before},
        "fused": {"predicted": report.after.peak_bytes, "measured": after},
    }


def row(case: dict[str, Any]) -> str:
    """One line of the table."""
    eager, ours = case["eager"], case["fused"]
    sides = [f"{side['predicted']:11,} {side['measured']:12,}" for side in (eager, ours)]
    ratios = f"{ours['measured'] / eager['measured']:11.2f}  {ours['predicted'] / ours['measured']:.3f}"
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
