"""Follow the values that ``forward`` reads from tensors while it is recorded.

    if (x > 0).any():        the value is computed from the call's inputs (evaluating.py), and Python goes on with it
                             learned: a boolean (learned.py); its node becomes one more result of the graph
    x / x.max().item()       a number that stands for its node (read_numbers.py); nothing is learned
    x[x > 0]                 the operator runs on the call's values; the size of its result is learned
    x[t[0]]                  a look-up operator; nothing is learned (positions.py)

Reads arrive as methods of fake tensors (read_methods.py), or as operators that return Python values.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from fuse import ops
from fuse.errors import CaptureError
from fuse.graph.functional.aliases import Base
from fuse.graph.functional.recorded_inputs import RecordedInputs
from fuse.graph.functional.tensor_values import Functionalizer
from fuse.graph.numbers.learned import Guard, Learned, Learning, ReadLine
from fuse.graph.numbers.read_numbers import is_number, node_of, read_number
from fuse.graph.sources import user_line
from fuse.graph.values.evaluating import Evaluation, Keys, Varying
from fuse.graph.values.masked_elements import MaskSelections, selects_by_mask, takes_gradients
from fuse.graph.values.told_values import ToldValues

aten = torch.ops.aten

LARGEST_LIST = 64
"""The most elements of a list of separate Numbers; larger lists are learned as a whole."""

T = TypeVar("T")


READS = frozenset({aten._local_scalar_dense.default, aten.allclose.default, aten.equal.default})
"""Operators that return a Python value of a tensor."""


@dataclass(frozen=True)
class _Fact:
    node: Node
    guard: Guard
    expected: Any
    source: str


class Reader:
    """The reads of one recording.

    ``plain``: numbers are learned as soon as they are read. A size is learned if autograd follows the operator that
    gives it, because the gradient reads it. A value that depends on no input is the same in each call, and is not
    learned. Values are ``told``, if they are not computed.
    """

    def __init__(
        self,
        functional: Functionalizer,
        fake_mode: FakeTensorMode,
        inputs: RecordedInputs,
        plain: bool,
        dispatches: list[Any],
        told: ToldValues | None,
    ) -> None:
        self.functional = functional
        self.fake_mode = fake_mode
        self.plain = plain
        self.closed = False
        self.differentiates = False
        self._finished = False
        self.gave_symbols = False  # whether forward got a Number, or a copy in place of a view
        self.trouble: CaptureError | None = None
        self.facts: dict[tuple[Node, Guard], _Fact] = {}
        self._known = inputs.known
        self._evaluation = Evaluation(inputs.real_of.__getitem__, functional.draws)
        self._keys = Keys(functional.draws, inputs.real_of.__getitem__, inputs.fixed)
        self._varying = Varying(inputs.fixed)
        self._told = told
        self._read: list[str] = []  # the user's line of each read
        self._sized: list[tuple[Tensor, Tensor]] = []  # fake tensors, with their values in this call
        self._counted: set[int] = set()  # keys of masks whose number of chosen elements is known in this call
        self._dispatches = dispatches
        self._chosen = MaskSelections(self.node, self._keys.of, self._learn_size)
        self.compact = self._chosen.sources
        """Tensors whose size is not learned yet."""

    # ---- for numbers -------------------------------------------------------------------------------------------------

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        with self.functional.fakes.aside():
            return self.functional.emit(op, args, kwargs)

    def truth(self, node: Node) -> bool:
        """The value of ``node``, a boolean without dimensions, which is learned."""
        found: bool = self._learn(node, "truth", lambda value: bool(value.item()))
        return found

    def number(self, node: Node) -> Any:
        """The value of ``node``, a number, which is learned."""
        return self._learn(node, "number", Tensor.item)

    def tensor(self, node: Node) -> Tensor:
        """A fake tensor for ``node``."""
        held: Tensor = node.meta["val"]
        with self.functional.fakes.aside():
            tensor = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=held.device)
        self.functional.own(tensor, node)
        return tensor

    # ---- reads -------------------------------------------------------------------------------------------------------

    def truth_of(self, tensor: Tensor) -> bool:
        node = self.begin(tensor)
        if tensor.dtype is not torch.bool:
            node = self.emit(aten.ne.Scalar, node, 0)
        return self.truth(self._scalar(node))

    def item(self, tensor: Tensor, plain: bool = False) -> Any:
        """``tensor.item()``: a plain number if ``plain``, otherwise a :class:`Number`."""
        if tensor.dtype is torch.bool:
            return self.truth_of(tensor)
        node = self._scalar(self.begin(tensor))
        wide = _wide(tensor.dtype)
        if wide is None:
            return self.number(node)
        converted = node if tensor.dtype is wide else self.emit(aten._to_copy.default, node, dtype=wide)
        if plain or self.plain or not self.varies(node):
            return self.number(converted)
        self.gave_symbols = True
        return read_number(self, converted, self.present(converted), node)

    def whole(self, tensor: Tensor) -> int:
        """``int(tensor)``: for a real number, its integer part is learned."""
        if tensor.dtype is torch.bool or not tensor.is_floating_point():
            return int(self.item(tensor, plain=True))
        node = self._scalar(self.begin(tensor))
        value = self.present(node)
        if not math.isfinite(value) or abs(value) >= 2**62:
            return int(self.number(node))
        return int(self.number(self.emit(aten._to_copy.default, node, dtype=torch.int64)))

    def listed(self, tensor: Tensor) -> Any:
        """``tensor.tolist()``."""
        if tensor.dim() == 0:
            return self.item(tensor)
        wide = _wide(tensor.dtype)
        if self.plain or wide is None or tensor.numel() > LARGEST_LIST:
            values = self.values(tensor)
            with _disable_current_modes():
                return values.tolist()
        node = self.begin(tensor)
        self.gave_symbols = True

        def parts(node: Node) -> list[Any]:
            value: Tensor = node.meta["val"]
            chosen = [self.emit(aten.select.int, node, 0, i) for i in range(value.shape[0])]
            if value.dim() > 1:
                return [parts(one) for one in chosen]
            made = chosen if value.dtype is wide else [self.emit(aten._to_copy.default, n, dtype=wide) for n in chosen]
            return [read_number(self, n, self.present(n), one) for n, one in zip(made, chosen, strict=True)]

        return parts(node)

    def values(self, tensor: Tensor) -> Tensor:
        """A real tensor with the values of ``tensor``, all of which are learned."""
        node = self.begin(tensor)
        found: Tensor = self._learn(node, "values", Tensor.clone)
        with _disable_current_modes():
            return found.clone()

    def equal(self, one: Tensor, other: Tensor) -> bool:
        """``torch.equal``."""
        if one.shape != other.shape:
            return False
        nodes = self.begin(one), self.functional.value(self._known(other))
        return self.truth(self.emit(aten.all.default, self.emit(aten.eq.Tensor, *nodes)))

    def close_to(
        self, one: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
    ) -> bool:
        """``torch.allclose``."""
        a, b = self.begin(one), self.functional.value(self._known(other))
        close = self.emit(aten.eq.Tensor, a, b)
        if equal_nan:
            neither = self.emit(aten.bitwise_and.Tensor, *(self.emit(aten.ne.Tensor, n, n) for n in (a, b)))
            close = self.emit(aten.bitwise_or.Tensor, close, neither)
        allowed = self.emit(aten.add.Scalar, self.emit(aten.abs.default, self.emit(aten.mul.Scalar, b, rtol)), atol)
        apart = self.emit(aten.abs.default, self.emit(aten.sub.Tensor, a, b))
        near = self.emit(aten.le.Tensor, apart, allowed)
        finite = self.emit(aten.ne.Scalar, apart, math.inf)
        close = self.emit(aten.bitwise_or.Tensor, close, self.emit(aten.bitwise_and.Tensor, near, finite))
        return self.truth(self.emit(aten.all.default, close))

    def sized(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], why: Exception) -> Any:
        """The fake result of an operator whose result layout depends on the values of its operands, or that needs real
        tensors.

        ``why``: the error of the fake mode, raised again if this does not help.
        """
        if ops.mutates(op) or ops.is_view(op) or (self.closed and not self._is_counted(op, args)):
            raise why
        nodes = self.functional.nodes(args), self.functional.nodes(kwargs)
        if self.closed:
            self._chosen.refuse_mask(self._keys.of(self.node(args[1][0])))
        with self._troubled():
            if self.closed:  # a gradient, whose values are unknown
                mask = self._evaluation.value(nodes[0][1][0])
                with _disable_current_modes():
                    like = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype)
                    found = op(like, [mask])
            else:
                found = self._evaluation.apart(op, *nodes)
        if not isinstance(found, (Tensor, tuple, list)):
            raise why
        parts = [found] if isinstance(found, Tensor) else list(found)
        known = (
            {tensor.untyped_storage()._cdata for tensor in self._evaluation.held(nodes)} if not self.closed else set()
        )
        if any(not _is_plain(part) or part.untyped_storage()._cdata in known for part in parts):
            raise why
        with self.functional.fakes.aside():
            fakes = [torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device) for p in parts]
        self._sized += zip(fakes, parts, strict=True)
        return fakes[0] if isinstance(found, Tensor) else type(found)(fakes)

    def _is_counted(self, op: OpOverload, args: tuple[Any, ...]) -> bool:
        """Whether ``op`` selects elements by a mask whose number of chosen elements is known."""
        return selects_by_mask(op, args) and self._keys.of(self.node(args[1][0])) in self._counted

    def recorded(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note that ``op`` was recorded. Sizes found by :meth:`sized` are learned now, or when a function may read
        them."""
        if not self._sized:
            self._chosen.follow(op, args, kwargs, result)
            return
        for fake, value in self._sized if not self.closed else ():
            node = self.functional.value(fake)
            self._evaluation.tell(node, value)
            self._read.append(self.functional.source)
            if selects_by_mask(op, args) and not self.plain and not takes_gradients(args[:1]):
                self._chosen.add(fake, args[1][0])
            else:
                self._learn_size(node)
            if selects_by_mask(op, args):
                self._counted.add(self._keys.of(self.node(args[1][0])))
        self._sized.clear()

    def _learn_size(self, node: Node) -> None:
        if not self._finished and self.varies(node):
            shape = tuple(node.meta["val"].shape)
            self.facts.setdefault((node, "size"), _Fact(node, "size", shape, node.meta["source"]))

    def read(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of one of :data:`READS`."""
        if self.closed:
            raise CaptureError(f"a value is read in the backward pass at {user_line()}; it runs in eager mode")
        if op is aten._local_scalar_dense.default:
            return self.item(args[0], plain=True)
        return self.equal(*args) if op is aten.equal.default else self.close_to(*args, **kwargs)

    def uncounted(self, compute: Callable[[], T]) -> T:
        """The result of ``compute``, whose operators eager does not run."""
        count = len(self._dispatches)
        result = compute()
        del self._dispatches[count:]
        return result

    # ---- at the end --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def differentiated(self) -> Iterator[None]:
        """A context in which the backward pass of the recorded call is recorded; it cannot use Numbers."""
        self.differentiates = True
        try:
            yield
        finally:
            self.differentiates = False

    def close(self) -> None:
        """End the recording of Numbers."""
        self.closed = True
        if self.trouble is not None:
            raise self.trouble

    def finish(self, leaves: Sequence[Any]) -> tuple[tuple[Tensor, ...], Learning, dict[Node, int]]:
        """End the reads: tensors for the learned values and for the Numbers among ``leaves``, the learned values, and
        the position of the tensor of each Number's node."""
        for leaf in leaves:
            self._chosen.learn(leaf)
        if self._told is not None:
            self._told.check()
        self._finished = True
        self._chosen.forget(lambda node: (node, "size") in self.facts or not self.varies(node))
        groups: dict[tuple[Guard, torch.dtype], list[_Fact]] = {}
        for fact in self.facts.values():
            groups.setdefault((fact.guard, fact.node.meta["val"].dtype), []).append(fact)
        tensors: list[Tensor] = []
        learned: list[Learned] = []
        for (guard, _), facts in groups.items():
            together = guard in ("truth", "number") and len(facts) > 1
            if together:
                tensors.append(self.tensor(self.emit(aten.stack.default, [fact.node for fact in facts])))
            for index, fact in enumerate(facts):
                if not together:
                    tensors.append(self.tensor(fact.node))
                where = index if together else None
                key = self._keys.of(fact.node)
                learned.append(Learned(fact.source, guard, len(tensors) - 1, where, fact.expected, key))
        positions: dict[Node, int] = {}
        for number in filter(is_number, leaves):
            if (node := node_of(number)) not in positions:
                positions[node] = len(tensors)
                tensors.append(self.tensor(node))
        guards = {fact.source: fact.guard for fact in self.facts.values()}
        lines = {**dict.fromkeys(self._read, "none"), **guards}
        counts = Counter(self._read)
        read = tuple(ReadLine(source, guard, max(counts[source], 1)) for source, guard in lines.items())  # type: ignore[arg-type]  # a guard, or none
        return tuple(tensors), Learning(len(tensors), tuple(learned), read), positions

    def learned_of(self, inputs: Collection[Node]) -> list[Node]:
        """The ``inputs`` that determine a learned number, size or array."""
        seen: set[Node] = set()
        left = [fact.node for fact in self.facts.values() if fact.guard != "truth"]
        while left:
            if (node := left.pop()) not in seen:
                seen.add(node)
                left += node.all_input_nodes
        return [node for node in inputs if node in seen]

    # ---- how ---------------------------------------------------------------------------------------------------------

    def begin(self, tensor: Tensor) -> Node:
        """The node of the present value of ``tensor``; notes a read at the user's line."""
        self.functional.source = user_line()
        self._read.append(self.functional.source)
        self._chosen.learn(tensor)
        return self.node(tensor)

    def node(self, tensor: Tensor) -> Node:
        """The node of the present value of ``tensor``."""
        with self.functional.fakes.aside():
            return self.functional.value(self._known(tensor))

    def varies(self, node: Node) -> bool:
        """Whether the value of ``node`` may differ from call to call."""
        return self._varying.of(node)

    def base_of(self, tensor: Tensor) -> Base:
        """The memory that ``tensor`` is a view of."""
        return self.functional.aliases[id(self._known(tensor))].base

    def _scalar(self, node: Node) -> Node:
        return self.emit(aten.view.default, node, []) if node.meta["val"].dim() else node

    def _learn(self, node: Node, guard: Guard, of: Callable[[Tensor], Any]) -> Any:
        if (node, guard) not in self.facts:
            varies = self.varies(node)
            if varies and self._told is not None:
                expected = self._told.next(guard, user_line())
            else:
                with _disable_current_modes():
                    expected = of(self._value(node))
            if not varies:
                return expected
            self.facts[node, guard] = _Fact(node, guard, expected, user_line())
        return self.facts[node, guard].expected

    def present(self, node: Node) -> Any:
        """The number that ``node`` is in this call; it is not learned. One if learned values are told: there may be no
        data, and what depends on this number is learned."""
        if self._told is not None:
            return torch.ones((), dtype=node.meta["val"].dtype).item()
        with _disable_current_modes():
            return self._value(node).item()

    def _value(self, node: Node) -> Tensor:
        with self._troubled():
            return self._evaluation.value(node)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """A context in which a capture error ends the recording, even if the user's code catches it."""
        try:
            yield
        except CaptureError as error:
            self.trouble = error
            raise

    @contextlib.contextmanager
    def _troubled(self) -> Iterator[None]:
        """A context in which an error while values are computed ends the recording, even if the user catches it."""
        with self.refusing():
            try:
                yield
            except CaptureError:
                raise
            except Exception as error:  # an error of the operators for these values
                text = (str(error).splitlines() or [""])[0]
                raise CaptureError(f"the value read at {user_line()} raises {type(error).__name__}: {text}") from error


def _is_plain(part: Any) -> bool:
    return isinstance(part, Tensor) and part.layout is torch.strided and not (part.is_conj() or part.is_neg())


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that represents every number of ``dtype`` as Python does; None if there is none."""
    if dtype.is_floating_point:
        return torch.float64
    return None if dtype.is_complex or dtype in (torch.bool, torch.uint64) else torch.int64
