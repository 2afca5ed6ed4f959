"""Names that C++ and the kernels keep for themselves: what is called so in a graph gets another name in a kernel."""

from __future__ import annotations

import re

_KEYWORDS = """
    alignas and asm auto bool break case catch char class const continue default delete do double else enum explicit
    export extern false float for friend goto if inline int long mutable namespace new not operator or private protected
    public register return short signed sizeof static struct switch template this throw true try typedef union unsigned
    using virtual void volatile while xor
"""
_KEPT = frozenset((*_KEYWORDS.split(), "args"))
_FORMS = re.compile(r"fuse_.*|[ip]\d.*|out\d.*|u?int\d+_t|[A-Z0-9_]*_(MIN|MAX)")
"""Functions, loop variables, outputs, types, limits."""

_LOOP_WORDS = """
    block first_block first_row lane lanes last_block last_row last_unit member row sizes steps t team threads unit
    workspace
    all any argmax argmin inside max min padded piece position prod sum value
"""
_KEPT_IN_LOOPS = _KEPT | frozenset(_LOOP_WORDS.split())
"""Names that kernels of loops have, and, as a pattern, those that they make for elements."""
_LOOP_FORMS = re.compile(
    r".*_(at|element|row|so_far|lanes?|value|start|steps|first|pace|stride|next|memory|last)|(weights|sums)_\d+.*"
)


def is_kept(name: str) -> bool:
    """Whether nothing in the kernel of a region may have this name.

    >>> is_kept("int"), is_kept("out0"), is_kept("gates")
    (True, True, False)
    """
    return name in _KEPT or _FORMS.fullmatch(name) is not None


def is_kept_in_loops(name: str) -> bool:
    """Whether no memory of a loop's kernel may have this name, as an element that it computes may.

    >>> is_kept_in_loops("h_next"), is_kept_in_loops("h")
    (True, False)
    """
    return name in _KEPT_IN_LOOPS or _FORMS.fullmatch(name) is not None or _LOOP_FORMS.fullmatch(name) is not None
