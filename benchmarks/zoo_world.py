"""Does a process that ran the zoo through fuse still build and run every model eager, bit for bit as one without fuse?

    python -m benchmarks.zoo_world [names]       parts of names; prints those that differ or do not run, with status 1
    python -m benchmarks.zoo_world --portion 16  so many models in a process; the results file is written after each

One process builds each model, calls it twice through fuse, and then builds each of them once more and runs it eager;
another one does the latter only. Both print a hash of every result.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

WITH, WITHOUT = "with", "without"


def built(group: str, case: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model in evaluation, and the arguments of a call."""
    import torch

    torch.manual_seed(0)
    model, args, kwargs = importlib.import_module(f"benchmarks.{group}").CASES[case](1)
    return model.eval(), args, kwargs


def digest(result: Any) -> str:
    """A hash of the tensors in a result."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    plain = [leaf.contiguous().reshape(-1).view(torch.uint8) for leaf in leaves]
    return hashlib.sha256(b"".join(leaf.numpy().tobytes() for leaf in plain)).hexdigest()


def digests(cases: Sequence[tuple[str, str]], how: str) -> Iterator[str]:
    """A line for each model, once all of them ran through fuse, or without it."""
    import torch

    torch.set_num_threads(1)
    if how == WITH:
        import fuse

        for group, case in cases:
            with contextlib.suppress(Exception), torch.no_grad():  # what eager cannot run is told below
                model, args, kwargs = built(group, case)
                fused = fuse.compile(model)
                fused(*args, **kwargs)
                fused(*args, **kwargs)
    for group, case in cases:
        with torch.no_grad():
            try:
                model, args, kwargs = built(group, case)
                yield f"{group}:{case} {digest(model(*args, **kwargs))}"
            except Exception as error:
                yield f"{group}:{case} {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def compared(cases: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Of each model what both processes tell, and how many models the first of them ran ``together``."""
    names = [f"{group}:{case}" for group, case in cases]
    found = []
    for how in (WITH, WITHOUT):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.zoo_world", "--how", how, *names]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(ran.stderr[-2000:])
        found.append([line for line in ran.stdout.splitlines() if line.startswith("zoo_")])
    if [len(lines) for lines in found] != [len(cases)] * 2:
        raise RuntimeError("a process did not tell of all models")
    for (_, case), *told in zip(cases, *found, strict=True):
        of_fuse, plain = (line.partition(f"{case} ")[2] for line in told)
        yield {"name": case, "with": of_fuse, "without": plain, "together": len(cases)}


def is_equal(case: dict[str, Any]) -> bool:
    """Whether both processes ran a model, with one result."""
    return bool(case["with"] == case["without"] and re.fullmatch("[0-9a-f]{64}", case["with"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of names")
    parser.add_argument("--portion", type=int, help="models in one process; all that are chosen unless told")
    parser.add_argument("--how", choices=(WITH, WITHOUT), help="print what one process gives; names are whole ones")
    given = parser.parse_args()
    if given.how:
        warnings.simplefilter("ignore")
        for line in digests([(group, case) for group, _, case in (w.partition(":") for w in given.words)], given.how):
            print(line, flush=True)
        return 0
    from benchmarks.common import RESULTS, save  # which imports fuse
    from benchmarks.zoo import names

    every = names()
    chosen = [(group, case) for case, group in every.items() if not given.words or any(w in case for w in given.words)]
    path = RESULTS / "zoo_world.json"
    kept = {case["name"]: case for case in json.loads(path.read_text())["cases"]} if path.exists() else {}
    different = []
    for first in range(0, len(chosen), given.portion or len(chosen)):
        for case in compared(chosen[first : first + (given.portion or len(chosen))]):
            kept[case["name"]] = case
            different += [] if is_equal(case) else [case]
        save("zoo_world", [kept[name] for name in every if name in kept])
    for case in different:
        print(f"{case['name']} {case['with']}, without fuse {case['without']}")
    print(f"{len(chosen)} models, {len(different)} differ or do not run")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
