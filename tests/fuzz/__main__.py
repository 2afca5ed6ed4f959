"""Random programs, fused and held to eager and to float64: ``python -m tests.fuzz --minutes 10 --seed 0``.

Each seed is one program: tensor operators or a recurrent loop, of several dtypes, strides and views, with writes,
casts, integers and values that are read, some of them trained, some called with several sizes in turn. Seeds run in a
process of their own: what crashes or hangs there is a finding, too. A failing program is shrunk and printed, and each
verdict is a line of the log, so that runs can be added up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.running import KINDS, Line, block
from tests.fuzz.sanitizing import sanitized

PROGRAMS_A_PROCESS = 400


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the next ones follow")
    parser.add_argument("--only", choices=sorted(KINDS), help="straight programs and loops in turn without it")
    parser.add_argument("--unoptimised", action="store_true", help="compile kernels with -O0: many more programs")
    parser.add_argument("--sanitize", action="store_true", help="compile kernels with GCC's sanitizers: faults end it")
    parser.add_argument("--programs", type=int, default=10**9, help="at most so many")
    parser.add_argument("--log", type=Path, default=Path("fuzz.jsonl"), help="a line for each program is added here")
    options = parser.parse_args(arguments)
    if options.sanitize:
        again = [one for one in (sys.argv[1:] if arguments is None else arguments) if one != "--sanitize"]
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.fuzz", *again]
            return subprocess.run(command, env=sanitized(Path(folder)), check=False).returncode
    end = time.monotonic() + options.minutes * 60
    lines: list[Line] = []
    seed = options.seed
    with options.log.open("a") as log:
        while time.monotonic() < end and len(lines) < options.programs:
            count = min(PROGRAMS_A_PROCESS, options.programs - len(lines))
            for line in block(range(seed, seed + count), options.only, options.unoptimised, end):
                lines.append(line)
                seed = line["seed"] + 1
                log.write(json.dumps(line) + "\n")
                log.flush()
                if line["problem"]:
                    print(f"\n{line['kind']} seed {line['seed']}: {line['problem']}\n{line['program']}", flush=True)
    print(summary(lines))
    return 1 if any(line["problem"] for line in lines) else 0


def summary(lines: Sequence[Line]) -> str:
    """The figures of a run, as a user reads them."""
    fit = [line for line in lines if not line["unfit"]]
    total = Counter[str]()
    for line in fit:
        total.update({name: line[name] for name in ("calls", "eager", "captured", "rolled")})
    wrong = [f"{line['kind']} {line['seed']}" for line in fit if line["problem"]]
    seeds = f"seeds {lines[0]['seed']} to {lines[-1]['seed']}" if lines else "no seeds"
    return (
        f"{len(fit)} programs ({seeds}; {len(lines) - len(fit)} that eager refuses), {total['calls']} calls, "
        f"{total['eager']} of them eager; {total['rolled']} of {total['captured']} captures have a loop; "
        f"wrong: {', '.join(wrong) or 'none'}"
    )


if __name__ == "__main__":
    sys.exit(main())
