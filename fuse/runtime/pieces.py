"""Which submodules stay Python in the calls of a model that cannot be captured whole.

a call is declined    ->  further    the smallest submodule that may be cut out
it runs eager         ->  watched    what that submodule is given and gives
the next such call    ->  cuts       captured around it; where that fails, further: one more, or the one around it
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fuse.cost.count import calls_of_dispatches, calls_of_graph
from fuse.devices import device_of
from fuse.errors import CaptureError
from fuse.graph.capture import capture
from fuse.graph.cut_reading import Setting
from fuse.graph.cuts import NotAsWatched, Unsuitable
from fuse.graph.cutting import Cuts, Recording, Watching, candidates, changer, obstacle
from fuse.graph.mutated_attributes import Assigns
from fuse.graph.signature import Attribute
from fuse.runtime.choosing import modelled_seconds

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a model."""

SECONDS_OF_CALL = 20e-6
"""What a call of a submodule between fused parts costs, as the cost model counts time: copies of what it is given,
comparisons, Python."""

LARGEST_ATTEMPTS = 8
LARGEST_KINDS = 64


@dataclass
class _Tried:
    """What is known of calls of one kind: ``reasons`` by path of the submodules that stay Python, ``refused`` likewise
    of those that cannot."""

    reasons: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    cuts: Cuts | None = None
    attempts: int = 0

    def refuse(self, unsuitable: Unsuitable) -> None:
        self.refused[unsuitable.path] = unsuitable.reason
        self.reasons.pop(unsuitable.path, None)
        self.cuts = None


class Pieces:
    """The submodules of one model that stay Python, for each kind of call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.are_cut = False
        self._tried: dict[Hashable, _Tried] = {}
        self._changed: set[tuple[str, str]] = set()  # settings, by their owner's path and name

    def cuts(self, kind: Hashable) -> Cuts | None:
        """How calls of a kind are cut; None where they are not, or not yet."""
        tried = self._tried.get(kind)
        return tried.cuts if tried else None

    def refuse(self, unsuitable: Unsuitable, kind: Hashable) -> None:
        """Such calls are not cut around a submodule."""
        self._tried[kind].refuse(unsuitable)

    def note_changed(self, settings: Iterable[Setting]) -> None:
        """A submodule changed settings of one: no call is cut any more where the rest of the model reads them."""
        self._changed.update((one.path, one.name) for one in settings)
        for tried in self._tried.values():
            if tried.cuts is not None:
                tried.cuts = replace(tried.cuts, steady=self._steady(tried.cuts.steady))

    def _steady(self, settings: Iterable[Setting]) -> tuple[Setting, ...]:
        return tuple(one for one in settings if (one.path, one.name) not in self._changed)

    def further(self, error: CaptureError, kind: Hashable) -> tuple[str, str]:
        """The path of a submodule around which such calls may be cut, being watched once; else why there is none."""
        if len(self._tried) >= LARGEST_KINDS and kind not in self._tried:
            return "", ""
        tried = self._tried.setdefault(kind, _Tried())
        cut, tried.cuts = tried.cuts, None
        tried.attempts += 1
        if tried.attempts > LARGEST_ATTEMPTS:
            return "", ""
        why = ""
        for path in candidates(error, self.model):
            if path in tried.reasons and (cut is None or isinstance(error, NotAsWatched)):
                return path, ""
            if path in tried.reasons:
                tried.refuse(Unsuitable(path, "what is wrong with it is outside of its forward"))
            if path not in tried.refused and (reason := obstacle(self.model, path)):
                tried.refused[path] = reason
            if path not in tried.refused:
                inner = [one for one in tried.reasons if one.startswith(f"{path}.")]
                for one in inner:
                    del tried.reasons[one]
                tried.reasons[path] = str(error)
                return path, ""
            why = why or f"{path} cannot run by itself: {tried.refused[path]}"
        return "", why

    def watched(
        self,
        kind: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recording: Recording | None = None,
    ) -> Any:
        """The result of a call that runs eager, of which is noted how its submodules are called."""
        tried = self._tried[kind]
        if not tried.reasons:
            return self.model(*args, **kwargs)
        watching = Watching(self.model, list(tried.reasons), recording)
        result = watching.run(args, kwargs)
        if watching.unsuitable is not None:
            tried.refuse(watching.unsuitable)
        else:
            tried.cuts = Cuts(dict(tried.reasons), tuple(watching.calls), self._steady(watching.steady))
            self.are_cut = True
        return result


def refuse_small(graph: GraphModule, cuts: Cuts) -> None:
    """Refuse a rewritten graph that saves less time than its cuts cost.

    Raises:
        Unsuitable: it does.
    """
    device = device_of(graph)
    eager = modelled_seconds(calls_of_dispatches(graph.meta["signature"].dispatches), device)
    if eager - modelled_seconds(calls_of_graph(graph), device) < SECONDS_OF_CALL * len(cuts.calls):
        raise Unsuitable(cuts.calls[-1].path, "fusing what lies around it would gain less than cutting costs")


def captured(model: nn.Module, call: Call, recording: Recording) -> GraphModule | None:
    """A call of a model, which is run for it, as it is captured from the second time on; None where it runs eager.

    ``recording`` records what submodules launch that stay Python.
    """
    model(*call[0], **call[1])  # which may fill a cache
    pieces = Pieces(model)
    while True:
        try:
            return capture(model, *call, cuts=pieces.cuts(None))
        except Unsuitable as error:
            pieces.refuse(error, None)
        except CaptureError as error:
            blame(error, model, call)
            if not pieces.further(error, None)[0]:
                return None
            pieces.watched(None, *call, recording)


def blame(error: CaptureError, model: nn.Module, call: Call, kept: Sequence[Attribute] = ()) -> None:
    """Say which submodule it is that changes something outside of modules, where ``error`` says only what it is."""
    if not isinstance(error, Assigns) or error.module:
        return
    held = {*model.__dict__, *model._parameters, *model._buffers}
    if not any(attribute.name in held for attribute in error.attributes) and any(True for _ in model.children()):
        error.module = changer(model, call, lambda: capture(model, *call, kept))
