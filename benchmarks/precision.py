"""All models of ``models/`` in bf16 and f16: error of the result, and what has to stay in float32 for 40 dB.

    fuse.check.precision.keep.recommend(model, dtype, sqnr>=40)  ->  nothing kept, all found kept, and that fused

Run on any machine: errors do not depend on its load. A model that cannot be captured in a dtype, or where float32 does
not meet the target either, has the reason.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from benchmarks.common import ROOT, save
from fuse.check.precision.errors import Errors, PrecisionTarget
from fuse.check.precision.keep import recommend
from fuse.errors import FuseError
from fuse.graph.loading.load import load

TARGET = "sqnr>=40"
SHORTER = {"ligru": ("seq_length=64",)}
"""Constants of models whose default length takes minutes."""


def case(name: str, dtype: str) -> dict[str, Any]:
    settings = SHORTER.get(name, ())
    given = "".join(f" --set {one}" for one in settings)
    found: dict[str, Any] = {
        "model": name,
        "dtype": dtype,
        "command": f"fuse precision models/{name}.py --dtype {dtype}{given}",
    }
    loaded = load(str(ROOT / "models" / f"{name}.py"), settings=settings, real=True)
    started = time.perf_counter()
    try:
        made = recommend(loaded.model, loaded.args, loaded.kwargs, dtype, PrecisionTarget.parse(TARGET))
    except (FuseError, RuntimeError) as error:
        return {**found, "reason": str(error).splitlines()[0]}
    return {
        **found,
        "before": decibels(made.before),
        "after": decibels(made.after),
        "fused": decibels(made.confirmed),
        "keep": list(made.precision.keep) if made.precision else None,
        "reason": made.reason,
        "launches": [made.plain.launches, made.kept.launches] if made.plain and made.kept else None,
        "bytes": [made.plain.bytes, made.kept.bytes] if made.plain and made.kept else None,
        "trials": made.trials,
        "seconds": time.perf_counter() - started,
    }


def decibels(found: Errors | None) -> float | None:
    """SQNR to a tenth; None where there is none, or nothing differs."""
    return round(found.sqnr, 1) if found is not None and math.isfinite(found.sqnr) else None


def main() -> None:
    cases = []
    for path in sorted((ROOT / "models").glob("*.py")):
        for dtype in ("bf16", "f16"):
            cases.append(case(path.stem, dtype))
            print(cases[-1], file=sys.stderr, flush=True)
    save("precision", cases)


if __name__ == "__main__":
    main()
