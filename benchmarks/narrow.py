"""Who is nearest to float64 in bf16 and f16: eager, fuse, ``torch.compile``, and that with ``emulate_precision_casts``.

Weights and inputs are rounded to the narrow dtype first, and the float64 run has the rounded ones: what is left is what
computing in that dtype loses. Each case runs in a process of its own; one that runs longer than the limit keeps what it
has by then. ``python -m benchmarks.narrow [--limit SECONDS] [MODEL ...]``; cases of other models stay as they are.

Run on any machine: errors do not depend on its load. Loops are short, since ``torch.compile`` unrolls them.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fuse
from benchmarks.common import RESULTS, ROOT, save
from fuse.graph.loading.load import load

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
SHORT = {
    **dict.fromkeys(("gru_loop", "ligru", "lstm_layernorm", "lstm_loop", "selective_scan", "wkv"), ("seq_length=8",)),
    "crf": ("seq_length=8",),
    "rnnsearch": ("source_length=6", "target_length=6"),
    "decoder_greedy": ("longest=8",),
    "neural_ode": ("steps=8",),
}
LIMIT = 100
"""Seconds of a case, unless told."""


def one(name: str, dtype: str) -> Iterator[tuple[str, float | str]]:
    """Of each way to run a model, the SQNR of its results in decibels, or why there is none."""
    loaded = load(str(ROOT / "models" / f"{name}.py"), settings=SHORT.get(name, ()), real=True)
    narrow = copy.deepcopy(loaded.model).eval().to(DTYPES[dtype])
    args, kwargs = cast((loaded.args, loaded.kwargs), DTYPES[dtype])
    wide_args, wide_kwargs = cast((args, kwargs), torch.float64)
    ways: dict[str, Callable[[], nn.Module]] = {
        "eager": lambda: narrow,
        "fuse": lambda: fuse.compile(narrow),
        "compile": lambda: torch.compile(narrow),  # type: ignore[dict-item]  # it gives a module
        "emulated": lambda: torch.compile(narrow, options={"emulate_precision_casts": True}),  # type: ignore[dict-item]
    }
    with torch.no_grad():
        try:
            exact = results(copy.deepcopy(narrow).double()(*wide_args, **wide_kwargs))
        except RuntimeError as error:  # it makes tensors of a dtype of its own
            yield from dict.fromkeys(ways, str(error).splitlines()[0][:100]).items()
            return
        for way, make in ways.items():
            torch._dynamo.reset()
            try:
                yield way, decibels(results(make()(*args, **kwargs)), exact)
            except Exception as error:  # whatever a peer raises
                yield way, str(error).splitlines()[0][:100]


def cast(values: Any, dtype: torch.dtype) -> Any:
    def to(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(to, values)


def results(found: Any) -> list[Tensor]:
    return [t.double() for t in pytree.tree_leaves(found) if isinstance(t, Tensor)]


def decibels(found: list[Tensor], exact: list[Tensor]) -> float:
    """-20 log10 of the relative Euclidean distance, over all results."""
    off = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)))
    norm = math.sqrt(sum(float(b.square().sum()) for b in exact))
    return round(-20 * math.log10(off / norm), 2) if off and norm else math.inf


def case(name: str, dtype: str, limit: int) -> dict[str, Any]:
    """One model in one dtype, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.narrow", "--one", name, dtype]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        written, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        written, _ = process.communicate()
    found = dict(json.loads(line) for line in written.splitlines())
    return {"model": name, "dtype": dtype, "settings": list(SHORT.get(name, ())), "limit": limit, "sqnr": found}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        for found in one(*sys.argv[2:4]):
            print(json.dumps(found), flush=True)
        return
    given = sys.argv[1:]
    limit = int(given[1]) if given[:1] == ["--limit"] else LIMIT
    named = given[2:] if given[:1] == ["--limit"] else given
    path = RESULTS / "narrow.json"
    measured = json.loads(path.read_text())["cases"] if path.exists() else []
    cases = {(one["model"], one["dtype"]): one for one in measured}
    for name, dtype in itertools.product(named or sorted(p.stem for p in (ROOT / "models").glob("*.py")), DTYPES):
        found = cases[name, dtype] = case(name, dtype, limit)
        print(found, file=sys.stderr, flush=True)
        save("narrow", [cases[key] for key in sorted(cases)])


if __name__ == "__main__":
    main()
