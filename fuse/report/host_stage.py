"""The host work in front of a model's operators, counted separately from its work on the device.

forward  ->  host stage: lines, eager's launches  ->  crossing values  ->  device stage: launches before and after
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.cost import profiles
from fuse.cost.count import count_dispatches
from fuse.errors import FuseError
from fuse.graph.describing import describe
from fuse.graph.host_work import DeviceStage, host_work
from fuse.graph.sources import user_line
from fuse.report.as_eager import EagerRecording
from fuse.report.report import Crossing, HostStage


def host_stage(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    passes: Sequence[str] | None,
    device: str,
) -> HostStage | None:
    """The host stage of a call, or None if it has no separable one."""
    from fuse.report.show import show

    try:
        work = host_work(model, args, kwargs)
        recording = EagerRecording(user_line)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), recording:
            values = work.run(model, args, kwargs)
        report = show(DeviceStage(model, work), (), values, passes=passes, device=device)
    except FuseError:
        return None
    launches = count_dispatches(recording.dispatches, profiles.get(device)).launches
    crosses = tuple(_crossing(name, values[name]) for name in work.crossing if name in values)
    return HostStage((str(work.lines[0]), str(work.lines[1])), launches, crosses, report.before, report.after)


def _crossing(name: str, value: Any) -> Crossing:
    if isinstance(value, Tensor):
        return Crossing(name, describe(value), value.nbytes, learned=False)
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return Crossing(name, type(value).__name__, sum(t.nbytes for t in tensors), learned=not tensors)
