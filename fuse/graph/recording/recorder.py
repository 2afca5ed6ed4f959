"""The dispatch mode that records one call: operators become nodes, tensors from outside become inputs of the graph.

    aten.addmm(bias, x, w.t())   ->   placeholders input, bias, weight;   t(weight);   addmm(bias, input, t)

:class:`Recorder` sees each operator below autograd. It makes a placeholder for each new tensor, records the operator in
functional form, and runs it on fake tensors. Other modules follow Python's side of the call (state, values that are
read, random numbers). At the end of the call it makes the signature.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fuse import ops
from fuse.errors import CaptureError, FuseError
from fuse.graph.checks import dtype_numbers, probing, put_shapes
from fuse.graph.checks.value_checks import check_values, values_checked
from fuse.graph.fakes.byte_masks import has_byte_masks, with_masks
from fuse.graph.fakes.fake_mode import WithoutSwitch
from fuse.graph.fakes.fake_operators import FakeRunner
from fuse.graph.fakes.hidden_fakes import fakes_hidden
from fuse.graph.functional import changed_objects, functional_forms
from fuse.graph.functional.recorded_inputs import RecordedInputs, tensor_of
from fuse.graph.functional.repeated_calls import RepeatedCalls
from fuse.graph.functional.short_graphs import COLLECTORS, shortened
from fuse.graph.functional.tensor_values import Functionalizer
from fuse.graph.naming import argument_name, named_arguments, names_of_state, parameter_names
from fuse.graph.numbers.drawn_numbers import DrawRecord, draws_followed
from fuse.graph.numbers.learned import Learning
from fuse.graph.numbers.read_numbers import WantsPlain
from fuse.graph.outputs import finished
from fuse.graph.patches.conversions import idle_conversions
from fuse.graph.patches.gradient_state import gradients_noted
from fuse.graph.patches.inference import InferenceModes, inference_followed
from fuse.graph.patches.new_parameters import subclasses_refused
from fuse.graph.patches.packed_sequences import packed_by_masks
from fuse.graph.patches.pools import pools_of_eager
from fuse.graph.patches.reassigning import Assign, obstacle, reassignments_followed
from fuse.graph.patches.recurrent import lstm_of_eager
from fuse.graph.patches.requires_grad import RequiresGradOfArguments, needed_at_first, switched
from fuse.graph.patches.seeding import followed
from fuse.graph.recording.mutated_attributes import Overlay
from fuse.graph.recording.recording_plan import Assigns, NeedsGradients, Plan, Reads
from fuse.graph.recording.result_leaves import ResultLeaves
from fuse.graph.recording.watched_code import WatchedCode, watching
from fuse.graph.signature import Attribute, ChangedContainers, Dispatch, Signature
from fuse.graph.sources import line_of, user_line
from fuse.graph.state.attributes import Change, is_own
from fuse.graph.state.fake_parameters import with_fake_parameters
from fuse.graph.state.reachable_state import reached_by
from fuse.graph.state.torch_settings import settings_kept
from fuse.graph.structure.arguments import named_leaves
from fuse.graph.structure.given_containers import GivenContainers
from fuse.graph.structure.result_structure import GivenContainer, flatten_result
from fuse.graph.values.chosen_by_draws import ChoicesByDraws, Chooses, raise_if_several
from fuse.graph.values.evaluating import NoData
from fuse.graph.values.positions import Positions
from fuse.graph.values.read_methods import reads_followed
from fuse.graph.values.told_values import told_values
from fuse.graph.values.value_reads import READS, Reader
from fuse.graph.values.whole_numbers import converted

_SIZED = (DynamicOutputShapeException, UnsupportedOperatorException)
_DEVICE = torch.ops.prim.device.default
_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


class Recorder(WithoutSwitch, TorchDispatchMode):
    """The dispatch mode that records one call of ``model`` as a graph."""

    gradients = False
    """Whether the call is recorded under autograd."""

    def __init__(self, model: nn.Module, fake_mode: FakeTensorMode, plan: Plan, *, shorten: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.model = model
        self.overlay = Overlay(model, plan, self._number_of_attribute)
        self.fake_mode = fake_mode
        self.graph = Graph()
        self.modules = nn.Module()  # the modules that the graph calls
        self.fakes = FakeRunner(fake_mode)
        self.functional = Functionalizer(self.graph, self.fakes)
        if shorten:
            self.functional.shorten()
        self.repeated = RepeatedCalls(self.functional, self.fakes)
        self.dispatches: list[Dispatch] = []
        self.unfollowed = ""  # why a tensor that got other memory is not followed
        self.packs = False  # whether the call has a packed sequence
        self.watched: WatchedCode | None = None
        self.inputs = RecordedInputs(self.graph, self.functional, fake_mode, names_of_state(model, plan.attributes))
        told = told_values(model)
        self.reader = Reader(self.functional, fake_mode, self.inputs, plan.plain_reads, self.dispatches, told)
        self.positions = Positions(self.reader)
        self.drawn = DrawRecord(self.reader, self.inputs.drawn, plan.plain_reads, self.inputs.choices)
        self.choices = ChoicesByDraws(self.drawn, self.dispatches, self.positions.copied)
        self.choosing = plan.choosing
        self.converts = plan.converts
        self.grad_mode = plan.grad_mode
        self.functions: list[FunctionType] = []  # of the user
        self.inference = InferenceModes(self.dispatches)
        self.context: tuple[tuple[ContextVar[Any], Any], ...] = ()
        self.learning: Learning | None = None
        self.numbers: dict[Node, int] = {}  # node of a Number in the result -> its leaf
        self.containers = GivenContainers()
        self.changed_containers: ChangedContainers | None = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphModule:
        leaves, spec = named_leaves(args, kwargs)
        names = parameter_names(self.model)
        fake_leaves = [self._argument(argument_name(path, names), i, leaf) for i, (path, leaf) in enumerate(leaves)]
        fake_args, fake_kwargs = pytree.tree_unflatten(fake_leaves, spec)
        named = named_arguments(self.model, fake_args, fake_kwargs)
        self.containers = GivenContainers.of((args, kwargs), (fake_args, fake_kwargs), named)
        known = (*(leaf for _, leaf in leaves), *self.model.parameters(), *self.model.buffers())
        grad_mode = self.gradients or (self.grad_mode and not _needs_gradients(known))
        try:
            with (
                self._recording("forward", self._read_state(named)),
                torch.set_grad_enabled(grad_mode),
                settings_kept(),
                watching() as self.watched,
            ):
                result = self.model(*fake_args, **fake_kwargs)
            self._refuse_switches()
            self.inputs.refuse_accumulated()
            self.choices.raise_if_cut_off()
            if self.choosing == frozenset():  # not tried yet
                raise_if_several(self.drawn, self.functions)
            return self._finish(self._with_learned(self._with_assigned(result)))
        except (Assigns, Chooses, Reads, NoData):
            raise
        except CaptureError as error:
            if self.reader.gave_symbols and not self.reader.plain:  # plain numbers may work where Numbers fail
                raise WantsPlain from error
            if isinstance(error, NeedsGradients):
                error.hidden = _needs_gradients(spec.value for spec in self.inputs.specs)
            error.depends = bool(self.reader.facts)
            raise

    def _refuse_switches(self) -> None:
        """Refuse ``requires_grad_`` of a tensor that the caller has: later calls would not repeat it.

        Raises:
            RequiresGradOfArguments: ``forward`` begins with it, and the tensors are arguments.
        """
        positions = []
        for fake in switched(self.inputs.adopted.values()):
            spec = next(
                (s for s, p in zip(self.inputs.specs, self.inputs.placeholders, strict=True) if p is fake), None
            )
            argument = spec is not None and spec.kind == "argument" and fake.requires_grad
            if spec is None or not argument or not needed_at_first(fake, self.dispatches):
                name = spec.name if spec else self.inputs.names_by_fake.get(id(fake), ("", "a tensor"))[1]
                raise CaptureError(f"forward sets requires_grad of {name}; a graph cannot hold that")
            positions.append(spec.index)
        if positions:
            raise RequiresGradOfArguments(positions)

    @contextlib.contextmanager
    def _read_state(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """A context in which the model's state is fake, and reads of values are followed."""
        with (
            self._fake_state(arguments),
            reads_followed(self.reader, self.positions),
            reassignments_followed(self._assign_data, self._swapped),
            gradients_noted(self._note_gradient),
            subclasses_refused(),
        ):
            yield

    def _note_gradient(self, tensor: Tensor, value: Tensor | None) -> None:
        with self.reader.refusing():
            self.inputs.note_gradient(tensor, value)

    def _swapped(self) -> None:
        self.unfollowed = "swapped with another"

    def _assign_data(self, tensor: Tensor, other: Tensor, assign: Assign) -> None:
        """Follow ``tensor.data = other``."""
        if id(tensor) not in self.inputs.data or any(one is tensor for one, _, _ in self.functional.reshaped):
            self.unfollowed = "it is no input of the call"
        elif reason := obstacle(tensor, other):
            self.unfollowed = reason
        if self.unfollowed:
            assign(tensor, other)
            return
        self.inputs.known(tensor)
        other = self.inputs.known(other)
        with self.fakes.aside():
            changed_objects.rebind(self.functional, tensor, other, assign)

    @contextlib.contextmanager
    def _recording(self, what: str, state: AbstractContextManager[None]) -> Iterator[None]:
        """A context that records operators while ``state`` lasts; ``what`` names the pass in errors."""
        try:
            layers = contextlib.ExitStack()
            with layers, state, followed(self.functional.draws), fakes_hidden(), self.fake_mode, self:
                layers.enter_context(lstm_of_eager())
                layers.enter_context(pools_of_eager())
                layers.enter_context(idle_conversions())
                layers.enter_context(inference_followed(self.inference))
                layers.enter_context(packed_by_masks(self._pack))
                layers.enter_context(values_checked(self._check_values))
                yield
        except FuseError:
            raise
        except _DATA_DEPENDENT as error:
            reason = getattr(error, "func", None) or str(error).splitlines()[0]
            raise CaptureError(
                f"{reason}{_at(error)} depends on the values of a tensor, which a graph cannot hold"
            ) from error
        except Exception as error:  # whatever the user's code raises
            text = (str(error).splitlines() or [""])[0]
            raise CaptureError(f"{what} failed{_at(error)}: {type(error).__name__}: {text}") from error
        finally:
            self.inputs.put_back_gradients()
            torch.clear_autocast_cache()  # it may hold fake copies of weights

    def _pack(self) -> None:
        self.packs = True

    # ---- inputs ------------------------------------------------------------------------------------------------------

    def _argument(self, name: str, index: int, leaf: Any) -> Any:
        return self.inputs.argument(name, index, leaf)

    @contextlib.contextmanager
    def _fake_state(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """A context in which parameters and buffers are fake. Changes of other state are found and undone."""
        self._check_entries()
        before = reached_by(self.model, arguments)
        copied = self.containers.entries()
        before = replace(before, held=[one for one in before.held if id(one.live) not in copied])
        if before.iterators:  # the values that it gave cannot be put back
            name = before.iterators[0].name
            raise CaptureError(f"forward may advance {name}, an iterator; a graph cannot hold that")
        self.context, self.functions = tuple(before.variables.items()), before.functions
        changes: list[Change] = []
        try:
            with (
                with_fake_parameters(self.model, self.inputs.of_state) as assigned,
                self.overlay.applied(self.inputs.of_attribute),
                draws_followed(self.drawn, before.names, before.cells, before.functions),
                self.choices.made(before.functions, self.choosing or frozenset()),
                converted(before.functions if self.converts else (), self.reader.item),
            ):
                yield
        except Exception as error:  # whatever the user's code raises
            if counts := self.overlay.counts():  # a plain number may work where a count fails
                raise Reads(counts) from error
            raise
        finally:
            changes = before.restore(self.inputs.is_fake_of)
        self.overlay.check()
        self.changed_containers = self.containers.changes([one.live for one in before.held])
        changes = [change for change in assigned() if change.attribute not in self.overlay.plan.attributes] + changes
        if changes:
            found = [(change.whole, self._assigned(change)) for change in changes]
            plainly = all(whole or attribute.entries for whole, attribute in found)
            raise Assigns(changes[0].name, [attribute for _, attribute in found], plainly)

    def _check_entries(self) -> None:
        """Refuse dictionaries that another object holds, too: it would see old values, since only the attribute is
        replaced."""
        for attribute in self.overlay.plan.attributes:
            if attribute.entries:
                holder = self.model.get_submodule(attribute.owner).__dict__
                if any(one is not holder and not is_own(one) for one in gc.get_referrers(holder[attribute.name])):
                    raise CaptureError(
                        f"forward changes the contents of {attribute.name}, which another object holds, too"
                    )

    def _assigned(self, change: Change) -> Attribute:
        """The attribute that a change assigns, or the entries of the dictionary in it."""
        attribute = change.attribute
        if change.whole or change.replaced is None or attribute.owner not in dict(self.model.named_modules()):
            return attribute
        held = self.model.get_submodule(attribute.owner).__dict__.get(attribute.name)
        return replace(attribute, entries=held is change.replaced)

    def _number_of_attribute(self, number: int | float, name: str) -> tuple[Tensor, Any]:
        """A number in an attribute as an input: its fake tensor, and what ``forward`` sees."""
        fake = self.inputs.of_attribute(tensor_of(number), name)
        return fake, self.reader.item(fake)

    def _refuse_learned_numbers(self) -> None:
        """Refuse attributes as inputs if the graph learns their numbers: it would serve one call only."""
        if numbers := self.overlay.numbers():
            nodes = {
                self.functional.value(fake): numbers[id(fake)]
                for fake in self.inputs.placeholders
                if id(fake) in numbers
            }
            if learned := self.reader.learned_of(nodes):
                raise Reads([nodes[node] for node in learned])

    def _with_learned(self, result: Any) -> Any:
        """The pair of confirming values and ``result``; ``result`` alone if nothing was learned."""
        self.functional.settle()
        self._refuse_learned_numbers()
        leaves = flatten_result(result)[0]
        self.positions.check(leaves)
        tensors, self.learning, self.numbers = self.reader.finish(leaves)
        if not self.learning.lines and not self.learning.leaves:
            self.learning = None
        return (tensors, result) if self.learning else result

    def _with_assigned(self, result: Any) -> Any:
        """``result``, the assigned values and the new contents of containers, if there are any; attributes that the
        call reads become inputs."""
        overlay, changed = self.overlay, self.changed_containers
        result = self.containers.replaced(result)
        if changed is None and any(isinstance(leaf, GivenContainer) for leaf in flatten_result(result)[0]):
            changed = self.changed_containers = ChangedContainers(())
        if not overlay.slots and changed is None and not self.inputs.reassigned():
            return result
        overlay.refuse_counts(result)
        leaves = overlay.leaves()
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self.inputs.known(leaf)
        positions = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves)))}
        for i, (spec, fake) in enumerate(zip(self.inputs.specs, self.inputs.placeholders, strict=True)):
            if spec.kind == "attribute":
                if id(fake) not in positions:
                    raise CaptureError("forward assigns and reads an attribute in a way that cannot be followed")
                self.inputs.specs[i] = replace(spec, index=positions[id(fake)])
        contents = self.containers.new_contents(changed.changed if changed else ())
        with self.fakes.aside():
            data = tuple(
                changed_objects.detached(self.functional, self.inputs.placeholders[i]) for i in self.inputs.reassigned()
            )
        return result, overlay.assigned(), contents, data

    # ---- recording ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if op is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if self.watched is not None:
            return self.watched.asleep(self._dispatched, op, args, kwargs or {})
        return self._dispatched(op, args, kwargs or {})

    def _dispatched(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        source = self._line()
        if not self.reader.compact:
            call = self.repeated.record(op, args, kwargs, source)
            if call is not NotImplemented:
                self.dispatches.append(call)
                return call.result
        with torch._C.DisableTorchFunctionSubclass():  # these calls are the recorder's, not the model's
            self.functional.source = source
            if self.reader.compact:
                self.functional.whole()
                call = self.repeated.record(op, args, kwargs, source)
                if call is not NotImplemented:
                    self.reader.recorded(op, args, kwargs, call.result)
                    self.dispatches.append(call)
                    return call.result
            return self._first(op, args, kwargs, source)

    def _first(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], source: str) -> Any:
        """Record an operator that has no template yet."""
        if op.namespace in ("prim", "profiler"):
            return op(*args, **kwargs)
        if ops.is_composite(op):  # inference mode does not decompose them, autograd would have
            with self:
                self._check_values(op, args, kwargs)
                return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if op in READS:
            self.functional.whole()
            found = self.reader.read(op, args, kwargs)
            self.dispatches.append(Dispatch(op, args, kwargs, found, self.functional.source))
            return found
        if op in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default):
            return self.inputs.constant(op, args[0])
        if ops.is_view(op) and isinstance(
            args[0], (int, float, complex)
        ):  # autograd calls it on the number in ``z * 1j``
            args = (self.inputs.number(args[0]), *args[1:])
        args, kwargs = self.inputs.operands(args), self.inputs.operands(kwargs)
        if op not in COLLECTORS:
            self.functional.ask_for((args, kwargs))
        if has_byte_masks(op, args):
            count = len(self.dispatches)
            with self:
                result = op(*with_masks(args), **kwargs)
            del self.dispatches[count:]
            self.dispatches.append(Dispatch(op, args, kwargs, result, source))
            return result
        if reason := put_shapes.obstacle(op, args):
            raise CaptureError(f"{op} at {source} {reason}; it runs in eager mode")
        result = functional_forms.record(self.functional, op, args, kwargs, lambda: self._run(op, args, kwargs))
        self.reader.recorded(op, args, kwargs, result)
        if reason := dtype_numbers.obstacle(op, args, kwargs, result) or probing.obstacle(op, args, kwargs):
            raise CaptureError(f"{op} at {source} {reason}; it runs in eager mode")
        self.repeated.learn(op, args, kwargs, result)
        self.dispatches.append(Dispatch(op, args, kwargs, result, source))
        return result

    def _check_values(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record a check that eager makes inside ``op``; it adds no launch of eager's."""
        count = len(self.dispatches)
        check_values(op, args, kwargs)
        del self.dispatches[count:]

    def _run(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """``op`` on fake tensors; on the values of this call, if the result layout depends on values."""
        try:
            return self.fakes.run(op, args, kwargs)
        except FuseError:
            raise
        except Exception as why:
            if not isinstance(why, _SIZED) and op.namespace == "aten":
                raise
            self.functional.whole()
            return self.reader.sized(op, args, kwargs, why)

    _line: Callable[..., str] = staticmethod(user_line)
    """The user's line of the current operator."""

    # ---- result ------------------------------------------------------------------------------------------------------

    def _finish(self, result: Any) -> GraphModule:
        self.functional.settle()
        leaves, out_spec = flatten_result(result)
        self.functional.ask_for([self.inputs.known(leaf) for leaf in leaves if isinstance(leaf, Tensor)])
        if self.unfollowed:
            raise CaptureError(
                f"forward assigns the .data of a tensor, or swaps it ({self.unfollowed}); a graph cannot hold that"
            )
        found = ResultLeaves(self.functional, self.inputs.placeholders, self.inputs.known, self.numbers, self.gradients)
        outputs, mutations = found.outputs(leaves), found.mutations()
        module = finished(self.graph, found.values, self.modules)
        module.meta["may_stop"] = not self.gradients  # loops, if learned values decide that (loops/stopping.py)
        module.meta["signature"] = Signature(
            tuple(self.inputs.specs),
            outputs,
            out_spec,
            mutations,
            tuple(self.dispatches),
            self.overlay.mutated(),
            self.learning,
            not self.packs,
            self.context,
            self.inference.is_whole(),
            self.changed_containers,
            self.drawn.found(),
            self.inputs.reassigned(),
            self.inputs.reshaped(),
            self.inputs.raised(),
            self.inputs.ungraded(),
            self.watched.found() if self.watched is not None else None,
        )
        return module

    def short(self, graph: GraphModule) -> GraphModule:
        """The recorded ``graph`` for passes; a copy with stand-ins if steps were left out."""
        steps = self.functional.steps
        return shortened(graph, self.functional.whole) if steps is not None and steps.loops else graph


def _needs_gradients(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _at(error: BaseException) -> str:
    line = line_of(error)
    return f" at {line}" if line else ""
