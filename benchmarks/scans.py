"""Loops at several lengths and batches: ``fuse bench --scan`` against eager and ``torch.compile``.

    models/lstm_loop.py    seq_length 16, 32, 64     launches and milliseconds at each, and as a + b * seq_length
    models/gru_loop.py     batch_size 1, 4, 16, 64

``torch.compile`` unrolls the steps: its first calls take most of the six minutes.
"""

from __future__ import annotations

from benchmarks.common import bench, save

SCANS = (
    ("models/lstm_loop.py", "seq_length=16:64:x2"),
    ("models/lstm_loop.py", "batch_size=1:64:x4"),
    ("models/gru_loop.py", "seq_length=16:64:x2"),
    ("models/gru_loop.py", "batch_size=1:64:x4"),
)

if __name__ == "__main__":
    save("scans", [bench(target, "--scan", scan, "--against", "eager,compile") for target, scan in SCANS])
