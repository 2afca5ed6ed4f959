"""The random generators of Python's module ``random`` and of numpy.

    random.shuffle(order)           the next call draws other numbers, which a graph would not

If a capture moves one, the change of its state shows it; the state is restored. (Draws that a program can repeat do not
move it: :mod:`fuse.graph.numbers.drawn_numbers`.) numpy is examined only if it is loaded.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from fuse.errors import CaptureError
from fuse.graph.state.object_contents import module_of

GLOBAL: random.Random = random._inst  # the functions of the module are its methods


def is_generator(kind: type) -> bool:
    """Whether objects of a class draw random numbers.

    >>> is_generator(random.Random), is_generator(list)
    (True, False)
    """
    if issubclass(kind, random.Random):
        return True
    module = module_of(kind)
    return type(module) is str and module.startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState")


def global_generators() -> Iterator[Any]:
    """The generators behind the functions of ``random`` and ``numpy.random``."""
    yield GLOBAL
    if found := getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None):
        yield found


def name_of(generator: Any) -> str:
    """The name of a generator in messages.

    >>> name_of(GLOBAL), name_of(random.Random(3))
    ('the random numbers of random', 'the random numbers of a random.Random')
    """
    kind = type(generator)
    if generator in list(global_generators()):
        return f"the random numbers of {'random' if generator is GLOBAL else 'numpy.random'}"
    return f"the random numbers of a {str(module_of(kind)).partition('.')[0]}.{kind.__name__}"


def state_of(generator: Any) -> Any:
    """The state of a generator, to be compared and restored.

    >>> before = state_of(GLOBAL)
    >>> _ = random.random()
    >>> state_of(GLOBAL) == before
    False
    >>> put_back_state(GLOBAL, before)
    >>> state_of(GLOBAL) == before
    True
    """
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    if type(generator).__name__ == "RandomState":
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def raw_state_of(generator: Any) -> Any:
    """The state of a generator, to be restored: as :func:`state_of`, and faster with numpy."""
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    return generator.get_state(legacy=False) if type(generator).__name__ == "RandomState" else state_of(generator)


def copied(generator: Any) -> Any:
    """Another generator behind the functions of a module, in the same state as this one.

    >>> copied(GLOBAL).random() == random.random()
    True
    """
    copy = random.Random() if isinstance(generator, random.Random) else type(generator)()
    put_back_state(copy, raw_state_of(generator))
    return copy


def put_back_state(generator: Any, state: Any) -> None:
    """Restore a state of :func:`state_of` or :func:`raw_state_of`."""
    if isinstance(generator, random.Random):
        random.Random.setstate(generator, state)
    elif type(generator).__name__ == "RandomState":
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


@contextlib.contextmanager
def generators_unmoved(what: str) -> Iterator[None]:
    """A context after which the generators behind the functions of ``random`` and ``numpy.random`` are as before.

    Raises:
        CaptureError: one was moved.
    """
    before = [(generator, state_of(generator)) for generator in global_generators()]
    try:
        yield
    finally:
        moved = [(generator, state) for generator, state in before if state_of(generator) != state]
        for generator, state in moved:
            put_back_state(generator, state)
        if moved:
            raise CaptureError(f"{what} changes {name_of(moved[0][0])}; a graph cannot hold that")


def _plain(state: Any) -> Any:
    """A numpy state with lists in place of arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state
