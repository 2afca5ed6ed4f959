"""The forms of a pattern: its operators and inputs, for any shapes, dtypes and constants.

    relu(conv2d(x, weight, bias, padding=const("padding")) + skip)

    relu  <-  add  <-  convolution(x, weight, bias)        steps, from the results to the operands
                   <-  skip                                inputs
    padding: stands in convolution.padding                 slots

A pattern has one form for each choice of alternatives (``either``) and each kind of example. Views and casts depend on
rank and dtype, and are not part of a form. A form only leads to candidates, which are then compared exactly.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils import _pytree as pytree

from fuse import ops
from fuse.errors import CaptureError, FuseError
from fuse.graph.fakes.fake_mode import FakeMode
from fuse.rewrite.patterns import guesses, pattern_cache
from fuse.rewrite.patterns.backward import with_gradients
from fuse.rewrite.patterns.canonical import may_make
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.language import Environment, ManySpec
from fuse.rewrite.patterns.operand_filters import OperandFilter, operand_filter_of
from fuse.rewrite.patterns.terms import BY_STRIDES, KNOWN, LEAF, NUMBER, Term, Terms, below, type_of
from fuse.rewrite.patterns.tracing import Traced, fake_copies, terms_of, trace
from fuse.rewrite.patterns.views import stripped
from fuse.rewrite.surgery import constant_key

InputKey = tuple[str, int]
"""An input of a pattern: its parameter, and its position in the parameter's list (0 for a single tensor)."""

MAX_FORMS = 64
"""The most forms of a pattern: each is searched for in every graph. A pattern with more is refused."""


@dataclass(frozen=True)
class ConstantSlot:
    """The place of a constant: the argument ``constant`` of ``term``, or its operand that is a number.

    ``kind``: whether the value is there unchanged, ``negated``, ``inverted`` or repeated (``spread``).
    """

    term: Term
    constant: str
    kind: str

    def read(self, term: Term) -> Any:
        """The pattern's constant, from the graph's term in place of ``self.term``; LookupError if there is none."""
        if self.constant:
            value = dict(term.constants)[self.constant]
        else:
            number = next((t for t in term.operands if t.name == NUMBER), None)
            if number is None:
                raise LookupError(self.constant)
            value = number.value
        return _WRITTEN[self.kind][1](value)


@dataclass(frozen=True, eq=False)
class Form:
    """One form of a pattern, as terms.

    ``roots``: its results, which are the nodes ``results``. ``lists``: the length of its tensor lists. ``traces``: runs
    of the pattern and its replacement, by constants and layouts of arguments.
    """

    pattern: Pattern
    choices: Mapping[str, int]
    lists: int
    roots: tuple[Term, ...]
    results: tuple[Node, ...]
    slots: Mapping[str, ConstantSlot]
    traces: dict[Hashable, Traced | str] = field(default_factory=dict, repr=False)

    @cached_property
    def steps(self) -> tuple[Term, ...]:
        """The terms that compute something, results first."""
        return tuple(term for term in below(*self.roots) if term.computes)

    @cached_property
    def operand_filters(self) -> Mapping[Term, OperandFilter]:
        """The filter for each step."""
        return {term: operand_filter_of(term) for term in self.steps}

    @cached_property
    def operators(self) -> Mapping[Node, tuple[Term, ...]]:
        """The operators of the pattern, each with its steps."""
        found: dict[Node, list[Term]] = {}
        for term in self.steps:
            found.setdefault(term.origin, []).append(term)
        return {operator: tuple(steps) for operator, steps in found.items()}

    @cached_property
    def keys(self) -> tuple[InputKey, ...]:
        """The keys of all inputs, in the order of the parameters."""
        return tuple(
            (one.name, position)
            for one in self.pattern.parameters
            for position in range(self.lists if isinstance(one.spec, ManySpec) else 1)
        )

    @cached_property
    def read(self) -> tuple[tuple[Term, Term | InputKey, tuple[Term, ...]], ...]:
        """Each step and input, its key in a placement, and the steps that read it, directly or through views."""
        found: dict[Term, list[Term]] = {}
        for step in self.steps:
            for operand in dict.fromkeys(stripped(operand) for operand in step.operands):
                found.setdefault(operand, []).append(step)
        return tuple((term, term.value if term.name == LEAF else term, tuple(steps)) for term, steps in found.items())

    def views_above(self, key: InputKey) -> tuple[Term, ...]:
        """The views and casts through which an input is first read, the outermost first."""
        return self._views_above.get(key, ())

    @cached_property
    def _views_above(self) -> Mapping[InputKey, tuple[Term, ...]]:
        found: dict[InputKey, tuple[Term, ...]] = {}
        for step in self.steps:
            for operand in step.operands:
                views, term = [], operand
                while term.is_view:
                    views.append(term)
                    term = term.operands[0]
                if term.name == LEAF:
                    found.setdefault(term.value, tuple(views))
        return found

    def traced(self, arguments: Sequence[Any], constants: Mapping[str, Any]) -> Traced | str:
        """The pattern run on tensors like ``arguments``, or its error."""
        return self._traced("pattern", self.pattern.function, arguments, constants)

    def replaced(self, arguments: Sequence[Any], constants: Mapping[str, Any]) -> Traced | str:
        """The pattern's replacement run on tensors like ``arguments``, or its error."""
        assert self.pattern.replace is not None
        return self._traced("replace", self.pattern.replace, arguments, constants)

    def differentiated(self, arguments: Sequence[Any], constants: Mapping[str, Any]) -> Traced | str:
        """The pattern and its gradients run on tensors like ``arguments``, or the error."""
        return self._traced("gradients", with_gradients(self.pattern), arguments, constants)

    def _traced(
        self, what: str, function: Callable[..., Any], arguments: Sequence[Any], constants: Mapping[str, Any]
    ) -> Traced | str:
        layouts = [
            None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in pytree.tree_leaves(list(arguments))
        ]
        key = (what, tuple(layouts), constant_key(dict(constants)))
        if key not in self.traces:
            mode = FakeMode()
            try:
                environment = Environment(constants, self.choices)
                self.traces[key] = trace(
                    function, fake_copies(mode, arguments), environment, mode, holds=what == "pattern"
                )
            except CaptureError as error:
                self.traces[key] = str(error)
        return self.traces[key]


@cache
def forms(pattern: Pattern, lists: int) -> tuple[Form, ...]:
    """All forms of ``pattern`` with tensor lists of length ``lists``, the first alternatives first.

    Raises:
        FuseError: the pattern cannot be run, computes nothing, or has a constant whose place cannot be found.
    """
    mode = FakeMode()
    known = known_runs(pattern, lists)
    if known.error:
        raise FuseError(known.error)
    return tuple(_form(pattern, run, choices, lists, mode) for choices, run in known.runs)


def needs(pattern: Pattern) -> tuple[tuple[OperandFilter, ...], ...]:
    """The filters of each form of ``pattern``, without tracing it; empty if the pattern has no forms, so that it is run
    and raises its error."""
    return known_runs(pattern, max(1, takes_lists(pattern))).needs


@dataclass(frozen=True)
class PatternRuns:
    """The stored results for a pattern: a run for each of its forms, and the filters of each form.

    ``error``: why the pattern has no forms. With tensor lists, ``needs`` are the filters that hold for any length.
    """

    runs: tuple[tuple[dict[str, int], guesses.Guess], ...] = ()
    needs: tuple[tuple[OperandFilter, ...], ...] = ()
    error: str = ""


@cache
def known_runs(pattern: Pattern, lists: int) -> PatternRuns:
    """The runs of ``pattern``: stored earlier, or found now."""
    asked = "runs", str(lists), str(MAX_FORMS)
    if content := pattern_cache.find(pattern, *asked):
        known: PatternRuns = pickle.loads(content)  # the user's own cache, which has executable libraries, too
        return known
    try:
        known = _find_runs(pattern, lists)
    except FuseError as error:
        known = PatternRuns(error=str(error))
    pattern_cache.store(pickle.dumps(known), pattern, *asked)
    return known


def _find_runs(pattern: Pattern, lists: int) -> PatternRuns:
    mode = FakeMode()
    examples = [[example] for example in guesses.example_arguments(pattern)] or [[]]
    found: list[tuple[dict[str, int], guesses.Guess]] = []
    needs: list[tuple[OperandFilter, ...]] = []
    seen: set[object] = set()
    for number, given in enumerate(examples):
        for choices, run in runs(pattern, given, lists):
            form = _form(pattern, run, choices, lists, mode)
            again = {(number, fingerprint(form.roots)), (*choices.items(), fingerprint(form.roots, bare=True))}
            if not again & seen:
                found.append((choices, run))
                needs.append(tuple(dict.fromkeys(form.operand_filters.values())))
            seen |= again
            if len(found) > MAX_FORMS:
                raise FuseError(
                    f"pattern {pattern.name!r} has more than {MAX_FORMS} forms; split it into several patterns"
                )
    if takes_lists(pattern):
        longer = _filters_of_longer_lists(pattern, examples[0], lists + 1, mode)
        needs = [tuple(operand_filter for operand_filter in need if operand_filter in longer) for need in needs]
    return PatternRuns(tuple(found), tuple(needs))


def _filters_of_longer_lists(
    pattern: Pattern, given: Sequence[tuple[Any, ...]], lists: int, mode: FakeTensorMode
) -> frozenset[OperandFilter]:
    """The filters of the first form with longer lists; none if the pattern does not run with these."""
    try:
        choices, run = next(runs(pattern, given, lists))
        return frozenset(_form(pattern, run, choices, lists, mode).operand_filters.values())
    except FuseError:
        return frozenset()


def takes_lists(pattern: Pattern) -> int:
    """The shortest tensor list that the pattern accepts; 0 if it has no list parameter."""
    return max((one.spec.at_least for one in pattern.parameters if isinstance(one.spec, ManySpec)), default=0)


def runs(
    pattern: Pattern, given: Sequence[tuple[Any, ...]], lists: int
) -> Iterator[tuple[dict[str, int], guesses.Guess]]:
    """A run for every choice of alternatives; running the pattern shows which there are."""
    waiting: list[dict[str, int]] = [{}]
    while waiting:
        choices = waiting.pop(0)
        run = guesses.guess(pattern, given, lists, choices)
        unset = [(name, count) for name, count in run.alternatives.items() if name not in choices]
        if unset:
            name, count = unset[0]
            waiting = [{**choices, name: position} for position in range(count)] + waiting
        else:
            yield choices, run


def _form(pattern: Pattern, run: guesses.Guess, choices: Mapping[str, int], lists: int, mode: FakeTensorMode) -> Form:
    roots, results = _roots(pattern, run.arguments, Environment(run.constants, choices), mode)
    computing = [term for term in below(*roots) if term.computes]
    if all(_is_view(term) for term in computing):
        raise FuseError(f"pattern {pattern.name!r} computes nothing: views and casts alone are not a pattern")
    if by_strides := next((term for term in computing if _target(term) in BY_STRIDES and _is_own(term)), None):
        raise FuseError(
            f"pattern {pattern.name!r} has `{by_strides.name}`, which depends on how tensors lie in memory; "
            "no pattern can say that, so take its result as a parameter"
        )
    if alone := next((term for term in below(*roots) if term.computes and not term.operands), None):
        raise FuseError(
            f"pattern {pattern.name!r} makes a tensor from nothing (`{alone.name}`), which a graph has as a constant; "
            "take it as a parameter"
        )
    if not _hangs_together(roots):
        raise FuseError(f"pattern {pattern.name!r} falls into parts that share no tensor; make them two patterns")
    slots = {}
    for name, value in run.constants.items():
        if slot := _slot(pattern, run, choices, name, value, roots, mode):
            slots[name] = slot
    return Form(pattern, choices, lists, roots, results, slots)


def _target(term: Term) -> object:
    """The operator that a term was made for."""
    return term.origin.target if isinstance(term.origin, Node) else None


def _is_view(term: Term) -> bool:
    """Whether a step is an operator that only views its operand and has no rule as a view, such as ``diagonal``."""
    return ops.is_view(_target(term)) and _is_own(term)


def _is_own(term: Term) -> bool:
    """Whether a step is the computation of its operator; the view in ``tanh(x).view(4)`` also makes a ``tanh``."""
    target = _target(term)
    return isinstance(target, OpOverload) and term.name in may_make(target)


def _hangs_together(roots: Sequence[Term]) -> bool:
    """Whether every result shares a tensor with another result, directly or indirectly."""
    parts = [{term for term in below(root) if term.name not in KNOWN} for root in roots]
    together, apart = parts[0], parts[1:]
    while near := [part for part in apart if part & together]:
        together = together.union(*near)
        apart = [part for part in apart if not part & together]
    return not apart


def _roots(
    pattern: Pattern, arguments: Sequence[Any], environment: Environment, mode: FakeTensorMode
) -> tuple[tuple[Term, ...], tuple[Node, ...]]:
    arguments = fake_copies(mode, arguments)
    try:
        traced = trace(pattern.function, arguments, environment, mode, holds=True)
    except CaptureError as error:
        raise FuseError(f"pattern {pattern.name!r} ({pattern.source}): {error}") from error
    terms = Terms()
    keys = [
        (one.name, i) for one, value in zip(pattern.parameters, arguments, strict=True) for i in range(_length(value))
    ]
    tensors = pytree.tree_leaves(list(arguments))
    leaves = [terms.leaf(key, type_of(tensor)) for key, tensor in zip(keys, tensors, strict=True)]
    known = terms_of(traced, terms, leaves)
    return tuple(known[node] for node in traced.outputs), traced.outputs


def _length(value: Any) -> int:
    return 1 if isinstance(value, Tensor) else len(value)


# ---- constants -----------------------------------------------------------------------------------------------------


def _same(value: Any) -> Any:
    return value


def _negated(value: Any) -> Any:
    return -value


def _inverted(value: Any) -> Any:
    inverse = 1 / value
    whole = math.isfinite(inverse) and math.isclose(inverse, round(inverse), rel_tol=1e-12)
    return round(inverse) if whole else inverse


def _spread(value: Any) -> Any:
    items = set(value)
    return items.pop() if len(items) == 1 else value


_WRITTEN = {
    "same": (_same, _same),
    "negated": (_negated, _negated),
    "inverted": (lambda value: 1 / value, _inverted),
    "spread": (_same, _spread),
}
"""Kind of a slot -> how the constant is written in the operator, and how it is read from there."""


def _slot(
    pattern: Pattern,
    run: guesses.Guess,
    choices: Mapping[str, int],
    name: str,
    value: Any,
    roots: Sequence[Term],
    mode: FakeTensorMode,
) -> ConstantSlot | None:
    """The slot of the constant ``name``: the change in the terms when its value changes. None if nothing changes."""
    if isinstance(value, str) and (slot := next(_holding(roots, value), None)):
        return slot
    for other in run.others[name]:
        others, _ = _roots(pattern, run.arguments, Environment({**run.constants, name: other}, choices), mode)
        for slot in _differences(roots, others, value, other):
            return slot
        if fingerprint(others) == fingerprint(roots):
            return None
    raise FuseError(
        f"pattern {pattern.name!r}: fuse.const({name!r}) stands in no operator's argument as it is "
        "(nor negated, nor as 1 / c); name the value that does"
    )


def _differences(roots: Sequence[Term], others: Sequence[Term], value: Any, other: Any) -> Iterator[ConstantSlot]:
    """The slots at which the first terms have ``value`` and the second ``other``."""
    stack = list(zip(roots, others, strict=False))
    seen = set()
    while stack:
        one, two = stack.pop(0)
        if one.name != two.name or len(one.operands) != len(two.operands) or one in seen:
            continue
        seen.add(one)
        if one.computes:
            for (name, old), (_, new) in zip(one.constants, two.constants, strict=False):
                if old != new and (kind := _kind(old, new, value, other)):
                    yield ConstantSlot(one, name, kind)
        pairs = list(zip(one.operands, _aligned(one, two), strict=True))
        for old_term, new_term in pairs:
            if old_term.name == new_term.name == NUMBER and (
                kind := _kind(old_term.value, new_term.value, value, other)
            ):
                yield ConstantSlot(one, "", kind)
        stack.extend(pairs)


def _aligned(one: Term, two: Term) -> tuple[Term, ...]:
    """The operands of ``two`` in the order of ``one``, if sorting had swapped them."""
    names, others = ([operand.name for operand in term.operands] for term in (one, two))
    return two.operands[::-1] if one.commutative and others != names and others == names[::-1] else two.operands


def _kind(old: Any, new: Any, value: Any, other: Any) -> str | None:
    """How ``old`` and ``new`` are written for ``value`` and ``other``; None if they do not correspond."""
    numbers = isinstance(value, (int, float)) and not isinstance(value, bool)
    if old == value and new == other:
        return "same"
    if isinstance(old, tuple):
        return "spread" if set(old) == {value} and set(new) == {other} else None
    if numbers and old == -value and new == -other:
        return "negated"
    inverted = numbers and value and other and math.isclose(old, 1 / value) and math.isclose(new, 1 / other)
    return "inverted" if inverted else None


def _holding(roots: Sequence[Term], value: Any) -> Iterator[ConstantSlot]:
    """The slots that hold ``value``, for a value without variants, such as a string."""
    for term in below(*roots):
        for name, held in term.constants:
            if term.computes and held == value:
                yield ConstantSlot(term, name, "same")


def fingerprint(roots: Sequence[Term], bare: bool = False) -> str:
    """A text that is equal for equal terms of different tables; ``bare``: without constants, views and types."""
    numbers: dict[Term, int] = {}
    lines = []
    for term in below(*(map(stripped, roots) if bare else roots)):
        if not (bare and term.is_view):
            numbers[term] = len(numbers)
    for term in numbers:
        operands = [numbers[stripped(operand) if bare else operand] for operand in term.operands]
        constants = term.constants if term.name == LEAF or not bare else ()
        lines.append(f"{term.name} {operands} {constants} {'' if bare else term.type}")
    return "\n".join(lines)
