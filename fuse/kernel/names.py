"""Names in kernels, made from the names of a graph's nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from fuse.kernel.values import Computation


def plain_name(name: str) -> str:
    """A node's name without the numbers that make it unique, so that equal layers of a model have kernels of one text.

    >>> plain_name("sigmoid_1"), plain_name("layers_0_norm1_weight")
    ('sigmoid', 'layers_norm1_weight')
    """
    return re.sub(r"\W", "_", re.sub(r"(^|_)\d+(?=_|$)", "", name)).strip("_") or "value"


def fit_names(computation: Computation, is_reserved: Callable[[str], bool]) -> Computation:
    """``computation`` with an underscore appended to names that the target reserves (``is_reserved``)."""

    def fit(names: Mapping[int, str]) -> dict[int, str]:
        return {key: f"{name}_" if is_reserved(name) else name for key, name in names.items()}

    return replace(computation, names=fit(computation.names), value_names=fit(computation.value_names))
