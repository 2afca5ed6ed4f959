"""Lengths and batches in turn: ``fuse bench --scan``, each size in calls of its own.

``torch.compile`` writes code for each step of a loop, so that it is a peer at the shorter lengths alone.
"""

from __future__ import annotations

import shlex

from benchmarks.common import bench, save

SCANS = (
    ("models/lstm_loop.py", "seq_length=16:64:x2", "eager,compile,tuned"),
    ("models/lstm_loop.py", "seq_length=128:1024:x2", "eager,tuned"),
    ("models/lstm_loop.py", "batch_size=1:64:x4", "eager,compile,tuned"),
    ("models/gru_loop.py", "seq_length=16:1024:x4", "eager,tuned"),
    ("models/selective_scan.py", "seq_length=16:64:x4", "eager,compile"),
    ("models/selective_scan.py", "seq_length=256:1024:x4", "eager"),
    ("models/transformer_encoder.py", "seq_length=8:128:x4", "eager,compile"),
    ("models/transformer_encoder.py", "batch_size=1:16:x4", "eager,compile"),
)

if __name__ == "__main__":
    cases = []
    for target, scan, peers in SCANS:
        name = scan.partition("=")[0]
        for case in bench(target, "--scan", scan, "--against", peers)["cases"]:
            setting = f"{name}={case['value']}"
            command = shlex.join(["fuse", "bench", target, "--set", setting, "--against", peers])
            cases.append({"command": command, **case})
    save("scans", cases)
