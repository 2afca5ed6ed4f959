"""Generated functions that copy the parts of a call with other numbers.

    part at (50, 3)       LoopStep(body, trip_count = 50), KernelStep(tanh, n = 9600), Place(2, 0), [50, 3, 64]
    numbers that vary     n0 = 50, n1 = 9600, n2 = 3

    def made(n0, n1, n2):
        t0 = SizedTensor(c0, (n0, n2, 64), (n2 * ...
        return [SizedPart(Schedule((c1, Allocation("made", t0, ...)), (LoopStep(c2, ...), KernelStep(...)), ...))]

A call makes only those objects that hold a number that varies; all others are shared with the part that is copied.
Tensors of one layout are one tensor, and kernels of one text at the same sizes one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from fuse.kernel.kernel import Kernel
from fuse.kernel.sizes.region_text import SizedTensor
from fuse.runtime.resizing.resized import NotResized
from fuse.runtime.resizing.schedule_numbers import Mapped, SizedPart

Made = Callable[..., list[SizedPart]]
"""A function of the numbers that vary, which returns copies of the parts."""


def copier(parts: Sequence[SizedPart], position: Sequence[int | None], count: int) -> Made:
    """The function that copies ``parts`` with ``count`` numbers that vary.

    ``position`` has one entry for each number of :func:`~fuse.runtime.resizing.schedule_numbers.outline_and_numbers`:
    which of the numbers that vary it is; None if it is constant. The function raises :class:`NotResized` where a kernel
    does not serve the sizes.
    """
    code = _Code(position)
    made = code.expression([code.part(part) for part in parts])
    result = made if made is not None else code.constant(list(parts))
    source = "\n    ".join([f"def made({_listed(f'n{i}' for i in range(count))}):", *code.lines, f"return {result}"])
    exec(compile(source, "<fuse sizes>", "exec"), code.names)
    function: Made = code.names["made"]
    return function


class _Number(int):
    """A number of the copied part, with the ``text`` that computes it in the function."""

    text: str

    def __new__(cls, value: int, text: str) -> _Number:
        made = super().__new__(cls, value)
        made.text = text
        return made


class _ServedKernel:
    """A kernel that is asked for in the function: the local name ``text``, and the workspace that it takes."""

    def __init__(self, text: str, workspace_bytes: int) -> None:
        self.text = text
        self.workspace_bytes = _Number(workspace_bytes, f"{text}.workspace_bytes") if workspace_bytes else 0


class _Code(Mapped):
    """Copies in which numbers that vary are :class:`_Number`, and expressions that make such copies."""

    def __init__(self, position: Sequence[int | None]) -> None:
        self._position = iter(position)
        super().__init__(self._marked, lambda _: None)
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"tensor": SizedTensor, "served": _served}
        self._locals: dict[Any, str] = {}

    def _marked(self, number: Any) -> Any:
        at = next(self._position)
        return number if at is None else _Number(number, f"n{at}")

    def kernel(self, kernel: Kernel) -> Any:
        """The kernel itself if its sizes do not vary, else a :class:`_ServedKernel` or a copy."""
        if kernel.served is None:
            return super().kernel(kernel)
        sizes = self.expression(tuple(map(self.take, kernel.served.sizes)))
        if sizes is None:
            return kernel
        name = self._local("k", (kernel.name, sizes), lambda: f"served({self.constant(kernel)}, {sizes})")
        return _ServedKernel(name, kernel.workspace_bytes)

    def constant(self, value: Any) -> str:
        """A name for ``value``, or a literal."""
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def expression(self, value: Any) -> str | None:
        """An expression that makes a copy of ``value``; None if no number in it varies."""
        if isinstance(value, (_Number, _ServedKernel)):
            return value.text
        if isinstance(value, SizedTensor):
            size, stride = self.expression(tuple(value.shape)), self.expression(value.stride())
            if size is None and stride is None:
                return None
            size, stride = size or repr(tuple(value.shape)), stride or repr(value.stride())
            key = value.dtype, value.device, size, stride
            return self._local("t", key, lambda: f"tensor({self.constant(value)}, {size}, {stride})")
        if isinstance(value, (tuple, list)):
            items = self._items(value)
            if items is None:
                return None
            listed = _listed(items)
            return f"[{listed}]" if isinstance(value, list) else f"({listed})"
        if isinstance(value, dict):
            items = self._items(list(value.values()))
            named = None if items is None else zip(map(repr, value), items, strict=True)
            return None if named is None else f"{{{_listed(map(': '.join, named))}}}"
        if is_dataclass(value) and not isinstance(value, type):
            items = self._items([getattr(value, field.name) for field in fields(value)])
            return None if items is None else f"{self._type(type(value))}({_listed(items)})"
        return None

    def _items(self, values: Sequence[Any]) -> list[str] | None:
        """Expressions for all values; None if no number in them varies."""
        found = list(map(self.expression, values))
        if all(one is None for one in found):
            return None
        return [self.constant(value) if one is None else one for one, value in zip(found, values, strict=True)]

    def _type(self, of: type) -> str:
        self.names[of.__name__] = of
        return of.__name__

    def _local(self, prefix: str, key: Any, expression: Callable[[], str]) -> str:
        """The local variable for ``key``, which is made where it is first needed."""
        name = self._locals.get(key)
        if name is None:
            name = self._locals[key] = f"{prefix}{len(self._locals)}"
            self.lines.append(f"{name} = {expression()}")
        return name


def _served(kernel: Kernel, sizes: Sequence[Any]) -> Kernel:
    """The kernel at other sizes."""
    found = kernel.served.at(tuple(sizes)) if kernel.served is not None else None
    if found is None or bool(found.workspace_bytes) != bool(kernel.workspace_bytes):
        raise NotResized(f"{kernel.name} does not serve the other sizes")
    return found


def _listed(items: Iterable[str]) -> str:
    return "".join(f"{item}, " for item in items)
