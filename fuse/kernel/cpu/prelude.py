"""The C++ text that every generated source begins with: the kernels' mathematics.

The headers are read, not included by path, so that a kernel's source is complete in itself: what is cached, compiled
and shown is one file without dependencies.
"""

from functools import cache
from importlib.resources import files

HEADERS = ("arithmetic.h", "halves.h", "vecmath.h", "trigonometry.h", "activations.h", "reductions.h")
"""In the order in which they build on each other."""


@cache
def prelude() -> str:
    """The C++20 text of all headers, which defines the `fuse_*` functions that kernels call.

    It only defines inline functions: those that a kernel does not use cost parsing time and nothing else.

    >>> "float fuse_erf(float x)" in prelude()
    True
    """
    return text_of_headers(HEADERS)


@cache
def text_of_headers(names: tuple[str, ...]) -> str:
    """The text of headers of this folder, one after another.

    >>> "fuse_product" in text_of_headers(("threads.h", "products.h"))
    True
    """
    folder = files("fuse.kernel.cpu")
    texts = (folder.joinpath(name).read_text(encoding="utf-8") for name in names)
    return "\n".join(text.replace("#pragma once\n", "") for text in texts)
