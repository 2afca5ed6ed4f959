"""Find arguments with which a pattern runs, to see its operators before there is a graph.

    x, weight, bias of conv2d     ->     f32[8, 8, 8, 8], f32[8, 8, 8, 8], f32[8]

Any shapes will do, as long as the function runs with them: at each candidate, the pattern is traced again with the
shapes, dtypes and constants there. ``examples`` and ``fuse.tensor`` provide what cannot be guessed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.errors import FuseError
from fuse.rewrite.patterns.definition import Pattern, PatternParameter
from fuse.rewrite.patterns.language import UNSET, Environment, ManySpec, TensorSpec
from fuse.rewrite.patterns.tracing import why_not
from fuse.rewrite.view_layouts import without_data

SIZE = 8
TRIES = 2_000
"""The most arguments tried: each runs the pattern on tensors without data."""
MAX_SURPRISES = 3
"""The most arguments that differ in kind from the others: their combinations grow with its power."""
MAX_GUESSED = 2
"""The most constants that are guessed independently; further ones take the last one's value."""

_KINDS: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = (
    (torch.float32, (SIZE, SIZE)),
    (torch.float32, (SIZE, SIZE, SIZE, SIZE)),
    (torch.float32, (SIZE,)),
    (torch.float32, (1,)),
    (torch.float32, (SIZE, SIZE, SIZE)),
    (torch.int64, (SIZE,)),
    (torch.bool, (SIZE, SIZE)),
    (torch.int64, (SIZE, SIZE)),
    (torch.bool, (1,)),
)
"""Dtype and shape of guessed tensors; the first ones are tried for all tensors of a pattern at once."""

_UNIFORM = 3

_NUMBERS: tuple[Any, ...] = (1009, 5, 1, 0, True, torch.float64)
"""Guesses for a constant. An unusual number is found most reliably in the terms."""


@dataclass(frozen=True)
class Guess:
    """Arguments and constants with which a pattern runs.

    ``others``: further values for each constant. ``alternatives``: name of each ``either`` in the run -> its number of
    alternatives.
    """

    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    others: Mapping[str, tuple[Any, ...]]
    alternatives: Mapping[str, int]


def example_arguments(pattern: Pattern) -> list[tuple[Any, ...]]:
    """The argument lists of ``examples()``, as meta tensors; none if the pattern has no examples.

    Raises:
        FuseError: the examples are not tensors (and lists of tensors) for the pattern's parameters.
    """
    if pattern.examples is None:
        return []
    with torch.random.fork_rng(devices=[]):  # the model's first call draws from this generator afterwards
        given = pattern.examples()
    listed = [(one,) if isinstance(one, Tensor) else one for one in (given if isinstance(given, list) else [given])]
    wanted = len(pattern.parameters)
    for arguments in listed:
        if not isinstance(arguments, tuple) or len(arguments) != wanted:
            raise FuseError(
                f"pattern {pattern.name!r}: examples() must return tuples of {wanted} tensors, or a list of such"
            )
    return [tuple(pytree.tree_map_only(Tensor, without_data, list(one))) for one in listed]


def guess(pattern: Pattern, given: Sequence[tuple[Any, ...]], count: int, choices: Mapping[str, int]) -> Guess:
    """Arguments and constants with which ``pattern`` runs if it takes the alternatives ``choices``.

    ``given``: argument lists to try instead of guesses. ``count``: the length of tensor lists.

    Raises:
        FuseError: nothing that was tried runs; the message says what to add.
    """
    search = _Search(pattern, choices)
    found = search.first(given or _arguments(pattern.parameters, count))
    if found is None:
        tried, remedy = ("its examples", "fuse.const(name, example)") if given else ("any guess", "examples()")
        raise FuseError(
            f"pattern {pattern.name!r} ({pattern.source}) does not run with {tried}; "
            f"give it {remedy} that it runs with ({search.reason})"
        )
    if all(found.others.values()):
        return found
    nearby = search.first(_neighbours(pattern.parameters, found.arguments), with_others=True)
    return nearby or found


@dataclass
class _Search:
    """Tries arguments and constants; ``reason`` is the first error."""

    pattern: Pattern
    choices: Mapping[str, int]
    reason: str = ""

    def first(self, candidates: Iterable[Sequence[Any]], with_others: bool = False) -> Guess | None:
        """The first arguments and constants that run; ``with_others``: constants must run with other values, too."""
        for arguments in itertools.islice(candidates, TRIES):
            for guess in self._guesses(arguments):
                if not with_others or all(guess.others.values()):
                    return guess
        return None

    def _guesses(self, arguments: Sequence[Any]) -> Iterator[Guess]:
        """Guesses for ``arguments``, with the constants that a run asks for."""
        usual = _Constants(_NUMBERS[:1])
        yield from self._tried(arguments, usual)
        if usual.guessed:
            lists = itertools.product(_NUMBERS, repeat=min(usual.guessed, MAX_GUESSED))
            for chosen in itertools.islice(lists, 1, None):
                yield from self._tried(arguments, _Constants(chosen))

    def _tried(self, arguments: Sequence[Any], constants: _Constants) -> Iterator[Guess]:
        environment = Environment({}, self.choices, constants)
        failure = why_not(self.pattern.function, arguments, environment)
        self.reason = self.reason or failure or ""
        if failure is None:
            others = _others(self.pattern, arguments, constants.values, self.choices)
            yield Guess(tuple(arguments), constants.values, others, environment.alternatives)


def _others(
    pattern: Pattern, arguments: Sequence[Any], constants: Mapping[str, Any], choices: Mapping[str, int]
) -> dict[str, tuple[Any, ...]]:
    return {
        name: tuple(
            other
            for other in _variants(value)
            if why_not(pattern.function, arguments, Environment({**constants, name: other}, choices)) is None
        )
        for name, value in constants.items()
    }


def _variants(value: Any) -> tuple[Any, ...]:
    """Other values for a constant that has ``value``, to find its place in the terms."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 4, value + 1, value - 1)
    if isinstance(value, float):
        return (value * 1.5, value + 1)
    if isinstance(value, (tuple, list)):
        return tuple(type(value)(items) for items in zip(*(_variants(item) for item in value), strict=False))
    if isinstance(value, torch.dtype):
        return (torch.float16 if value != torch.float16 else torch.float64,)
    return ()


def _arguments(parameters: Sequence[PatternParameter], count: int) -> Iterator[tuple[Any, ...]]:
    """Arguments to try, the likeliest first."""
    for kinds in _by_surprise([_options(parameter) for parameter in parameters]):
        yield tuple(
            [_empty(kind) for _ in range(count)] if isinstance(parameter.spec, ManySpec) else _empty(kind)
            for parameter, kind in zip(parameters, kinds, strict=True)
        )


def _neighbours(parameters: Sequence[PatternParameter], arguments: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """``arguments`` with one tensor of another kind; first of a kind that is broadcast."""
    for position, (parameter, tensor) in enumerate(zip(parameters, arguments, strict=True)):
        if isinstance(tensor, Tensor):
            for kind in ((tensor.dtype, (1,) * tensor.dim()), *_options(parameter)):
                yield [*arguments[:position], _empty(kind), *arguments[position + 1 :]]


def _by_surprise(options: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    """All tensors of one kind, then with one of another kind, then with two, and so on."""
    for surprises in range(MAX_SURPRISES + 1):
        for base in range(_UNIFORM):
            usual = [option[min(base, len(option) - 1)] for option in options]
            for positions in itertools.combinations(range(len(options)), surprises):
                others = [[kind for kind in options[p] if kind != usual[p]] for p in positions]
                for kinds in itertools.product(*others):
                    found = list(usual)
                    for position, kind in zip(positions, kinds, strict=True):
                        found[position] = kind
                    yield found


def _options(parameter: PatternParameter) -> tuple[Any, ...]:
    """The kinds that a parameter may have, by its specification."""
    spec = parameter.spec
    if not isinstance(spec, TensorSpec):
        return _KINDS
    if spec.shape:
        shape = tuple(size if isinstance(size, int) else SIZE for size in spec.shape if size is not ...)
        kinds = [(dtype, shape) for dtype in (torch.float32, torch.int64, torch.bool)]
    else:
        kinds = list(_KINDS)
    if spec.dtypes:
        kinds = [(dtype, shape) for dtype in spec.dtypes for shape in dict.fromkeys(shape for _, shape in kinds)]
    return tuple(kinds)


def _empty(kind: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
    dtype, shape = kind
    return torch.empty(shape, dtype=dtype, device="meta")


class _Constants:
    """Values for the constants that a run asks for; the same value for the same name."""

    def __init__(self, chosen: Sequence[Any]) -> None:
        self.chosen = chosen
        self.values: dict[str, Any] = {}
        self.guessed = 0

    def __call__(self, name: str, example: Any) -> Any:
        if name not in self.values:
            if example is UNSET:
                example = self.chosen[min(self.guessed, len(self.chosen) - 1)]
                self.guessed += 1
            self.values[name] = example
        return self.values[name]
