"""Draw the pictures of study.md from the measured JSON: ``python docs/study_pictures.py`` (the extra ``pictures``).

benchmarks/results/study.json  ->  docs/images/study_fits.svg       published, and as a cost a step and a sample
                                   docs/images/study_launches.svg   launches of a training step, before and after
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.study import FITTED, PUBLISHED  # noqa: E402  # found beside this folder

matplotlib.use("svg")
matplotlib.rcParams.update(
    {"svg.hashsalt": "fuse", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
)

from matplotlib import pyplot  # noqa: E402  # after the choice of what draws

IMAGES = ROOT / "docs" / "images"
COLORS = {"V100": "#2a6f97", "NPU": "#c8553d"}


def fits(cases: list[dict[str, Any]]) -> None:
    """Milliseconds of a step by batch size: published, and as the two costs give them."""
    figure, places = pyplot.subplots(1, len(cases), figsize=(9.5, 3.1), layout="constrained")
    for case, place in zip(cases, places, strict=True):
        for device, costs in case["devices"].items():
            points, color = PUBLISHED[case["model"]][device], COLORS[device]
            batches = sorted(points)
            line = [costs["fixed_ms"] + batch * costs["per_sample_ms"] for batch in batches]
            place.plot(batches, line, color=color, linewidth=1, label=f"{device}: fixed {costs['fixed_ms']:.0f} ms")
            for fitted, face in ((True, color), (False, "white")):
                shown = [batch for batch in batches if (batch in FITTED) == fitted]
                place.plot(shown, [points[b] for b in shown], "o", color=color, markerfacecolor=face, markersize=5)
        place.set(xscale="log", yscale="log", title=case["model"], xlabel="batch", xticks=batches, xticklabels=batches)
        place.minorticks_off()
        place.legend(frameon=False, fontsize=8)
    places[0].set_ylabel("ms a training step (open: not fitted)")
    figure.savefig(IMAGES / "study_fits.svg", metadata={"Date": None})


def launches(cases: list[dict[str, Any]]) -> None:
    """Launches of a training step, forward and backward, as eager runs it and after the passes."""
    figure, place = pyplot.subplots(figsize=(6.4, 2.4), layout="constrained")
    for row, case in enumerate(cases):
        counts = [case["launches"][half] for half in ("forward", "backward")]
        for way, color, shift in ((0, "#8d99ae", 0.19), (1, "#2b9348", -0.19)):
            total = sum(count[way] for count in counts)
            label = ("eager", "fused")[way] if row == 0 else None
            place.barh(row + shift, total, height=0.34, color=color, label=label)
            place.text(total * 1.06, row + shift, f"{total:,}", va="center", fontsize=8)
    place.set(xscale="log", xlabel="launches of a training step", yticks=range(len(cases)))
    place.set_yticklabels([case["model"] for case in cases])
    place.legend(frameon=False, loc="lower right")
    figure.savefig(IMAGES / "study_launches.svg", metadata={"Date": None})


if __name__ == "__main__":
    measured = json.loads((ROOT / "benchmarks" / "results" / "study.json").read_text())["cases"]
    fits(measured)
    launches([case for case in measured if case.get("launches")])
