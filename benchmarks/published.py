"""Is a pattern of the library faster than the passes without it, and what does it cost to look for all of them?

    NAME ...   fused with the pattern / fused without it, at sizes that models have, interleaved, the best of each
    costs      the time to look for all patterns in an unrolled LSTM, beside the time to capture it

Times are of this process on the processor. Patterns that leave no fewer launches have the same kernels either way. Run
it as::

    python -m benchmarks.published [costs | NAME ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import fuse
from benchmarks.patterns import loop
from fuse.graph.function import Function
from fuse.passes.match_patterns import prepare
from fuse.rewrite.patterns import registry
from fuse.rewrite.patterns.matching import match
from tests.passes.patterns.published import PUBLISHED

ROUNDS, SECONDS = 9, 0.03
OTHER = "NearestUpsample"
"""A pattern that none of the structures has: without the one that is asked about."""

r = torch.randn

SIZES: dict[str, list[tuple[Tensor, ...]]] = {
    "LabelSmoothing": [
        (r(4, 16), torch.randint(16, (4,))),
        (r(64, 1000), torch.randint(1000, (64,))),
        (r(512, 32000), torch.randint(32000, (512,))),
    ],
    "FocalLoss": [(x, (r(x.shape) > 0).float()) for x in (r(4, 16), r(256, 80), r(20000, 80))],
    "AlibiBias": [
        (r(b, h, t, t), torch.rand(h), torch.arange(t)) for b, h, t in ((1, 4, 8), (1, 16, 128), (2, 16, 512))
    ],
    "DecayGate": [(r(h), r(b, t, h), r(h)) for b, t, h in ((1, 1, 32), (2, 64, 32), (4, 512, 32))],
    "RotaryOfComplex": [
        (r(b, h, t, d), torch.polar(torch.ones(t, d // 2), r(t, d // 2)))
        for b, h, t, d in ((2, 4, 5, 8), (1, 32, 64, 128), (2, 32, 256, 128))
    ],
    "TopExperts": [(r(n, 8),) for n in (1, 256, 8192)],
}


NODES = (5_000, 10_000, 20_000)


def costs() -> None:
    """Capture a loop, then look for every pattern in it."""
    patterns = registry.registered()
    match(loop(500), patterns, prepare)
    for nodes in NODES:
        started = time.process_time()
        graph = loop(nodes)
        captured = time.process_time()
        matched = sum(one.kind == "matched" for one in match(graph, patterns, prepare))
        looked = time.process_time()
        told = f"captured in {captured - started:.2f} s, {len(patterns)} patterns in {looked - captured:.2f} s"
        print(f"{nodes:,} operators: {told}, {matched} matches")


def main(names: Sequence[str]) -> None:
    if list(names) == ["costs"]:
        return costs()
    for name in names or SIZES:
        for given in SIZES[name]:
            compiled = [_compiled(name, given, wanted) for wanted in (False, True)]
            best = [min(times) for times in zip(*(_round(compiled, given) for _ in range(ROUNDS)), strict=True)]
            shape = "x".join(map(str, given[0].shape))
            print(f"{name:<18}{shape:<18}{best[0] * 1e6:>10.1f} us{best[1] * 1e6:>10.1f} us  {best[0] / best[1]:.2f}")


def _compiled(name: str, given: tuple[Tensor, ...], wanted: bool) -> Callable[..., object]:
    function = PUBLISHED[name].function
    with registry.alone(registry.find(name if wanted else OTHER)), torch.no_grad():
        fused = fuse.compile(Function(function))
        fused(*given)
        assert fused.last_run is not None
        assert not fused.last_run.fallbacks
    return fused


def _round(compiled: Sequence[Callable[..., object]], given: tuple[Tensor, ...]) -> list[float]:
    found = []
    with torch.no_grad():
        for one in compiled:
            one(*given)
            calls, started = 0, time.process_time()
            while time.process_time() - started < SECONDS:
                one(*given)
                calls += 1
            found.append((time.process_time() - started) / calls)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
