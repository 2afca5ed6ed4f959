"""The C++ headers that every generated source begins with: the kernels' mathematics.

The text of the headers is copied into the source, so that a cached, compiled or printed kernel is one file without
dependencies. A source gets the definitions that it uses. The compiler took a seventh of its time to read the others.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

HEADERS = ("arithmetic.h", "halves.h", "vecmath.h", "trigonometry.h", "activations.h", "reductions.h")
"""Each header may use those before it."""

_NAME = re.compile(r"\b(?:fuse|FUSE)_\w+")
_DECLARES = re.compile(
    r"(?:template <.*?> (?=struct|using|static|FUSE_INLINE)|#pragma omp declare reduction\()?([^({=;]*)"
)


@dataclass(frozen=True, eq=False)
class _Block:
    """The text between two blank lines of a header, with the names that it declares, and all names in its code."""

    text: str
    declares: frozenset[str]
    mentions: frozenset[str]

    @property
    def is_comment(self) -> bool:
        return all(line.startswith("//") for line in self.text.splitlines())


@cache
def prelude() -> str:
    """The C++20 text of all headers, which defines the `fuse_*` functions that kernels call.

    All functions are inline, so that unused ones cost parsing time only.

    >>> "float fuse_erf(float x)" in prelude()
    True
    """
    return text_of_headers(HEADERS)


def prelude_of(code: str) -> str:
    """The definitions of the prelude that ``code`` uses, and those that these use: whole blocks.

    >>> "float fuse_erf(float x)" in prelude_of("y = fuse_erf(x);")
    True
    >>> "float fuse_erf(float x)" in prelude_of("y = fuse_tanh(x);")
    False
    """
    used = set(_NAME.findall(code))
    kept: list[_Block] = []
    left = _blocks()
    while found := [block for block in left if not block.declares or not used.isdisjoint(block.declares)]:
        used.update(*(block.mentions for block in found))
        kept += found
        left = [block for block in left if block not in found]
    return "\n\n".join([*(block.text for block in _blocks() if block in kept), ""])


@cache
def _blocks() -> list[_Block]:
    """The blocks of the prelude without those that are comments alone."""
    texts = re.split(r"\n\n(?=[^\s}])", prelude())
    blocks = [_Block(text, frozenset(_declared(text)), _mentioned(text)) for text in texts]
    return [block for block in blocks if not block.is_comment]


def _mentioned(text: str) -> frozenset[str]:
    return frozenset(_NAME.findall(re.sub("//.*", "", text)))


def _declared(text: str) -> Iterator[str]:
    """The names that lines at the left margin declare: the last name before the first bracket or sign, or every name if
    there is none before."""
    for line in text.splitlines():
        if line and not line.startswith((" ", "//")):
            found = _DECLARES.match(line)
            names = _NAME.findall(found[1]) if found else []
            yield from names[-1:] or _NAME.findall(line)


@cache
def text_of_headers(names: tuple[str, ...]) -> str:
    """The concatenated text of headers in this folder.

    >>> "fuse_product" in text_of_headers(("threads.h", "products.h"))
    True
    """
    folder = files("fuse.kernel.cpu")
    texts = (folder.joinpath(name).read_text(encoding="utf-8") for name in names)
    return "\n".join(text.replace("#pragma once\n", "") for text in texts)
