"""Measure the peak of the memory that a call holds from torch's allocator."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_allocated(function: Callable[[], object]) -> int:
    """The most bytes that a call holds at once from torch's CPU allocator.

    Its results count; tensors that existed before the call do not.

    >>> import torch
    >>> x = torch.ones(256)
    >>> peak_allocated(lambda: x.exp() + 1) // 1000  # kilobytes, and a few bytes of the number
    2
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = function()
    del result
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peak = live = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak
