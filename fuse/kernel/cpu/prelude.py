"""The C++ headers that every generated source begins with: the kernels' mathematics.

The text of the headers is copied into the source, so that a cached, compiled or printed kernel is one file without
dependencies.
"""

from functools import cache
from importlib.resources import files

HEADERS = ("arithmetic.h", "halves.h", "vecmath.h", "trigonometry.h", "activations.h", "reductions.h")
"""Each header may use those before it."""


@cache
def prelude() -> str:
    """The C++20 text of all headers, which defines the `fuse_*` functions that kernels call.

    All functions are inline, so that unused ones cost parsing time only.

    >>> "float fuse_erf(float x)" in prelude()
    True
    """
    return text_of_headers(HEADERS)


@cache
def text_of_headers(names: tuple[str, ...]) -> str:
    """The concatenated text of headers in this folder.

    >>> "fuse_product" in text_of_headers(("threads.h", "products.h"))
    True
    """
    folder = files("fuse.kernel.cpu")
    texts = (folder.joinpath(name).read_text(encoding="utf-8") for name in names)
    return "\n".join(text.replace("#pragma once\n", "") for text in texts)
