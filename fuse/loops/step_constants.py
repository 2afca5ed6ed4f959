"""Constants that change from step to step of an unrolled loop: numbers, and tensors known at capture.

mul(h1, 0.1), mul(h2, 0.2), mul(h3, 0.3)      ->      mul(h, numbers[t])       numbers = [0.1, 0.2, 0.3]
add(h1, full(0.9)), add(h2, full(0.81))       ->      add(h, expand(table[t]))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from fuse import ops
from fuse.graph.outputs import finished
from fuse.loops.reads import Leaf, Link, Obstacle, Read, leaves, replace_leaves
from fuse.rewrite import surgery
from fuse.rewrite.constants import given_constants, value_of_origin
from fuse.rewrite.evaluate import FILLS

aten = torch.ops.aten

EXACT_INTEGERS = 2**53
NUMBER_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
LARGEST_TABLE = 1 << 20
"""The most bytes of a table."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """A number for each step, in the ``dtype`` in which the operator computes."""

    values: tuple[int | float, ...]
    dtype: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether arithmetic in ``dtype`` gets the same numbers from a tensor as from Python."""
        if not self.dtype.is_floating_point:
            limits = torch.iinfo(self.dtype)
            return all(isinstance(v, int) and limits.min <= v <= limits.max for v in self.values)
        largest = torch.finfo(self.dtype).max
        return all(
            abs(v) <= (EXACT_INTEGERS if isinstance(v, int) else largest) or not math.isfinite(v) for v in self.values
        )

    def tensor(self) -> torch.Tensor:
        return torch.tensor(self.values, dtype=self.dtype)


def counted(numbers: Numbers, mode: FakeTensorMode) -> GraphModule | None:
    """A graph without inputs that computes evenly spaced integers by ``arange``; None for other numbers.

    >>> origin = counted(Numbers((0, 1, 2), torch.int64), FakeTensorMode())
    >>> value_of_origin(origin)
    tensor([0, 1, 2])
    >>> counted(Numbers((0, 1, 4), torch.int64), FakeTensorMode())
    """
    values = numbers.values
    if len(values) < 2 or any(type(value) is not int for value in values):
        return None
    step = int(values[1] - values[0])
    if step == 0 or any(b - a != step for a, b in pairwise(values)):
        return None
    table = numbers.tensor()
    made = Graph()
    bounds = (values[0], values[-1] + step, step)
    node = made.call_function(aten.arange.start_step, bounds, {"dtype": table.dtype, "device": table.device})
    node.meta.update(val=mode.from_tensor(table), source="")
    origin = finished(made, [node])
    value = value_of_origin(origin)
    return origin if value is not None and torch.equal(value, table) else None


@dataclass(frozen=True, eq=False)
class StepTable:
    """A constant tensor for each step, all of one shape and dtype."""

    rows: tuple[Tensor, ...]

    def tensor(self) -> Tensor:
        return torch.stack(self.rows)


def table_of(reads: Sequence[Read]) -> tuple[StepTable, tuple[Link, ...]] | None:
    """The constants that steps read, and the views of a step's row; None if one of them is unknown."""
    if len({read.links for read in reads}) > 1:
        return None
    if all(read.root.target in FILLS for read in reads):
        shape, dtype = reads[0].root.meta["val"].shape, reads[0].root.meta["val"].dtype
        if reads[0].links:
            return None
        spread: Link = (aten.expand.default, (tuple(shape),), ())
        return StepTable(tuple(torch.tensor(_fill(read.root), dtype=dtype) for read in reads)), (spread,)
    graph = reads[0].root.graph.owning_module
    known = {} if graph is None else given_constants(graph)
    rows = [known.get(read.root) for read in reads]
    held = [row for row in rows if row is not None]
    if len(held) < len(rows) or sum(row.nbytes for row in held) > LARGEST_TABLE:
        return None
    return StepTable(tuple(row.contiguous().to(reads[0].root.meta["val"].device) for row in held)), reads[0].links


def _fill(node: Node) -> int | float:
    if node.target is aten.full.default:
        return node.args[1]  # type: ignore[return-value]
    return int(node.target is aten.ones.default)


def numbers_of(
    nodes: Sequence[Node], operands: Sequence[Sequence[Leaf]], typical: int
) -> dict[int, Numbers] | Obstacle:
    """The numbers among the operands, if one of them changes from step to step; else empty."""
    positions = [i for i, leaf in enumerate(operands[0]) if not isinstance(leaf, Node)]
    keys = [surgery.constant_key([o[i] for i in positions]) for o in operands]
    if len(set(keys)) == 1:
        return {}
    odd = frozenset(k for k, key in enumerate(keys) if key != keys[typical])
    node = nodes[-1]
    dtype = _arithmetic(node)
    if dtype not in NUMBER_DTYPES:
        return Obstacle(f"a number that {node.name} takes differs from step to step, in {dtype}", odd)
    found = {i: Numbers(tuple(o[i] for o in operands), dtype) for i in positions}  # type: ignore[misc]
    if not all(numbers.exact for numbers in found.values()):
        return Obstacle(f"a number that {node.name} takes differs from step to step, and {dtype} cannot hold it", odd)
    if _changed_layout(node, dtype):
        return Obstacle(
            f"a number that {node.name} takes differs from step to step; given as a tensor, it would change the dtype",
            odd,
        )
    return found


def _arithmetic(node: Node) -> torch.dtype:
    """The dtype in which ``node`` combines its operands."""
    held: torch.dtype = node.meta["val"].dtype
    operands = leaves(node)
    if held is not torch.bool or len(operands) != 2 or not isinstance(operands[0], Node):
        return held
    return torch.result_type(operands[0].meta["val"], operands[1])  # type: ignore[arg-type]


def _changed_layout(node: Node, dtype: torch.dtype) -> bool:
    """Whether ``node`` gives another result when its numbers are tensors of ``dtype``."""
    with surgery.fake_mode(node.graph):
        element = torch.empty((), dtype=dtype)
    args, kwargs = replace_leaves(node, lambda leaf: leaf.meta["val"] if isinstance(leaf, Node) else element)
    with surgery.fake_mode(node.graph), torch.no_grad():
        made = ops.tensor_form(node.target)(*args, **kwargs)  # type: ignore[misc]
    held = node.meta["val"]
    return bool(made.dtype != held.dtype or made.shape != held.shape)
