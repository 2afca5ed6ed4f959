"""Loops without a hand-tuned layer: eager, ``torch.compile`` and fuse, at a small and a larger batch.

64 steps each, since ``torch.compile`` writes code for every step; the forward algorithm of a conditional random field
also over 128 steps, against eager alone.
"""

from __future__ import annotations

from benchmarks.common import bench, save

LENGTHS = {
    "models/ligru.py": "seq_length",
    "models/lstm_layernorm.py": "seq_length",
    "models/crf.py": "seq_length",
    "models/selective_scan.py": "seq_length",
    "models/wkv.py": "seq_length",
    "models/decoder_greedy.py": "longest",
}
BATCHES = (4, 16)

if __name__ == "__main__":
    cases = [
        bench(target, "--set", f"{length}=64", "--set", f"batch_size={batch}", "--against", "eager,compile")
        for target, length in LENGTHS.items()
        for batch in BATCHES
    ]
    longer = bench("models/crf.py", "--set", "seq_length=128", "--set", "batch_size=16", "--against", "eager")
    save("cells", [*cases, longer])
