"""Generated functions that take the leaves out of a call's arguments, if these have an expected structure.

    model(x, (h, c), mask=m)         def unpacked(args, kwargs):
                                         ...
                              ->         v2, v3 = args
                                         if type(v3) is not tuple or len(v3) != 2: return None
                                         ...
                                         return v2, v4, v5, v6

They give the leaves of ``pytree.tree_flatten((args, kwargs))``, in a tenth of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

Unpack = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]


def positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The leaves of a call whose positional arguments are all leaves; None if it has keyword arguments."""
    return None if kwargs else args


def unpacking(spec: pytree.TreeSpec) -> Unpack | None:
    """A function that returns the leaves of ``(args, kwargs)``, or None if their structure is not that of ``spec``.

    Whether an object in the place of a leaf is a leaf is left to the caller. None if ``spec`` has containers other than
    tuples, lists and dictionaries.

    >>> unpack = unpacking(pytree.tree_structure(((1, [2, 3]), {"scale": 4})))
    >>> unpack((5, [6, 7]), {"scale": 8}), unpack((5, (6, 7)), {"scale": 8}), unpack((5, [6, 7]), {})
    ((5, 6, 7, 8), None, None)
    """
    lines: list[str] = []
    leaves: list[str] = []
    names: dict[str, Any] = {}
    if not _add(spec, "given", lines, leaves, names):
        return None
    body = ["given = args, kwargs", *lines, f"return ({''.join(f'{leaf}, ' for leaf in leaves)})"]
    source = "\n    ".join(("def unpacked(args, kwargs):", *body))
    exec(compile(source, "<fuse arguments>", "exec"), names)
    unpacked: Unpack = names["unpacked"]
    return unpacked


def _add(spec: pytree.TreeSpec, name: str, lines: list[str], leaves: list[str], names: dict[str, Any]) -> bool:
    """Add lines that take apart the object ``name``, and the names of its ``leaves``; False if ``spec`` is unusual."""
    if spec.is_leaf():
        leaves.append(name)
        return True
    if spec.type not in (tuple, list, dict):
        return False
    parts = [f"{name}_{number}" for number in range(len(spec.children()))]
    values, differs = name, f"type({name}) is not {spec.type.__name__} or len({name}) != {len(parts)}"
    if spec.type is dict:
        keys = f"keys_of_{name}"
        names[keys] = tuple(spec.context)
        values, differs = f"{name}.values()", f"type({name}) is not dict or tuple({name}) != {keys}"
    lines.append(f"if {differs}: return None")
    if parts:
        lines.append(f"{''.join(f'{part}, ' for part in parts)}= {values}")
    return all(_add(child, part, lines, leaves, names) for child, part in zip(spec.children(), parts, strict=True))
