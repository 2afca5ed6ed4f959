"""Made-up captures beyond the captured sizes, for a call whose sizes are out of their range.

    captured at 33, 37 and 34 steps
    a call of 38 steps      102 steps are captured, and 2: calls of 2 to 102 steps need no capture
    a call of 103 steps     167 steps are captured

A made-up call has tensors without data, and nothing is compiled for it. Its graph extends the range of sizes of
:mod:`fuse.runtime.generalising.generalised`. If it cannot be captured (a table ends), nearer sizes are tried. If its
graph has another text, the call itself is captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from math import prod

from torch import nn
from torch.fx import GraphModule

from fuse.errors import FaultWarning
from fuse.graph.fakes.fake_operators import unlogged
from fuse.graph.garbage_collection import collect_new, without_garbage_collection
from fuse.graph.numbers.learned import Learning
from fuse.graph.values.told_values import telling
from fuse.kernel.arithmetic.extents import LEAST_LOWERED
from fuse.kernel.sizes.region_text import Numbers
from fuse.loops.rolling import LEAST_STEPS
from fuse.runtime.autograd.training_of_loss import TrainingOfLoss
from fuse.runtime.generalising.captured_calls import CapturedCall
from fuse.runtime.generalising.generalised import Generalised
from fuse.runtime.generalising.kinds_of_calls import MOST_REACHED, Between, KindOfCalls, Told, numbers_of
from fuse.runtime.guards.call_guards import call_guard
from fuse.runtime.making import Maker, ModelCall
from fuse.runtime.sizes.made_up_calls import graphs_of, made_up_call
from fuse.runtime.sizes.new_sizes import NewSizes
from fuse.runtime.variants.compiled import Compiled

FURTHEST = 1024
"""The largest size of a call for which larger ones are made up."""
FEW_STEPS = LEAST_STEPS + 1
"""Steps in which most loops are rolled as in more: the first one may differ from the others."""
DISTANCE = 64
"""Least distance of a made-up size from the largest one; for large sizes, half of the size. A text of so many tokens
needs no other capture."""
NEAR_DISTANCE = 16
"""The same where a model has no sizes so far out, such as a table of positions with few rows."""
NEAR = 128
"""The largest size within the range that is moved above it, too: a loop of ``DISTANCE`` more steps is captured in a
fifth of a second. With larger sizes, smaller ones are captured first."""

Choose = Callable[[Generalised, Numbers, bool], Numbers | None]
"""Chooses the sizes of a made-up call from a generalised graph, the sizes of a call, and whether to extend it anyway;
None if there are none to choose."""


@without_garbage_collection()
def reached(
    maker: Maker, new_sizes: NewSizes, call: ModelCall, beyond: Between, refuted: Collection[Learning] = ()
) -> Between | None:
    """The generalised graph for a call, after captures further out; the call may still need its own capture.

    The first call of a kind that is out of the range extends it in both directions. So does the first one that reads
    other values than all ``refuted`` ones.
    """
    kind, given = beyond.kind, numbers_of(call.leaves)

    def told(common: Generalised) -> Generalised | None:
        return common.told(maker.model, call.args, call.kwargs)

    first = kind.reaches == MOST_REACHED or (
        bool(refuted) and not any(member.call.made_up for member in beyond.common.members)
    )
    for choose in (*_directions(beyond), near_sizes, these_sizes):
        known = kind.between(given, told, refuted)
        if known is None or (known.within and not first):
            return known
        further = _further_call(maker.model, call, known, choose(known.common, known.sizes, first))
        if further is not None and further.key not in kind.useless:
            _take(maker, new_sizes, further, known, given, told)
    return kind.between(given, told, refuted)


def _directions(beyond: Between) -> tuple[Choose, ...]:
    """The order of directions: long loops are captured, and then followed, at few steps first. Small sizes may be other
    numbers of the model, too, so that it is followed at larger ones."""
    down = least_sizes, few_steps, between_steps
    is_long = max((*beyond.sizes, *(largest for _, largest, _ in beyond.common.bounds()))) > NEAR
    return (*down, largest_sizes) if is_long else (largest_sizes, *down)


def largest_sizes(common: Generalised, sizes: Numbers, anyway: bool) -> Numbers | None:
    """Sizes of a made-up call that is larger than all captured calls, so that ``sizes`` are in their range.

    A size above the range is moved up by a multiple of the step between captured sizes, and so is a size between two
    steps. Other sizes are moved above the range where that is near, between two steps, so that all sizes are known.
    None if no size is above the range or between two steps (unless ``anyway``), or if one is too small or too large.
    """
    found, beyond = [], anyway
    for size, (least, largest, step) in zip(sizes, common.bounds(), strict=True):
        if size > largest or (size - least) % step:
            if not LEAST_LOWERED <= size <= FURTHEST:
                return None
            found.append(_moved_up(size, largest, step, DISTANCE))
            beyond = True
        else:
            further = largest + DISTANCE if largest <= NEAR else size
            found.append(further + (largest <= NEAR and step > 1 and (further - size) % step == 0))
    return tuple(found) if beyond and tuple(found) != sizes else None


def least_sizes(common: Generalised, sizes: Numbers, anyway: bool, fewest: int = LEAST_LOWERED) -> Numbers | None:
    """The least sizes from ``fewest`` on that vary, with those that operators compute from them. None if no size is
    below the range, or between two steps (unless ``anyway``), or if those are known, or ``sizes`` themselves.

    A size between two steps is moved down by a multiple of the step, so that it will be in the range.
    """
    bounds = common.bounds()
    begun = tuple(
        size if (size - had) % step and size > had else had for size, (had, _, step) in zip(sizes, bounds, strict=True)
    )
    steps = [step for *_, step in bounds]
    least = tuple(had - step * max((had - fewest) // step, 0) for had, step in zip(begun, steps, strict=True))
    while not common.are_told(least) and least != begun:
        least = tuple(min(size + step, had) for size, had, step in zip(least, begun, steps, strict=True))
    wanted = any(size < had or (size - had) % step for size, (had, _, step) in zip(sizes, bounds, strict=True))
    known = all(size == had for size, (had, *_) in zip(least, bounds, strict=True))
    return least if (wanted or anyway) and not known and least != sizes else None


def few_steps(common: Generalised, sizes: Numbers, anyway: bool) -> Numbers | None:
    """The least sizes at which loops are rolled."""
    return least_sizes(common, sizes, anyway, FEW_STEPS)


def between_steps(common: Generalised, sizes: Numbers, anyway: bool) -> Numbers | None:
    """The least sizes of the range, with those that are in large steps moved between two steps, so that all sizes are
    known. None if there are no such steps (or not ``anyway``)."""
    bounds = common.bounds()
    found = tuple(least + (step > 1 and largest > NEAR) for least, largest, step in bounds)
    return found if anyway and found != tuple(least for least, *_ in bounds) else None


def near_sizes(common: Generalised, sizes: Numbers, anyway: bool) -> Numbers | None:
    """Sizes with those above the range moved somewhat further up, and those below it halved. None if no size is out of
    the range, or if one is too small or too large."""
    if not all(LEAST_LOWERED <= size <= FURTHEST for size in sizes):
        return None
    found = []
    for size, (least, largest, step) in zip(sizes, common.bounds(), strict=True):
        if size > largest:
            found.append(_moved_up(size, largest, step, NEAR_DISTANCE))
        else:
            down = step * min(size // (2 * step), (size - LEAST_LOWERED) // step)
            found.append(size - down if size < least else size)
    return None if tuple(found) == sizes else tuple(found)


def these_sizes(common: Generalised, sizes: Numbers, anyway: bool) -> Numbers | None:
    """``sizes`` themselves, whose numbers are in an order that no captured call had: later calls may have it, too. None
    if they are served, if their formulas differ, or if one is too small."""
    large = all(size >= LEAST_LOWERED for size in sizes)
    return sizes if large and common.are_told(sizes) and not common.covers(sizes) else None


def _moved_up(size: int, largest: int, step: int, distance: int) -> int:
    """``size`` and a multiple of ``step``, above ``largest`` and ``distance`` or more above ``size``.

    >>> _moved_up(30, 20, 1, 64), _moved_up(30, 20, 8, 64), _moved_up(200, 180, 1, 64)
    (94, 94, 300)
    """
    return size + step * -(-max(largest - size, size // 2, distance) // step)


def _further_call(model: nn.Module, call: ModelCall, beyond: Between, sizes: Numbers | None) -> ModelCall | None:
    """A call like ``call`` at these sizes.

    There are none if no more are allowed, or where comparisons of sizes in ``forward`` are known to have other
    outcomes.
    """
    common = beyond.common
    if sizes is None or beyond.kind.reaches <= 0:
        return None
    like = Between(beyond.kind, common, min(common.had(), key=prod))
    if common.checked and common.met is None and not like.follow(model, call.args, call.kwargs):
        return None
    if common.checked and not (common.met is not None and common.met(*beyond.sizes) and common.met(*sizes)):
        return None
    try:
        return made_up_call(call, common.evaluate(*sizes))
    except RuntimeError:  # a formula that was not checked gives a negative size, or memory does not suffice
        return None


def _take(maker: Maker, new_sizes: NewSizes, further: ModelCall, beyond: Between, given: Numbers, told: Told) -> None:
    """Capture a made-up call, which reads the values of calls like it, and may extend the range of their kind."""
    kind = beyond.kind
    kind.reaches -= 1
    started = time.perf_counter()
    with unlogged(), new_sizes.lowering(further):
        captured = made_up(maker, further, kind, beyond.common.members[-1].call.learning)
    if captured is not None and kind.takes(captured, given, told):
        new_sizes.made_up(further, time.perf_counter() - started)
    else:
        kind.reaches -= MOST_REACHED // 6 - 1
        kind.useless.add(further.key)


def learn(new_sizes: NewSizes, call: ModelCall, between: Between, compiled: Compiled) -> None:
    """Let programs for later sizes be made like that of this call, after the schedules of further sizes: in at most as
    many seconds as captures took."""
    between.learn(compiled)
    until = time.perf_counter() + new_sizes.spent(call)
    learnt = between.common.programs.learnt
    for one in between.samples():
        _rehearse(new_sizes, call, one)
        if time.perf_counter() > until:
            break
    for one in between.ends():
        _rehearse(new_sizes, call, one)
    if between.common.programs.learnt > learnt:
        collect_new()  # the graphs of these samples, which refer to themselves


def _rehearse(new_sizes: NewSizes, call: ModelCall, other: Between) -> None:
    """Schedule the graphs of a call like ``call`` at other sizes."""
    with new_sizes.lowering(made_up_call(call, other.common.evaluate(*other.sizes))):
        other.rehearse()


def made_up(maker: Maker, call: ModelCall, kind: KindOfCalls, read: Learning | None) -> CapturedCall | None:
    """Capture a made-up call; None if that fails, or if it differs from its kind in more than sizes."""
    try:
        return captured_without_data(maker, call, kind, read)
    except FaultWarning:  # the user made warnings errors
        raise
    except Exception:  # of the user's code at these sizes, or a fault in fuse, which must not reach the user
        return None


def captured_without_data(
    maker: Maker,
    call: ModelCall,
    kind: KindOfCalls,
    read: Learning | None,
    each: Callable[[GraphModule], object] = lambda graph: None,
) -> CapturedCall | None:
    """Capture a made-up call; None if it differs from its kind in more than sizes. ``read`` are the values that it
    reads. ``each`` is called with every rewritten graph."""
    with telling(maker.model, read):
        graph, training = graphs_of(maker, call, each)
    if training.joint.own_gradients if training else maker.needs_gradients(call.leaves):
        return None
    signature = graph.meta["signature"]
    guard = call_guard(call.leaves, call.spec, kind.sources, maker.ids(), signature.context)
    if signature.mutated or signature.drawn or not kind.guard.differs_in_sizes(guard):
        return None
    of_loss = TrainingOfLoss.of(training) if training else None
    graphs = of_loss.graphs() if of_loss else (graph,)
    if any(one.meta.get("failed") for one in graphs):
        return None
    return CapturedCall(graphs, guard.integers, of_loss, made_up=True)
