"""Casts by user line: how many eager launches, the bytes they move, and how many the passes leave.

Microseconds are modelled: a launch, or the bytes at the device's bandwidth where that takes longer. A cast inside a
fused kernel launches nothing and is not counted after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from fuse.cost.profiles import DeviceProfile
from fuse.cost.work import bytes_of
from fuse.graph.describing import dtype_name
from fuse.graph.signature import Dispatch
from fuse.rewrite import nested

aten = torch.ops.aten


@dataclass(frozen=True)
class CastLine:
    """The casts from one dtype to another at one line; ``bytes`` and ``microseconds`` are those of eager."""

    source: str
    casts: str
    before: int
    after: int
    bytes: int
    microseconds: float


def cast_lines(dispatches: Sequence[Dispatch], graph: GraphModule, profile: DeviceProfile) -> tuple[CastLine, ...]:
    """The lines with casts, the most bytes first."""
    before: dict[tuple[str, str], list[int]] = {}
    for one in dispatches:
        if one.op is aten._to_copy.default and (casts := _casts(one.args[0], one.result)):
            before.setdefault((one.source, casts), []).append(bytes_of(one.args[0]) + bytes_of(one.result))
    after: dict[tuple[str, str], int] = {}
    for body, steps in nested.walk(graph):
        for node in body.graph.find_nodes(op="call_function", target=aten._to_copy.default):
            if casts := _casts(node.args[0].meta["val"], node.meta["val"]):
                key = (str(node.meta.get("source") or ""), casts)
                after[key] = after.get(key, 0) + steps
    found = [
        CastLine(
            *key,
            len(before.get(key, ())),
            after.get(key, 0),
            sum(before.get(key, ())),
            1e6 * sum(max(profile.launch_seconds, moved / profile.bytes_per_second) for moved in before.get(key, ())),
        )
        for key in dict.fromkeys([*before, *after])
    ]
    return tuple(sorted(found, key=lambda one: -one.bytes))


def _casts(old: object, new: object) -> str:
    """``float32 to bfloat16``; empty where the dtype stays."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old.dtype == new.dtype:
        return ""
    return f"{dtype_name(old.dtype)} to {dtype_name(new.dtype)}"
