"""Every other model of ``models/`` at its own size: eager, ``torch.compile`` and fuse.

``torch.compile`` takes a quarter of an hour for a loop of 1,024 steps (https://github.com/pytorch/pytorch/issues/97155),
so the long loop is timed against eager alone, and against both at 64 steps.
"""

from __future__ import annotations

from benchmarks import lstm
from benchmarks.common import ROOT, bench, save

BOTH = ("--against", "eager,compile")
CASES = {"models/ligru.py": (("--set", "seq_length=64", *BOTH), ("--against", "eager"))}

if __name__ == "__main__":
    targets = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("models/*.py"))
    cases = [(t, options) for t in targets if t not in lstm.TARGETS for options in CASES.get(t, (BOTH,))]
    save("models", [bench(target, *options) for target, options in cases])
