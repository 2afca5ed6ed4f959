"""How often each step of the metamorphic cases was taken, over several runs, and what became of them.

    python -m benchmarks.metamorphic --cases 5000 -o a.json
    python -m benchmarks.respelled --cases 5000 -o b.json
    python -m benchmarks.steps a.json b.json

Runs of different seeds are other cases; the same seeds twice count once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.metamorphic import WRONG, Case, summary


def cases(files: Sequence[str]) -> list[Case]:
    """The cases of all files, each once."""
    read = [
        Case(**{**one, "steps": tuple(one["steps"])}) for file in files for one in json.loads(Path(file).read_text())
    ]
    return list({(one.pattern != "", one.seed): one for one in read}.values())


def table(found: Sequence[Case]) -> str:
    """A row for each step, the rarest first: how often it was taken, in how many cases that were missed or wrong."""
    rows = ["| step | keeps the meaning | taken | missed | wrong |", "|---|---|--:|--:|--:|"]
    taken = Counter((step, one.preserves) for one in found for step in one.steps)
    missed = Counter((step, True) for one in found if one.failed and one.verdict != WRONG for step in one.steps)
    wrong = Counter((step, one.preserves) for one in found if one.verdict == WRONG for step in one.steps)
    for (step, keeps), count in sorted(taken.items(), key=lambda item: (item[1], item[0])):
        told = "yes" if keeps else "no"
        rows.append(f"| {step} | {told} | {count:,} | {missed[step, keeps]} | {wrong[step, keeps]} |")
    return "\n".join(rows)


if __name__ == "__main__":
    everything = cases(sys.argv[1:])
    print(table(everything))
    print(summary(everything))
