"""Replace attributes of classes and modules for a while, such as torch's own during a capture."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def patched(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """A context in which ``owner`` has these attributes; afterwards inherited attributes are inherited again.

    >>> class Base:
    ...     name = "base"
    >>> class Derived(Base): pass
    >>> with patched(Derived, {"name": "other"}):
    ...     Derived.name, Base.name
    ('other', 'base')
    >>> Derived.name, "name" in vars(Derived)
    ('base', False)
    """
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def in_this_thread(own: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is ``own`` in this thread, and ``original`` in others.

    >>> in_this_thread(min, max)(1, 2)
    1
    """
    thread = threading.get_ident()
    return lambda *args, **kwargs: (own if threading.get_ident() == thread else original)(*args, **kwargs)
