"""The installed passes or patterns by name: fuse's own, those of this process, and those of plugins.

    [project.entry-points."fuse.passes"]      a package's passes, loaded at the first request
    [project.entry-points."fuse.patterns"]    its patterns

A plugin that does not load, or contradicts the others, is listed as broken with the reason. It leaves nothing behind,
and does not affect other plugins.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from fuse.errors import FuseError

Item = TypeVar("Item")


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that could not be loaded, and the error."""

    name: str
    origin: str
    error: str


class Installed(Generic[Item]):
    """All installed items of one ``kind`` (such as "pass"), by name; plugins of ``group`` are loaded at the first
    request.

    ``own`` loads fuse's own items. ``fits`` raises FuseError if the installed items contradict each other. ``hint``
    ends the error about an unknown name.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        hint: str,
        own: Callable[[], object] = lambda: None,
        fits: Callable[[], object] = lambda: None,
    ) -> None:
        self.kind, self.group, self.hint, self.own, self.fits = kind, group, hint, own, fits
        self.by_name: dict[str, Item] = {}
        self._broken: tuple[BrokenPlugin, ...] | None = None

    def broken(self) -> tuple[BrokenPlugin, ...]:
        """Load the plugins, once, and return those that failed."""
        if self._broken is None:
            self._broken = ()
            self.own()
            self._broken = self._load(entry_points(group=self.group))
        return self._broken

    def find(self, name: str) -> Item:
        """The item called ``name``; ``FuseError`` with a suggestion if there is none."""
        self.broken()
        if name not in self.by_name:
            raise FuseError(f"no {self.kind} {name!r}{self.suggestion(name)}; {self.hint}")
        return self.by_name[name]

    def suggestion(self, name: str) -> str:
        """``" (did you mean ...?)"`` with the most similar installed name, or an empty text."""
        close = difflib.get_close_matches(name, self.by_name, n=1)
        return f" (did you mean {close[0]!r}?)" if close else ""

    def _load(self, entries: Iterable[EntryPoint]) -> tuple[BrokenPlugin, ...]:
        base, broken, waiting = dict(self.by_name), [], []
        for entry in entries:
            before = dict(self.by_name)
            try:
                entry.load()
            except Exception as error:  # a plugin that does not load is reported, and left out
                broken.append(_described(entry, error))
                self._set(before)
            else:
                added = {name: one for name, one in self.by_name.items() if before.get(name) is not one}
                waiting.append((entry, added))
        self._set(base)
        return (*broken, *self._put_in(waiting))

    def _put_in(self, waiting: list[tuple[EntryPoint, dict[str, Item]]]) -> list[BrokenPlugin]:
        """Install plugins as long as one fits the installed items: each may make the next one fit."""
        problems: list[BrokenPlugin] = []
        while waiting:
            problems, rest = [], []
            for entry, added in waiting:
                before = dict(self.by_name)
                self.by_name.update(added)
                try:
                    self.fits()
                except FuseError as error:
                    self._set(before)
                    problems.append(_described(entry, error))
                    rest.append((entry, added))
            if len(rest) == len(waiting):
                break
            waiting = rest
        return problems

    def _set(self, by_name: dict[str, Item]) -> None:
        self.by_name.clear()
        self.by_name.update(by_name)


def _described(entry: EntryPoint, error: Exception) -> BrokenPlugin:
    origin = entry.dist.name if entry.dist else entry.value
    return BrokenPlugin(entry.name, origin, f"{type(error).__name__}: {error}")
