"""Lists, dictionaries and objects among the arguments that ``forward`` changes: their new contents become results.

    def forward(self, x, past):                 x, past[0]  ->  cat(past[0], k)  ->  result
        past[0] = torch.cat([past[0], k], 1)                                     ->  [new past[0]], by the runtime
        return past[0].sum(), past              the second result is the caller's list itself

A capture runs ``forward`` on copies of these containers (:mod:`fuse.graph.structure.arguments`), so that the caller's
do not change. Afterwards each copy is compared with what it contained before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fuse.errors import CaptureError
from fuse.graph.signature import ChangedContainers
from fuse.graph.state.object_contents import Contents, base_of, contents, put_back
from fuse.graph.structure.arguments import containers_of, entries_of, spelled_containers
from fuse.graph.structure.result_structure import GivenContainer, is_constant, with_replaced


@dataclass(frozen=True)
class GivenContainers:
    """The containers of a call: the caller's, their copies, and the contents of the copies before ``forward`` ran."""

    given: Sequence[Any] = ()
    copies: Sequence[Any] = ()
    before: Sequence[Contents] = ()
    names: Sequence[str] = ()

    @staticmethod
    def of(
        call: tuple[tuple[Any, ...], dict[str, Any]],
        copied: tuple[tuple[Any, ...], dict[str, Any]],
        named: dict[str, Any],
    ) -> GivenContainers:
        """The containers of a call and of its copy. ``named``: the arguments of the copy, by their names."""
        copies = containers_of(*copied)
        before = [contents(entries_of(copy)) for copy in copies]
        return GivenContainers(containers_of(*call), copies, before, spelled_containers(named, copies))

    def entries(self) -> frozenset[int]:
        """The ``id`` of all lists and dictionaries that hold the entries of copies."""
        return frozenset(id(entries_of(copy)) for copy in self.copies)

    def changes(self, held: Sequence[Any]) -> ChangedContainers | None:
        """The containers that ``forward`` changed; None if there are none.

        ``held``: what the model and its code hold.

        Raises:
            CaptureError: ``forward`` could tell the caller's containers from the copies.
        """
        pairs = zip(self.copies, self.before, strict=True)
        changed = tuple(i for i, (copy, before) in enumerate(pairs) if not _is_as_before(copy, before))
        if not changed:
            return None
        lists = frozenset(id(value) for value in held if isinstance(value, (list, dict)))
        known: set[int] = set()
        for name, given in zip(self.names, self.given, strict=True):
            if id(entries_of(given)) in lists:
                raise CaptureError(f"{self._said(changed[0])}, and the model holds {name}, too")
            if id(given) in known:
                raise CaptureError(f"{self._said(changed[0])}, and {name} is given twice")
            known.add(id(given))
        for i in changed:
            self._check_keys(i)
        return ChangedContainers(changed, lists)

    def _said(self, i: int) -> str:
        return f"forward changes argument {self.names[i]}"

    def _check_keys(self, i: int) -> None:
        """Refuse new keys that are other objects in each call."""
        known = {id(key) for key in self.before[i].keys or ()}
        for key in contents(entries_of(self.copies[i])).keys or ():
            if not (id(key) in known or is_constant(key) or isinstance(key, nn.Module)):
                raise CaptureError(f"{self._said(i)}: its new key is a {type(key).__name__}")

    def replaced(self, value: Any) -> Any:
        """``value`` with :class:`GivenContainer` in place of each copy in it."""
        if not self.copies:
            return value
        numbers = {id(copy): i - len(self.copies) for i, copy in enumerate(self.copies)}
        return with_replaced(value, lambda part: GivenContainer(numbers[id(part)]) if id(part) in numbers else None)

    def new_contents(self, changed: Sequence[int]) -> tuple[Any, ...]:
        """The new contents of the changed containers, as new lists and dictionaries."""
        return tuple(map(self._new_contents, changed))

    def _new_contents(self, i: int) -> Any:
        now = contents(entries_of(self.copies[i]))
        values = [self.replaced(value) for value in now.values]
        return values if now.keys is None else dict(zip(now.keys, values, strict=True))


def fill(container: Any, values: Any) -> None:
    """Give a container of the caller new contents, as :meth:`GivenContainers.new_contents` has them.

    >>> kept = [1, 2]
    >>> fill(kept, [3]); kept
    [3]
    """
    entries = entries_of(container)
    keys, held = (None, values) if isinstance(values, list) else (list(values), list(values.values()))
    put_back(entries, Contents(base_of(entries), keys, held))


def _is_as_before(copy: Any, before: Contents) -> bool:
    now = contents(entries_of(copy), before.base)
    if len(now.values) != len(before.values) or not _same(now.keys or [], before.keys or [], _is_equal):
        return False
    return _same(now.values, before.values, _is_equal)


def _same(some: Sequence[Any], others: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    return all(map(same, some, others))


def _is_equal(now: Any, then: Any) -> bool:
    """Whether two entries are the same object, or equal plain values."""
    if now is then:
        return True
    return not isinstance(now, Tensor) and type(now) is type(then) and is_constant(now) and bool(now == then)
