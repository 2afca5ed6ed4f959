"""The published study's table of training steps, as a cost a step and a cost a sample, and what launches explain of it.

    published ms(batch)  ~  fixed + batch * per sample       fitted on batches 1, 8 and 32, tested on 2, 4 and 16
    launches of a step (fuse show --train, at the papers' sizes)  ->  fixed ms a launch

The milliseconds are those of "NLP model migration to the Ascend platform", Computer Science 51(1), 2024, a V100 against
an NPU. The study does not give its lengths: those here are the papers' (``SIZES``). ``--counted`` counts launches, too,
which captures the models and takes minutes; without it the earlier counts stay.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.common import RESULTS, ROOT, save

PUBLISHED: dict[str, dict[str, dict[int, float]]] = {
    "ALBERT-base": {
        "V100": {1: 39, 2: 65, 4: 115, 8: 214, 16: 402, 32: 765},
        "NPU": {1: 20, 2: 29, 4: 42, 8: 60, 16: 106, 32: 195},
    },
    "ALBERT-large": {
        "V100": {1: 100, 2: 209, 4: 355, 8: 672, 16: 1312},
        "NPU": {1: 34, 2: 52, 4: 74, 8: 119, 16: 205},
    },
    "RNNSearch": {
        "V100": {1: 97.6, 2: 110.2, 4: 116.4, 8: 118.6, 16: 133.4, 32: 166.3},
        "NPU": {1: 175.0, 2: 210.3, 4: 250.1, 8: 254.5, 16: 369.7, 32: 485.1},
    },
}
"""Milliseconds of an average training step by batch size."""

FITTED = (1, 8, 32)

PROFILES = {"V100": "v100", "NPU": "ascend910"}
"""Device profiles of ``fuse show``."""

SIZES = {
    "ALBERT-base": ("albert", ("size=base", "batch_size=1", "seq_length=384")),
    "ALBERT-large": ("albert", ("size=large", "batch_size=1", "seq_length=384")),
    "RNNSearch": ("rnnsearch", ("size=published", "batch_size=1", "source_length=50", "target_length=50")),
}
"""Lan et al., ICLR 2020: 384 tokens for question answering. Bahdanau et al., ICLR 2015: sentences of up to 50 words."""


def fitted(points: Mapping[int, float]) -> tuple[float, float]:
    """``fixed, per_sample`` with the least relative squares.

    >>> fitted({1: 12.0, 8: 26.0, 32: 74.0})
    (10.0, 2.0)
    """
    weights = {batch: 1 / value**2 for batch, value in points.items()}
    one = sum(weights.values())
    x = sum(weights[b] * b for b in points)
    y = sum(weights[b] * points[b] for b in points)
    xx = sum(weights[b] * b * b for b in points)
    xy = sum(weights[b] * b * points[b] for b in points)
    slope = (one * xy - x * y) / (one * xx - x * x)
    return round((y - slope * x) / one, 9), round(slope, 9)


def fits(name: str) -> dict[str, Any]:
    """One model: the two costs of each device, and how far they are off for each batch, the speed-up included."""
    found: dict[str, Any] = {"model": name, "devices": {}}
    lines = {}
    for device, points in PUBLISHED[name].items():
        fixed, sample = lines[device] = fitted({b: ms for b, ms in points.items() if b in FITTED})
        found["devices"][device] = {
            "fixed_ms": round(fixed, 2),
            "per_sample_ms": round(sample, 3),
            "errors": {str(b): round((fixed + b * sample) / ms - 1, 4) for b, ms in points.items()},
        }
    found["ratio_errors"] = {}
    for batch, ms in PUBLISHED[name]["V100"].items():
        modelled = [fixed + batch * sample for fixed, sample in (lines["V100"], lines["NPU"])]
        ratio = ms / PUBLISHED[name]["NPU"][batch]
        found["ratio_errors"][str(batch)] = round(modelled[0] / modelled[1] / ratio - 1, 4)
    return found


def counted(name: str) -> dict[str, Any]:
    """Launches of a training step: forward and backward before and after the passes, and of Adam by torch's loop; and
    the milliseconds of forward and backward that the device profiles model."""
    model, settings = SIZES[name]
    flags = [text for one in settings for text in ("--set", one)]
    found: dict[str, Any] = {}
    modelled: dict[str, list[float]] = {}
    for device, profile in PROFILES.items():
        command = ["show", f"models/{model}.py", "--train", *flags]
        print(f"fuse {' '.join(command)} --device {profile}", file=sys.stderr, flush=True)
        ran = subprocess.run(
            [sys.executable, "-m", "fuse.cli", *command, "--device", profile, "--json", "--quiet"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        report = json.loads(ran.stdout)
        found = {"command": f"fuse {' '.join(command)}", **launches(report)}
        halves = (report, report["backward"])
        modelled[device] = [
            round(1e3 * sum(half[when]["modelled_seconds"] for half in halves), 3) for when in ("before", "after")
        ]
    return {**found, "modelled_ms": modelled}


def launches(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a report of ``fuse show --train`` says of a step."""
    halves = {"forward": report, "backward": report["backward"]}
    return {
        **{name: [half["before"]["launches"], half["after"]["launches"]] for name, half in halves.items()},
        "optimizer": report["optimizer"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counted", action="store_true", help="count launches again, in minutes")
    again = parser.parse_args().counted
    path = RESULTS / "study.json"
    earlier = {one["model"]: one for one in json.loads(path.read_text())["cases"]} if path.exists() else {}
    cases = []
    for name in PUBLISHED:
        case = fits(name)
        if name in SIZES:
            case["launches"] = counted(name) if again else earlier.get(name, {}).get("launches")
        cases.append(case)
    save("study", cases)


if __name__ == "__main__":
    main()
