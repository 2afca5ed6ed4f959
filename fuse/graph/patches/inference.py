"""Follow ``torch.inference_mode`` in ``forward``.

    @torch.inference_mode()
    def forward(self, x): ...      recorded without gradients; the program runs in inference mode, and its results
                                   are inference tensors, like eager's

Fake tensors of inference mode could not be written, so a capture only notes the mode and turns gradients off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import torch

from fuse.graph.patches.patched import in_this_thread, patched

_MODE = torch.inference_mode


@dataclass(eq=False)
class InferenceModes:
    """The inference modes that ``forward`` enters; ``recorded`` are the operators so far."""

    recorded: Sized
    _entered: list[tuple[bool, bool]] = field(default_factory=list)
    """The modes that are active, and whether gradients were on before."""
    _spans: list[tuple[int, int]] = field(default_factory=list)
    """The operators of each outermost inference mode: number of the first, and of the last plus one."""
    _begin: int = 0

    def enter(self, enabled: bool) -> None:
        if not self._entered:
            self._begin = len(self.recorded)
        self._entered.append((enabled, torch.is_grad_enabled()))
        torch.set_grad_enabled(not enabled)

    def leave(self) -> None:
        enabled, gradients = self._entered.pop()
        torch.set_grad_enabled(gradients)
        if not self._entered and enabled:
            self._spans.append((self._begin, len(self.recorded)))

    def is_enabled(self) -> bool:
        return self._entered[-1][0] if self._entered else False

    def is_whole(self) -> bool:
        """Whether one inference mode has all recorded operators."""
        return len(self.recorded) > 0 and (0, len(self.recorded)) in self._spans


@contextlib.contextmanager
def inference_followed(modes: InferenceModes) -> Iterator[None]:
    """A context in which ``modes`` follows the inference modes of this thread instead of torch.

    >>> modes = InferenceModes([])
    >>> with inference_followed(modes), torch.inference_mode():
    ...     torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.ones(1).is_inference()
    (True, False, False)
    """
    leave = _MODE.__exit__

    def left(mode: Any, *error: Any) -> None:
        if hasattr(mode, "_inference_mode_context"):  # entered before
            leave(mode, *error)
        else:
            modes.leave()

    enter = in_this_thread(lambda mode: modes.enter(mode.mode), _MODE.__enter__)
    asked = in_this_thread(modes.is_enabled, torch.is_inference_mode_enabled)
    with (
        patched(_MODE, {"__enter__": enter, "__exit__": in_this_thread(left, leave)}),
        patched(torch, {"is_inference_mode_enabled": asked}),
    ):
        yield
