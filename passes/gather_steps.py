"""Replace a stack of evenly spaced slices of a tensor by one slice.

    stack([hs[7], hs[6], hs[5], hs[4], h])      ->      cat([flip(hs[4:8]), h])
    stack([hs[0], hs[2], hs[4], hs[6]])         ->      hs[0:7:2]

This occurs where a loop has become one kernel, and its results are stacked in another order, or together with results
of peeled steps.

Declined where fewer than four consecutive operands are such slices, and where the layouts would differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fuse.loops.collectors import dimension_of, pieces_of
from fuse.loops.rolling import LEAST_STEPS
from fuse.rewrite import effects, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten


@register_pass(stage="loops", after="draw_apart", before_gradients=False)  # for the kernel only
def gather_steps(graph: GraphModule) -> Iterator[Verdict]:
    """Replace a stack of evenly spaced slices of a tensor by one slice."""
    escaping: set[Node] | None = None
    for node in graph.graph.find_nodes(op="call_function", target=aten.stack.default):
        runs = runs_of(pieces_of(node))
        if max(run.count for run in runs) < LEAST_STEPS:
            continue
        if reason := obstacle(node):
            yield declined(node, reason)
            continue
        if escaping is None:
            escaping = effects.escaping(graph)
        yield rewrite(node, gather, node, runs, node in escaping)


@dataclass
class SelectedPieces:
    """``count`` pieces that are ``select(source, 0, start + step * k)``; a single one is ``piece``."""

    piece: Node
    source: Node | None
    start: int
    step: int = 0
    count: int = 1

    def takes(self, source: Node | None, position: int) -> bool:
        """Extend this run by the next piece, at ``position`` of ``source``; False if it does not continue the run."""
        if source is None or source is not self.source:
            return False
        step = position - self.start if self.count == 1 else self.step
        if step == 0 or position != self.start + step * self.count:
            return False
        self.step = step
        self.count += 1
        return True

    def without_second(self, second: Node) -> SelectedPieces:
        """Remove the ``second`` piece of this run of two, and return it as a run of its own: pieces that are not
        neighbours may belong to two runs."""
        position = self.start + self.step
        self.count, self.step = 1, 0
        return SelectedPieces(second, self.source, position)


def runs_of(pieces: Sequence[Node]) -> list[SelectedPieces]:
    """The pieces in order, grouped into runs of evenly spaced steps of one tensor."""
    runs: list[SelectedPieces] = []
    for number, piece in enumerate(pieces):
        source, position = _step(piece)
        if runs and runs[-1].takes(source, position):
            continue
        if runs and runs[-1].count == 2 and abs(runs[-1].step) > 1:
            runs.append(runs[-1].without_second(pieces[number - 1]))
            if runs[-1].takes(source, position):
                continue
        runs.append(SelectedPieces(piece, source, position))
    return runs


def _step(piece: Node) -> tuple[Node | None, int]:
    """The tensor that ``piece`` is a step of, and the number of the step; None if it is no step."""
    if piece.target is not aten.select.int:
        return None, 0
    source: Node = piece.args[0]  # type: ignore[assignment]  # FX types arguments loosely
    value = source.meta["val"]
    if int(piece.args[1]) % value.dim() != 0:  # type: ignore[arg-type]  # FX types arguments loosely
        return None, 0
    return source, int(piece.args[2]) % value.shape[0]  # type: ignore[arg-type]  # FX types arguments loosely


def obstacle(stack: Node) -> str | None:
    """Why the stack cannot be a concatenation along its first dimension, or None."""
    if dimension_of(stack) != 0:
        return "the steps do not lie along the first dimension"
    if not stack.meta["val"].is_contiguous():
        return "the stack is not contiguous"
    return None


def gather(stack: Node, runs: Sequence[SelectedPieces], escapes: bool) -> None:
    """Replace the stack by its runs, one after another."""
    parts = [_part(stack, run) for run in runs]
    whole = parts[0] if len(parts) == 1 else surgery.insert(stack, aten.cat.default, parts, like=stack)
    if whole.meta["val"].stride() != stack.meta["val"].stride() or (escapes and effects.is_view(whole)):
        whole = surgery.insert(stack, aten.clone.default, whole, memory_format=torch.contiguous_format, like=stack)
    surgery.replace(stack, whole)


def _part(stack: Node, run: SelectedPieces) -> Node:
    if run.source is None or run.count == 1:
        return surgery.insert(stack, aten.unsqueeze.default, run.piece, 0, like=run.piece)
    first, last = sorted((run.start, run.start + run.step * (run.count - 1)))
    spaced = [abs(run.step)] if abs(run.step) > 1 else []
    part = surgery.insert(stack, aten.slice.Tensor, run.source, 0, first, last + 1, *spaced, like=run.piece)
    return part if run.step > 0 else surgery.insert(stack, aten.flip.default, part, [0], like=run.piece)
