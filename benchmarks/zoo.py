"""More than a hundred models of published packages: are they right through fuse, do they run fused, how fast?

    python -m benchmarks.zoo                          all, some hours
    python -m benchmarks.zoo llama timm --what check  those whose name holds one of the words; the others keep figures
    python -m benchmarks.zoo --list                   their names, and why some are left out

``pip install -c constraints.txt -e '.[zoo]'`` installs the packages. Weights are random, widths are published ones, and
stacks have at most four layers where the package lets one choose. Each model runs in a process of its own with a time
limit, so that none stops the others. ``check`` compares with float64, ``train`` does so with gradients, ``bench`` times
eager and fuse, ``compile`` times ``torch.compile`` too. Each figure names the commit of the engine that it holds for.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import resource
import subprocess
import sys
import time
import traceback
import warnings
from typing import Any

from benchmarks.common import RESULTS, ROOT, save

GROUPS = ("zoo_text", "zoo_images", "zoo_sequences")
"""Modules with ``CASES``: a name and what builds the model and the arguments of a call for a batch size."""

WHAT = ("check", "train", "bench", "compile")
LIMIT_SECONDS = 300.0
LIMIT_BYTES = 12 << 30


def names() -> dict[str, str]:
    """Every model that can be built here, and the module that builds it."""
    return {name: group for group in GROUPS for name in importlib.import_module(f"benchmarks.{group}").CASES}


def measured(name: str, group: str, what: str, batch: int, seconds: float) -> dict[str, Any]:
    """One figure of one model."""
    import torch

    import fuse.check.oracle
    import fuse.report.timing.bench

    torch.manual_seed(0)
    model, args, kwargs = importlib.import_module(f"benchmarks.{group}").CASES[name](batch)
    model.train(what == "train")
    started = time.perf_counter()
    if what in ("check", "train"):
        found = fuse.check.oracle.check(model, args, kwargs, train=what == "train").to_dict()
        kept = ("passed", "problems", "observed", "observed_backward", "fallbacks")
        return {**{key: found[key] for key in kept if key in found}, "seconds": time.perf_counter() - started}
    peers = ("eager", "compile") if what == "compile" else ("eager",)
    timed = fuse.report.timing.bench.bench(model, args, kwargs, against=peers, seconds=seconds)
    return timed.to_dict()


def in_process(sender: Any, measure: Any, *case: Any) -> None:
    """``measure(*case)`` in a process of its own; what goes wrong is the result."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    warnings.simplefilter("ignore")
    try:
        sender.send(measure(*case))
    except Exception as error:
        lines = traceback.format_exception(error)
        sender.send({"failed": f"{type(error).__name__}: {error}".partition("\n")[0], "traceback": "".join(lines[-4:])})


def run(context: Any, limit: float, measure: Any, *case: Any) -> dict[str, Any]:
    """What a process measured, or why there is nothing."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=in_process, args=(sender, measure, *case), daemon=False)
    process.start()
    sender.close()
    try:
        if receiver.poll(limit):
            found: dict[str, Any] = receiver.recv()
            return found
        return {"failed": f"took more than {limit:.0f} s"}
    except EOFError:
        return {"failed": "the process died"}
    finally:
        process.kill()
        process.join()


def engine_commit() -> str:
    """The last commit of the engine's files, with a plus sign where they were changed after it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h", "--", "fuse") + "+" * bool(git("status", "--porcelain", "--", "fuse"))


def told(name: str, what: str, batch: int, found: dict[str, Any]) -> str:
    """One line on one figure."""
    if "failed" in found:
        text = found["failed"]
    elif "passed" in found:
        reasons = [one["reason"] if isinstance(one, dict) else one.reason for one in found["fallbacks"]]
        parts = [
            "right" if found["passed"] else f"WRONG: {found['problems'][0]}",
            *(f"eager: {r}" for r in reasons[:1]),
        ]
        text = f"{'; '.join(parts)} {found['observed']} {found['seconds']:.1f} s"
    else:
        first = {peer: f"{seconds:.1f}" for peer, seconds in found["first_call_seconds"].items()}
        text = f"{ {peer: round(ratio['median'], 2) for peer, ratio in found['ratios'].items()} } first {first}"
    return f"{name} {what} {batch}: {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of names")
    parser.add_argument("--what", default=",".join(WHAT[:3]), help=f"of {', '.join(WHAT)}")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to time each contender")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for one figure")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"benchmarks.{group}" for group in GROUPS])
    known, commit = names(), engine_commit()
    chosen = {name: group for name, group in known.items() if not given.words or any(w in name for w in given.words)}
    if given.list:
        print("\n".join(known))
        for group in GROUPS:
            for package, reason in importlib.import_module(f"benchmarks.{group}").ABSENT.items():
                print(f"left out: {package}: {reason}")
        return
    for name, group in chosen.items():
        figures = {}
        for what in given.what.split(","):
            for batch in map(int, given.batches.split(",")):
                found = run(context, given.limit, measured, name, group, what, batch, given.seconds)
                figures[f"{what}_{batch}"] = {**found, "commit": commit}
                print(told(name, what, batch, found), flush=True)
        cases = {case["name"]: case for case in known_cases() if case["name"] in known}
        cases[name] = {"name": name, **cases.get(name, {}), **figures}
        save("zoo", [cases[one] for one in sorted(cases)])


def known_cases() -> list[dict[str, Any]]:
    """What was measured before, by this process and others."""
    path = RESULTS / "zoo.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["cases"] if path.exists() else []
    return found


if __name__ == "__main__":
    sys.exit(main())
