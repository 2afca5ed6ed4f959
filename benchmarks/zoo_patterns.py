"""Which patterns of fuse fire in published models, and what it costs a model to have all of them on.

    python -m benchmarks.zoo_patterns                    which fire, in every model of the zoo and of models/
    python -m benchmarks.zoo_patterns --new              those that were not looked at before
    python -m benchmarks.zoo_patterns llama timm --time  the models whose name holds one of the words; where a pattern
                                                         fires, their speed with all patterns over that with none, too

Where none fires, all patterns and none make the same program. Speeds are of this process on the processor, one call of
each in turn, the median; without autograd, batch 1. What was found of other models is kept. The table of
docs/patterns/README.md is made of it, by ``python docs/pattern_pages.py``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import zoo
from benchmarks.common import RESULTS, ROOT, save

ROUNDS, SECONDS = 15, 0.1
PATTERN_PASSES = ("match_patterns", "pattern_gradients")
WANTED = 0.95
OWN = "models"
"""The folder of our own models, as those of the zoo have a module each."""


def measured(name: str, group: str, timed: bool) -> dict[str, Any]:
    """What fires in one model, the launches left with all patterns and with none, and perhaps the speed."""
    import torch

    import fuse
    from fuse.graph.loading.load import load
    from fuse.rewrite import registry
    from fuse.rewrite.patterns.registry import ALL, also

    others = [one.name for one in registry.select(None, (), ()) if one.name not in PATTERN_PASSES]
    torch.manual_seed(0)
    if group == OWN:
        loaded = load(str(ROOT / name), real=True)
        model, args, kwargs = loaded.model, loaded.args, loaded.kwargs
    else:
        model, args, kwargs = importlib.import_module(f"benchmarks.{group}").CASES[name](1)
    model.eval()
    with torch.no_grad():
        with also([ALL]):
            report = fuse.show(model, args, kwargs)
        fired = {one.pattern: one.count for one in report.fired if one.pattern}
        without = fuse.show(model, args, kwargs, passes=others) if fired else report
        found: dict[str, Any] = {
            "fired": fired,
            "eager": report.before.launches,
            "without": without.after.launches,
            "with": report.after.launches,
        }
        if timed and fired:
            plain = fuse.compile(model, passes=others)
            plain(*args, **kwargs)
            with also([ALL]):
                rewritten = fuse.compile(model)
                rewritten(*args, **kwargs)
            if plain.last_run.fallbacks or rewritten.last_run.fallbacks:  # type: ignore[union-attr]  # both were called
                return {**found, "fallback": True}
            found["speed"] = ratio(lambda: plain(*args, **kwargs), lambda: rewritten(*args, **kwargs))
    return found


def ratio(one: Callable[[], object], other: Callable[[], object]) -> float:
    """How many times as fast as the first the other is: the median of rounds in which they take turns."""
    found = []
    for _ in range(ROUNDS):
        spent = [0.0, 0.0]
        while min(spent) < SECONDS / 2:
            for place, call in enumerate((one, other)):
                started = time.process_time()
                call()
                spent[place] += time.process_time() - started
        found.append(spent[0] / spent[1])
    return statistics.median(found)


def known_cases() -> dict[str, dict[str, Any]]:
    """What was found before, by model."""
    path = RESULTS / "zoo_patterns.json"
    return {one["name"]: one for one in json.loads(path.read_text())["cases"]} if path.exists() else {}


def table() -> str:
    """The models in which patterns fire, as the page of patterns has them."""
    rows = ["| model | fires | eager | without | with | speed |", "|---|---|--:|--:|--:|--:|"]
    for name, one in known_cases().items():
        if one.get("fired"):
            told = ", ".join(f"`{pattern}` {count}" for pattern, count in one["fired"].items())
            speed = f"{one['speed']:.2f}" if "speed" in one else ""
            rows.append(f"| {name} | {told} | {one['eager']} | {one['without']} | {one['with']} | {speed} |")
    return "\n".join(rows)


def sentence() -> str:
    """How many models were looked at, in how many patterns fire, and which patterns those are."""
    cases = [one for one in known_cases().values() if "fired" in one]
    having = [one for one in cases if one["fired"]]
    patterns = {pattern for one in having for pattern in one["fired"]}
    speeds = [one["speed"] for one in having if "speed" in one]
    told = f"{len(cases)} models were looked at; {len(patterns)} patterns fire in {len(having)} of them"
    return f"{told}. Of {len(speeds)} the speed was measured: at least {min(speeds):.2f}" if speeds else told


def told(name: str, found: Mapping[str, Any]) -> str:
    """One line on one model."""
    if "failed" in found:
        return f"{name}: {found['failed']}"
    fired = ", ".join(f"{pattern} {count}" for pattern, count in found["fired"].items()) or "none"
    launches = f"{found['eager']} -> {found['without']} without, {found['with']} with"
    return f"{name}: {fired}; {launches}" + (f"; speed {found['speed']:.3f}" if "speed" in found else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of names")
    parser.add_argument("--time", action="store_true", help="compile and time the models in which a pattern fires")
    parser.add_argument("--fired", action="store_true", help="only models in which one was found to fire before")
    parser.add_argument("--new", action="store_true", help="only models that were not looked at before")
    parser.add_argument("--limit", type=float, default=zoo.LIMIT_SECONDS, help="seconds for one model")
    given = parser.parse_args()
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"benchmarks.{group}" for group in zoo.GROUPS])
    slow = []
    own = {f"models/{path.name}": OWN for path in sorted((ROOT / OWN).glob("[a-z]*.py"))}
    for name, group in {**own, **zoo.names()}.items():
        before = known_cases()
        if given.words and not any(word in name for word in given.words):
            continue
        if given.fired and not before.get(name, {}).get("fired"):
            continue
        if given.new and "fired" in before.get(name, {}):
            continue
        found = zoo.run(context, given.limit, measured, name, group, given.time)
        print(told(name, found), flush=True)
        if found.get("speed", 1.0) < WANTED:
            slow.append(name)
        cases = {**before, name: {"name": name, **found}}
        save("zoo_patterns", [cases[one] for one in sorted(cases)])
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
