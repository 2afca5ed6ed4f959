"""Recurrent loops in plain Python: eager, ``torch.compile`` and fuse.

The LSTM and the GRU of ``models/``, 64 steps each, at their own small size and at B=16, H=256.
"""

from __future__ import annotations

from benchmarks.common import bench, save

TARGETS = ("models/lstm_loop.py", "models/gru_loop.py")
WIDER = ("--set", "batch_size=16", "--set", "input_size=256", "--set", "hidden_size=256")

if __name__ == "__main__":
    save(
        "lstm",
        [bench(target, *size, "--against", "eager,compile") for target in TARGETS for size in ((), WIDER)],
    )
