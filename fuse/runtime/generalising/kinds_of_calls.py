"""Kinds of calls: captured calls of a model that differ in sizes only, and the graph or program for a further size.

x [50, 3, 64]  x [20, 5, 64]  ...           a kind, with the graphs that its calls have in common
x [50, 3, 64]  with gradients               another kind
x [50, 3]                                   another kind
x [37, 4, 64]                               of the first kind: between the captured sizes, or beyond them
x [1, 1, 64], 7    x [1, 1, 64], 8          one kind: an integer argument counts as a size
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fuse.graph.numbers.learned import Learning, contradict
from fuse.kernel.sizes.region_text import Numbers
from fuse.kernel.sizes.sized import is_outdated
from fuse.runtime.autograd.training import SizedTraining, Training
from fuse.runtime.autograd.training_of_loss import TrainingOfLoss
from fuse.runtime.generalising.captured_calls import CapturedCall, CapturedGraphs, learning_of
from fuse.runtime.generalising.generalised import Generalised, generalised
from fuse.runtime.generalising.number_formulas import FEWEST_OF_ONE_SIZE
from fuse.runtime.guards.call_guards import CallGuard, integers_of, sources_of, tensor_check
from fuse.runtime.guards.call_keys import Key
from fuse.runtime.guards.state_guard import StateGuard
from fuse.runtime.programs.program import Program
from fuse.runtime.programs.schedule import schedule
from fuse.runtime.resizing.resized import resized
from fuse.runtime.resizing.schedule_numbers import SizedPart
from fuse.runtime.resizing.sized_programs import SizedProgram
from fuse.runtime.size_uses.probing_sizes import sample_sizes
from fuse.runtime.variants.compiled import Compiled

MOST_CAPTURED = 48
"""Most captured calls of a kind that are compared; beyond, the oldest is dropped."""
MOST_KINDS = 8
"""Most kinds of calls that are kept for one state of the model."""
MOST_REACHED = 12
"""Most captures of a kind at larger or smaller sizes than called; a useless one counts as ``MOST_REACHED // 6``."""
MOST_FOLLOWED = 3
"""Most failed attempts to generalise a kind of calls."""
MOST_UNLIKE = 3
"""Failed attempts to generalise the integer arguments of a kind of calls, after which they count as plain values."""

Told = Callable[[Generalised], Generalised | None]
"""Follows ``forward`` to find the formulas of all sizes of a generalised graph; None if it does not tell them."""


@dataclass(eq=False)
class KindOfCalls:
    """Captured calls that differ in sizes only, and their generalised graphs.

    Attributes:
        guard: the guard of the first call.
        facts: dtype, rank, device and similar facts of the tensors of a call.
        sources: origins of the placeholders' tensors.
        tensors: the ``id`` of each tensor of the model.
        reaches: captures at made-up sizes that may still be made.
        useless: made-up calls that could not be captured, or had another graph.
        unlike: why a call of this kind was not given the graph of others; empty if none needed to be told.
        _probable: formulas for the last text that nothing checks yet.
        _untold: texts with sizes that ``forward`` does not tell.
        _unlike_sizes: failed attempts to generalise integers; after :data:`MOST_UNLIKE`, only calls with the same
            integers are compared.
        _held: tensors that do not come with a call.
        _check: checks their facts and sizes, which ``module.double()`` changes.
    """

    guard: CallGuard
    facts: tuple[Any, ...]
    sources: tuple[int | Tensor, ...]
    tensors: frozenset[int]
    reaches: int = MOST_REACHED
    useless: set[Key] = field(default_factory=set)
    unlike: str = ""
    _held: dict[int, Tensor] = field(default_factory=dict)
    _check: Callable[..., bool] = field(default_factory=lambda: tensor_check(()))
    _waiting: list[CapturedCall] = field(default_factory=list)
    _captured: list[CapturedGraphs] = field(default_factory=list)
    _common: list[Generalised] = field(default_factory=list)
    _probable: Generalised | None = None
    _untold: set[str] = field(default_factory=set)
    _in_vain: int = 0
    _unlike_sizes: int = 0

    def add(self, captured: CapturedCall, held: Sequence[Tensor]) -> None:
        """Add a captured call; ``held`` are tensors that do not come with the call.

        Its text and numbers are computed when a call of another size comes.
        """
        self._waiting.append(captured)
        before = len(self._held)
        self._held |= {id(tensor): tensor for tensor in held}
        if len(self._held) > before:
            self._check = tensor_check(tuple(self._held.values()))

    def graphs(self) -> tuple[GraphModule, ...]:
        """The graphs of the last captured call."""
        known = (*(one.call for one in self._captured), *self._waiting)
        return known[-1].graphs if known else ()

    def learning(self) -> Learning | None:
        """The values that the last captured call read."""
        graphs = self.graphs()
        return learning_of(graphs) if graphs else None

    def holds(self) -> bool:
        """Whether the tensors that do not come with a call still have their dtypes, sizes and devices."""
        return self._check(*self._held.values())

    def compares(self) -> bool:
        """Whether a call of another size may have a graph of others, or formulas that are not checked yet."""
        return bool(self._common or self._waiting or self._probable)

    def between(self, given: Numbers, told: Told, refuted: Collection[Learning] = ()) -> Between | None:
        """The generalised graph for a call with these integers and layouts (:func:`numbers_of`); ``within`` is False
        if the sizes are out of range. ``told`` follows ``forward`` where sizes have no formula yet. The call does not
        read the values of graphs with ``refuted`` ones."""
        if self._waiting and self._in_vain < MOST_FOLLOWED:
            waiting = [one for call in self._waiting if (one := call.of_expected_loss()) is not None]
            added = [text for call in waiting if (text := call.as_text()) is not None]
            now = (one for one in (*self._captured, *added) if not any(map(is_outdated, one.call.graphs)))
            self._captured = list(now)[-MOST_CAPTURED:]
            groups = list(self._groups())
            made = [common for graphs in groups if (common := generalised(graphs)) is not None]
            kept = [common for one in made if (common := self._as_before(one)) is not None]
            self._common = [common for one in kept if (common := self._with_formulas(one, told)) is not None]
            texts = {common.members[-1].text for common in self._common}
            untold = bool(self._captured) and self._captured[-1].text not in texts
            self._probable = generalised(groups[0], FEWEST_OF_ONE_SIZE - 1) if untold else None
        self._waiting.clear()
        facts = [learning.facts() for learning in refuted]
        found = []
        for common in self._common:
            if facts and common.facts in facts:
                continue
            sizes = common.sizes(given)
            if sizes is not None and (common.met is None or common.met(*sizes)):
                found.append(Between(self, common, sizes, common.covers(sizes)))
        probable = self._probable
        if not found and probable is not None and probable.facts not in facts:
            sizes = probable.sizes(given)
            return None if sizes is None else Between(self, probable, sizes, False)
        return max(found, key=lambda one: one.within, default=None)

    def _with_formulas(self, common: Generalised, told: Told) -> Generalised | None:
        """``common`` with formulas for all sizes; None if ``forward`` does not tell them, which is asked once."""
        if not common.unknown:
            return common
        text = common.members[-1].text
        try:
            found = told(common) if text not in self._untold else None
        except Exception:  # a fault in fuse, which must not reach the user
            found = None
        if found is None:
            self.unlike = common.unfollowed or "forward does not tell all sizes that it computes"
            self._untold.add(text)
        return found

    def takes(self, made_up: CapturedCall, given: Numbers, told: Told) -> bool:
        """Add a made-up call, if it becomes a member of a generalised graph; ``given`` are the layouts of a call for
        which it was made up."""
        before = self._captured, self._common, self._probable
        self._waiting.append(made_up)
        self.between(given, told)
        if any(one.call is made_up for common in self._common for one in common.members):
            return True
        self._captured, self._common, self._probable = before
        return False

    def _groups(self) -> Iterator[list[CapturedGraphs]]:
        """For each text, the captured calls that are compared, those with the text last; the last call's come first."""
        apart = self._unlike_sizes >= MOST_UNLIKE

        def kind(one: CapturedGraphs) -> tuple[Numbers, frozenset[int]]:
            training = one.call.training
            return one.call.integers if apart else (), training.rewritten.missing if training else frozenset()

        last = {(one.text, kind(one)): one.call.learning for one in self._captured}
        for text, same in dict.fromkeys((one.text, kind(one)) for one in reversed(self._captured)):
            read = last[text, same]
            alike = (one for one in self._captured if kind(one) == same)
            compared = (one for one in alike if not contradict(one.call.learning, read))
            yield sorted(compared, key=lambda one: (one.text == text, not one.call.made_up))

    def _as_before(self, common: Generalised) -> Generalised | None:
        """``common``, if the comparisons of ``forward`` that are known hold for one more member.

        If they do not, or if a graph of another text now lies between the members, the same with fewer members; None
        if there is one between these, too.
        """
        for before in self._common:
            if before.members[-1].text == common.members[-1].text and before.relation == common.relation:
                common = replace(common, programs=before.programs, followed=before.followed)
                if common.unknown:
                    known = replace(common, derived=before.derived)
                    if not known.gives(known.members):
                        return common
                    common = known
                if before.met is None or before.followed is None or common.decide(before.followed):
                    return common
                fewer = replace(before, others=common.others)
                return fewer if fewer.decide(before.followed) else None
        return common

    def give_up(self, common: Generalised) -> None:
        """Drop a generalised graph that cannot be used."""
        self._common = [one for one in self._common if one is not common]
        if common.varies_in_integers and self._unlike_sizes < MOST_UNLIKE:
            self._unlike_sizes += 1
        else:
            self._in_vain += 1


@dataclass(frozen=True)
class Between:
    """A generalised graph for a call with these sizes.

    Not ``within`` if it does not serve them: they are beyond those of captured calls, they put numbers into an order
    that no captured call had, or there are too few captured calls.
    """

    kind: KindOfCalls
    common: Generalised
    sizes: tuple[int, ...]
    within: bool = True

    def follow(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether comparisons of sizes in ``forward`` are known and hold; runs ``forward`` if they are not known."""
        if self.common.met is None and not self.common.follow(model, args, kwargs, self.sizes):
            self.kind.unlike = (
                self.common.unfollowed or "forward compares sizes or counts steps, which tells them apart"
            )
            self.kind.give_up(self.common)
            return False
        return self.common.met is not None and self.common.met(*self.sizes)

    @cached_property
    def all_sizes(self) -> Numbers:
        """The sizes and those derived from them, of which all numbers are polynomials."""
        return self.common.all_sizes(*self.sizes)

    @cached_property
    def beyond(self) -> bool:
        """Whether a size is less, or more, than it was in all captured calls, or between the steps of all of them; or
        whether an order of numbers is new."""
        bounds = zip(self.sizes, self.common.bounds(), strict=True)
        apart = any(not least <= size <= most or (size - least) % step for size, (least, most, step) in bounds)
        return apart or not self.common.ranges.include_orders(self.sizes)

    def is_bounded(self) -> bool:
        """Whether this call probably gets a program without graphs; a kernel may still not serve it."""
        return self.within and self.common.programs.bounded(self.all_sizes)

    @cached_property
    def programs(self) -> tuple[SizedProgram, ...] | None:
        """The programs of this call without graphs, one for each graph; None if there are none yet."""
        if not self.within:
            return None
        try:
            return self.common.programs.at(self.all_sizes)
        except Exception:  # a fault in fuse must not reach the user
            self.common.programs.give_up()
            return None

    def program(self) -> SizedProgram | Training | None:
        """The program of this call, or its training, without graphs; None if there is none yet."""
        if self.programs is None:
            return None
        like = self.common.members[-1].call
        if like.training is None:
            return self.programs[0]
        forward, backward = self.programs
        return like.training.at_sizes(SizedTraining(forward, backward, self._resized))

    def learns(self) -> bool:
        """Whether a program is to be made now, because those for later sizes may be made from it."""
        return self.within and self.common.programs.learns(self.all_sizes)

    def learn(self, compiled: Compiled) -> None:
        """Add the program of this call, which was made from its graphs."""
        if compiled.training is not None:
            self._add(TrainingOfLoss.of(compiled.training).parts)
        elif compiled.graph is not None and isinstance(compiled.program, Program):
            part = SizedPart(compiled.program.schedule, compiled.graph.meta["signature"])
            self._add(lambda: (part,))

    def ends(self) -> list[Between]:
        """Calls at captured sizes beyond those for which programs are known."""
        had = [Between(self.kind, self.common, sizes) for sizes in self.common.had()]
        return [one for one in had if self.common.programs.beyond(one.all_sizes) and self.common.covers(one.sizes)]

    def samples(self) -> Iterator[Between]:
        """Further calls between the captured ones, as long as their programs help to make those of later sizes.

        Those between the user's calls come first: far beyond them, a library may run what a kernel runs here.
        """
        called, all_sizes = (sample_sizes(self.common.bounds(made_up)) for made_up in (False, True))
        for sizes in dict.fromkeys(chain(called, all_sizes)):
            one = Between(self.kind, self.common, sizes)
            is_served = self.common.covers(sizes) and self.common.met and self.common.met(*sizes)
            if sizes != self.sizes and is_served and one.learns():
                yield one

    def rehearse(self) -> None:
        """Schedule the graphs of this call, which nobody made, without a program."""
        if (made := self.captured()) is not None:
            training, graphs = made.training, made.graphs
            if training is not None:
                self._add(lambda: training.parts(graphs))
            else:
                self._add(lambda: (SizedPart(schedule(graphs[0]), graphs[0].meta["signature"]),))

    def _add(self, parts: Callable[[], tuple[SizedPart, ...]]) -> None:
        try:
            self.common.programs.learn(self.all_sizes, parts())
        except Exception:  # a fault in fuse must not reach the user
            self.common.programs.give_up()

    def captured(self) -> CapturedCall | None:
        """The graphs of this call, without a capture; None if a view has another layout than the formulas give."""
        try:
            return CapturedCall(self._resized(), self._integers, self.common.members[-1].call.training)
        except Exception:  # NotResized, or a fault in fuse, which must not reach the user
            self.kind.give_up(self.common)
            return None

    @property
    def _integers(self) -> Numbers:
        return self.common.evaluate(*self.sizes)[: len(self.common.members[-1].call.integers)]

    def _resized(self) -> tuple[GraphModule, ...]:
        numbers = self.common.evaluate(*self.sizes)
        return resized(self.common.members[-1].call.graphs, numbers[len(self._integers) :])


class KindsOfCalls:
    """The kinds of captured calls of a model, by the state of the model."""

    def __init__(self) -> None:
        self._by_state: WeakKeyDictionary[StateGuard, list[KindOfCalls]] = WeakKeyDictionary()

    def add(
        self, state: StateGuard, compiled: Compiled, leaves: Sequence[Any], model: nn.Module, tensors: frozenset[int]
    ) -> None:
        """Add a captured call with these leaves, if the variant depends on sizes only; ``tensors`` has the ``id`` of
        each tensor of the model."""
        captured = CapturedCall.of(compiled)
        if captured is None:
            return
        kinds = self._by_state.setdefault(state, [])
        facts = facts_of(leaves)
        alike = (one for one in kinds if one.facts == facts and one.guard.differs_in_sizes(compiled.guard))
        found = next((one for one in alike if one.holds()), None)
        if found is None:
            sources = sources_of(captured.graphs[0].meta["signature"].inputs, model, len(leaves))
            found = KindOfCalls(compiled.guard, facts, tuple(sources), tensors)
            kinds.insert(0, found)
            del kinds[MOST_KINDS:]
        found.add(captured, compiled.guard.state)

    def find(
        self, states: Iterable[StateGuard], leaves: Sequence[Any], spec: Any, current_modes: tuple[Any, ...]
    ) -> KindOfCalls | None:
        """The kind of a call with these leaves and this structure; None if there is none."""
        facts = facts_of(leaves)
        for state in states:
            for kind in self._by_state.get(state, ()):
                alike = kind.facts == facts and kind.guard.in_context()
                if alike and kind.guard.fits_at_other_sizes(leaves, spec, current_modes, kind.tensors) and kind.holds():
                    return kind
        return None


def facts_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The facts about the tensors of a call that operators depend on, sizes left out; None for other leaves."""
    return tuple(
        (type(leaf), leaf.dtype, leaf.dim(), leaf.device, leaf.requires_grad, torch._C._dispatch_keys(leaf))
        if isinstance(leaf, Tensor)
        else None
        for leaf in leaves
    )


def numbers_of(leaves: Sequence[Any]) -> Numbers:
    """The integers of a call, and the sizes and strides of its tensors in the order of the first numbers of its graph.

    >>> numbers_of([torch.ones(2, 3), 4, torch.ones(5)])
    (4, 2, 3, 3, 1, 5, 1)
    """
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    layouts = (number for tensor in tensors.values() for number in (*tensor.shape, *tensor.stride()))
    return (*integers_of(leaves), *layouts)
