"""One kernel for all lengths, from what is generated for a few.

    for (i0 = 0; i0 < 1408; ++i0)       length 11
    for (i0 = 0; i0 < 2176; ++i0)       length 17     ->     for (i0 = 0; i0 < sizes[0]; ++i0)
    for (i0 = 0; i0 < 4736; ++i0)       length 37

The texts must be equal but for numbers, which become sizes that each call is given. Declined where the texts differ in
anything else, where a number is no whole one, and where local memory would grow with the length.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace

from fuse.kernel.lower import Declined, Kernel
from fuse.kernel.sized import with_sizes

_TOKEN = re.compile(r"[A-Za-z_]\w*|\d+\.\d*(?:e[+-]?\d+)?f?|\d+|\s+|.", re.DOTALL)
_TAKEN = re.compile(r"sizes|size_\d+")
_NAME = "KERNEL"


def for_any_length(kernels: Sequence[Kernel], arguments: int) -> list[Kernel] | Declined:
    """The kernel that can run for all of these, once with the sizes of each.

    ``arguments`` is the number of pointers that each takes, before that to its sizes.

    >>> sources = [f'extern "C" int k{n}(char *const *args) {{ return {8 * n} + 1; }}' for n in (2, 3)]
    >>> kernels = [Kernel(f"k{n}", s, frozenset(), False) for n, s in zip((2, 3), sources, strict=True)]
    >>> first, second = for_any_length(kernels, arguments=2)
    >>> print(first.source.replace(first.name, "k"))
    extern "C" int k(char *const *args) {
        const int64_t *sizes = (const int64_t *)args[2];
        const int64_t size_0 = sizes[0];
     return size_0 + 1; }
    >>> first.source == second.source, first.sizes, second.sizes
    (True, (('size_0', 16),), (('size_0', 24),))
    """
    if any(kernel.sizes for kernel in kernels):
        return Declined("the body of a loop is another one at other lengths")
    texts = [_TOKEN.findall(kernel.source.replace(kernel.name, _NAME)) for kernel in kernels]
    if any(_TAKEN.fullmatch(token) for token in texts[0]):
        return Declined("a kernel has names of its own for what sizes are called")
    if len({len(text) for text in texts}) > 1 or len({kernel.in_place for kernel in kernels}) > 1:
        return Declined("a kernel is written otherwise at other lengths")
    names: dict[tuple[int, ...], str] = {}
    written: list[str] = []
    line = 0  # where among the tokens written the current line begins
    for tokens in zip(*texts, strict=True):
        token = tokens[0]
        if other := next((other for other in tokens if other != token), None):
            found = _sized(tokens, names)
            if found is None:
                return Declined(f"{token!r} in a kernel becomes {other!r} at another length")
            if "alignas" in written[line:]:
                return Declined("a kernel keeps a row in local memory whose size is the length")
            token = found
        written.append(token)
        line = len(written) if "\n" in token else line
    source = with_sizes("".join(written), list(names.values()), arguments)
    stem = re.sub(r"_[0-9a-f]{8}$", "", kernels[0].name)
    name = f"{stem}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    source = source.replace(_NAME, name)
    parallel = any(kernel.parallel for kernel in kernels)
    return [
        replace(
            kernel,
            name=name,
            source=source,
            parallel=parallel,
            sizes=tuple((size, values[number]) for values, size in names.items()),
        )
        for number, kernel in enumerate(kernels)
    ]


def _sized(tokens: Sequence[str], names: dict[tuple[int, ...], str]) -> str | None:
    """The text that stands for numbers which differ, as a size with a new name if need be; None for anything else."""
    if not all(token[0].isdigit() for token in tokens):
        return None
    kinds = {("." in token, token.endswith("f")) for token in tokens}
    values = [float(t.removesuffix("f")) if "." in t else int(t) for t in tokens]
    if len(kinds) > 1 or not all(value == int(value) for value in values):
        return None
    is_float, is_single = kinds.pop()
    name = names.setdefault(tuple(map(int, values)), f"size_{len(names)}")
    return name if not is_float else f"float({name})" if is_single else f"double({name})"
