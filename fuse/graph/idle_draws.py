"""Numbers that a call draws from Python's ``random`` and does nothing with.

    @checked                                    type checkers look at one item of a list that they are given,
    def forward(self, x, memories: list):       which random.getrandbits(32) chooses

A capture that moves the generator is made again while it gives other words: only zeros, only ones, rising and falling
ones. Where every graph is the same, and as many words are drawn, they decide nothing: the call is captured, and each
later call moves the generator as far. The words are made by undoing the steps by which the Mersenne twister makes words
of its state (Matsumoto and Nishimura 1998, as in Python's ``random``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fuse.errors import CaptureError
from fuse.graph.python_generators import GLOBAL, name_of, put_back_state, state_of
from fuse.graph.signature import OutputSpec, Signature

_LENGTH, _ONES = 624, 0xFFFFFFFF

Words = tuple[int, ...]
PATTERNS: tuple[Words, ...] = (
    (0,) * _LENGTH,
    (_ONES,) * _LENGTH,
    tuple(i * (_ONES // _LENGTH) for i in range(_LENGTH)),
    tuple(_ONES - i * (_ONES // _LENGTH) for i in range(_LENGTH)),
)
"""Words that the generator gives while a call is captured again."""


class DrawsWords(CaptureError):
    """``forward`` draws so many words of 32 bits from Python's generator, and changes nothing else."""

    def __init__(self, words: int) -> None:
        super().__init__(_refused(""))
        self.words = words


def state_giving(words: Words) -> Any:
    """The state from which ``random`` draws these 624 words.

    >>> generator = random.Random()
    >>> generator.setstate(state_giving(tuple(range(624))))
    >>> [generator.getrandbits(32) for _ in range(3)]
    [0, 1, 2]
    """
    return 3, (*map(_untempered, words), 0), None


def words_between(before: Any, after: Any) -> int | None:
    """How many words were drawn from one state of the generator to another; None where more than 624 were, or other
    things happened to it.

    >>> generator = random.Random(3)
    >>> before = generator.getstate()
    >>> generator.random(), generator.getrandbits(32)
    (0.23796462709189137, 2337446730)
    >>> words_between(before, generator.getstate())
    3
    """
    generator = random.Random()
    generator.setstate(before)
    for count in range(_LENGTH + 1):
        if (found := generator.getstate())[1][-1] == after[1][-1] and found == after:
            return count
        generator.getrandbits(32)
    return None


def draw(words: int) -> None:
    """Move the generator so many words."""
    if words:
        GLOBAL.getrandbits(32 * words)


class Drawn:
    """The words that a call draws, counted within ``with``.

    ``words`` are those that the call is known to draw, 0 where nothing is known; these are put back at the end.
    ``given`` are the words that it draws, where the generator is not to give those of the caller.
    """

    def __init__(self, words: int, given: Words | None) -> None:
        self.words, self.given = words, given
        self.found: int | None = 0

    def __enter__(self) -> Drawn:
        self.begun = state_of(GLOBAL)
        if self.given is not None:
            put_back_state(GLOBAL, state_giving(self.given))
        return self

    def __exit__(self, *_: object) -> None:
        start = self.begun if self.given is None else state_giving(self.given)
        self.found = words_between(start, state_of(GLOBAL))
        if self.words:
            put_back_state(GLOBAL, self.begun)

    def check(self, changed: Sequence[str]) -> None:
        """Ask for a capture that knows the words, where the generator is all of the caller's that ``changed``.

        Raises:
            DrawsWords: it is.
            CaptureError: the call drew another number of words than it is known to draw.
        """
        if self.words and self.found != self.words:
            raise CaptureError(_refused(" as often as they say"))
        if self.found and list(changed) == [name_of(GLOBAL)]:
            raise DrawsWords(self.found)


def refuse_deciding(graphs: Sequence[GraphModule]) -> None:
    """Refuse a call whose graphs differ with what it draws.

    Raises:
        CaptureError: they differ.
    """
    first, *others = map(_described, graphs)
    if any(other != first for other in others):
        raise CaptureError("forward draws from random, and its graph depends on the numbers; a graph cannot hold that")


def _refused(how: str) -> str:
    return f"forward changes the random numbers of random{how}; a graph cannot hold that"


def _described(graph: GraphModule) -> Any:
    """Everything that a recorded graph says, to be compared with that of the same call."""
    signature: Signature = graph.meta["signature"]
    if signature.kept or signature.learning is not None:
        raise CaptureError(_refused(", and assigns attributes or reads values"))
    nodes = [
        (n.op, str(n.target), n.name, repr(n.args), repr(n.kwargs), _layout(n.meta["val"])) for n in graph.graph.nodes
    ]
    inputs = [(spec.kind, spec.name, spec.index, _value(spec.value)) for spec in signature.inputs]
    return nodes, inputs, list(map(_output, signature.outputs)), signature.out_spec, signature.mutations


def _output(spec: OutputSpec) -> Any:
    return spec.kind, spec.index, repr(spec.view), _value(spec.value)


def _layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return list(map(_layout, value)) if isinstance(value, tuple | list) else repr(value)


def _value(value: Any) -> Any:
    """A constant, comparable without asking it."""
    if isinstance(value, Tensor):
        return _layout(value), value.tolist() if value.device.type != "meta" else id(value)
    return repr(value) if type(value) in (int, float, bool, str, type(None), torch.dtype) else id(value)


def _untempered(word: int) -> int:
    """The word of the state that the generator gives as ``word``: its four steps undone, the last first."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    word = _undone(word, lambda w: (w << 7) & 0x9D2C5680)
    return _undone(word, lambda w: w >> 11)


def _undone(word: int, step: Callable[[int], int]) -> int:
    """The ``x`` of which ``word`` is ``x ^ step(x)``, where ``step`` moves bits by at least 7 places."""
    found = word
    for _ in range(5):
        found = word ^ step(found)
    return found & _ONES
