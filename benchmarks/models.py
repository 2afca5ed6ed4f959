"""Every other model of ``models/`` at its own size: eager, ``torch.compile`` and fuse."""

from __future__ import annotations

from benchmarks import lstm
from benchmarks.common import ROOT, bench, save

if __name__ == "__main__":
    targets = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("models/*.py"))
    save("models", [bench(target, "--against", "eager,compile") for target in targets if target not in lstm.TARGETS])
