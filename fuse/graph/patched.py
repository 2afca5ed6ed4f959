"""Attributes of classes and modules that are other ones for a time, as torch's own are while a call is followed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def patched(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """As long as this lasts, attributes of ``owner`` are these; one that it only inherits is inherited again then.

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
