"""How much longer does ``fuse show`` take with all patterns looked for than with none?

    fuse show TARGET --ignore match_patterns         each in a process of its own, in turn
    fuse show TARGET --patterns all                  the difference of the medians, in milliseconds of the processor

What is known of the patterns is on disk by then, as it is after a first time. Run it as::

    python -m benchmarks.showing [TARGET] [--rounds 9]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.common import ROOT

WAYS = {"none": ("--ignore", "match_patterns"), "those that are on": (), "all": ("--patterns", "all")}
WANTED = 0.05


def seconds(target: str, *options: str) -> float:
    """What one process used of the processor."""
    command = [sys.executable, "-m", "fuse.cli", "show", target, "--quiet", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed")
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", nargs="?", default="models/lstm_loop.py")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    for way in WAYS.values():
        seconds(options.target, *way)
    rounds = [{name: seconds(options.target, *way) for name, way in WAYS.items()} for _ in range(options.rounds)]
    for name in WAYS:
        print(f"{name:<18} {statistics.median(one[name] for one in rounds):.3f} s")
    more = statistics.median(one["all"] - one["none"] for one in rounds)
    print(f"all takes {1000 * more:+.0f} ms (median of the differences)")
    return int(more > WANTED)


if __name__ == "__main__":
    sys.exit(main())
