"""Names that C++ and the generated kernels reserve; values of a graph with such a name are renamed in a kernel."""

from __future__ import annotations

import re

_KEYWORDS = """
    alignas and asm auto bool break case catch char class const continue default delete do double else enum explicit
    export extern false float for friend goto if inline int long mutable namespace new not operator or private protected
    public register return short signed sizeof static struct switch template this throw true try typedef union unsigned
    using virtual void volatile while xor
"""
_RESERVED = frozenset((*_KEYWORDS.split(), "args"))
_PATTERNS = re.compile(r"fuse_.*|[ip]\d.*|out\d.*|u?int\d+_t|[A-Z0-9_]*_(MIN|MAX)")
"""Patterns of reserved names: functions, loop variables, outputs, types, limits."""

_LOOP_WORDS = """
    block first_block first_row lane lanes last_block last_row last_unit member row sizes steps t team threads unit
    workspace
    all any argmax argmin inside max min padded piece position prod sum value
"""
_RESERVED_IN_LOOPS = _RESERVED | frozenset(_LOOP_WORDS.split())
"""Names that loop kernels use, and (below) patterns of the names that they give to elements."""
_LOOP_PATTERNS = re.compile(
    r".*_(at|element|row|so_far|lanes?|value|start|steps|first|pace|stride|next|memory|last)|(weights|sums)_\d+.*"
)


def is_reserved(name: str) -> bool:
    """Whether a name is reserved in the kernel of a region.

    >>> is_reserved("int"), is_reserved("out0"), is_reserved("gates")
    (True, True, False)
    """
    return name in _RESERVED or _PATTERNS.fullmatch(name) is not None


def is_reserved_in_loops(name: str) -> bool:
    """Whether a name is reserved for memory in a loop kernel; an element may still have it.

    >>> is_reserved_in_loops("h_next"), is_reserved_in_loops("h")
    (True, False)
    """
    return (
        name in _RESERVED_IN_LOOPS
        or _PATTERNS.fullmatch(name) is not None
        or _LOOP_PATTERNS.fullmatch(name) is not None
    )
