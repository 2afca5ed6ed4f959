"""Record the calls of submodules that stay Python: each is one node, a :class:`~fuse.graph.cuts.CutCall`.

    b = odd(a)      ->      c = call_of_odd([what was learned so far], [a]);  b = getitem(c, 0)

The submodule does not run. Its results are what it gave when it was watched, as far as their layouts go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fuse.graph.aliases import Base
from fuse.graph.cut_reading import Setting, untouched
from fuse.graph.cuts import CutCall, Known, NotAsWatched, Unsuitable, alike, layout_of, put_together, taken_apart
from fuse.graph.cutting import Cuts, diverted, shared_with_rest
from fuse.graph.functional import Functionalizer
from fuse.graph.outside import reached_by
from fuse.graph.reading import Reader
from fuse.graph.signature import Attribute
from fuse.graph.sources import user_line


class CutRecording:
    """The calls of submodules that stay Python in one recording. ``known`` gives the tensor that the graph knows for
    one that a submodule is given."""

    def __init__(
        self,
        model: nn.Module,
        cuts: Cuts,
        functional: Functionalizer,
        reader: Reader,
        known: Callable[[Tensor], Tensor],
    ) -> None:
        self.model = model
        self.cuts = cuts
        self.functional = functional
        self.reader = reader
        self.modules = [model.get_submodule(path) for path in cuts.reasons]
        self._known = known
        self._shared = {path: shared_with_rest(model, path) for path in cuts.reasons}
        self._held = {
            path: {tensor.untyped_storage()._cdata for tensor in reached_by(model.get_submodule(path)).tensors()}
            for path in cuts.reasons
        }
        self._calls: list[CutCall] = []
        self._refused: Unsuitable | None = None
        self._read: dict[tuple[str, str], Setting] = {}  # what the rest reads of the submodules
        self._bases: list[tuple[str, Base, int]] = []  # what is given and made, and how often it was written before

    @contextmanager
    def diverted(self) -> Iterator[None]:
        """As long as this lasts, calls of the submodules are recorded, and only settings may be asked of them."""
        with ExitStack() as stack:
            stack.enter_context(diverted(self.model, list(self.cuts.reasons), self._call))
            for path in self.cuts.reasons:
                module = self.model.get_submodule(path)
                stack.enter_context(untouched(module, partial(self._refuse, path), self.cuts.steady, self._note))
            yield

    def _note(self, setting: Setting) -> None:
        self._read[setting.path, setting.name] = setting

    def _refuse(self, path: str, what: str) -> None:
        self._refused = Unsuitable(path, f"the rest of the model {what}")
        raise self._refused  # which forward may catch

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """What the rest reads of the submodules: paths of modules, and names."""
        return tuple(self._read)

    def check(self, assigned: Sequence[Attribute], inputs: Iterable[Tensor]) -> None:
        """Refuse what the finished record cannot hold.

        Raises:
            Unsuitable: the fused part draws random numbers, whose order would not be eager's, asks for attributes of a
                submodule, reads memory that one holds, or writes to what one was given or made.
            NotAsWatched: not all of the calls came that were watched.
        """
        if self._refused is not None:
            raise self._refused
        if len(self._calls) != len(self.cuts.calls):
            raise NotAsWatched("forward calls its submodules differently than while they were watched")
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for path in self.cuts.reasons:
            if self.functional.draws.nodes:
                raise Unsuitable(path, "the rest of the model draws random numbers")
            if any(f"{attribute.owner}.".startswith(f"{path}.") for attribute in assigned):
                raise Unsuitable(path, "the rest of the model assigns its attributes")
            if self._held[path] & storages:
                raise Unsuitable(path, "the rest of the model reads a tensor that it holds")
        for path, base, version in self._bases:
            if base.version != version:
                raise Unsuitable(path, "the rest of the model writes to its arguments or results")
        for call in self._calls:
            call.several = len(self._calls) > 1
            call.settings = tuple(self._read.values())
        if self._calls:
            self._calls[-1].last = True

    def _call(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = self.functional.source = user_line()
        watched = self.cuts.calls[len(self._calls)] if len(self._calls) < len(self.cuts.calls) else None
        tensors: list[Tensor] = []
        try:
            given = taken_apart((args, tuple(kwargs.items())), tensors)
        except ValueError as what:
            raise Unsuitable(path, f"it is given {what}") from what
        seen = tuple(map(layout_of, tensors))
        if watched is None or path != watched.path or seen != watched.tensors or not alike(given, watched.given):
            raise NotAsWatched(f"{path} is called otherwise at {source or '?'} than when it was watched")
        tensors = [self._known(tensor) for tensor in tensors]
        for tensor in tensors:
            base = self.functional.aliases[id(tensor)].base
            if base.version and base.input_index is not None:
                raise Unsuitable(path, "it is given an input that the rest of the model wrote to")
        facts = self.reader.before_call(tensors)
        with self.reader.aside():
            nodes = tuple(self.functional.value(tensor) for tensor in tensors)
            fakes = [torch.empty_strided(size, stride, dtype=dtype) for dtype, size, stride in watched.made]
        call = CutCall(
            path,
            self.model.get_submodule(path),
            watched,
            tuple(Known(guard, expected) for _, guard, expected in facts),
            self._shared[path],
            source,
            self.cuts.reasons[path],
        )
        self._calls.append(call)
        node = self.functional.add(call, (tuple(node for node, _, _ in facts), nodes), {}, tuple(fakes))
        self.functional.own_parts(fakes, node)
        for tensor in (*tensors, *fakes):
            base = self.functional.aliases[id(tensor)].base
            self._bases.append((path, base, base.version))
        return put_together(watched.returned, [*tensors, *fakes])
