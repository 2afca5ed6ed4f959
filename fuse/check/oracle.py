"""The oracle: run one call eager, fused and in float64, and compare everything that a caller could notice.

    copies of the call -> eager   -> results, inputs and buffers afterwards, launches
                       -> fused   -> the same twice (the call that compiles, and a later one)
                       -> float64 -> reference values

It compares values, dtypes, shapes, strides, mutations and shared memory, and predicted with observed launches. Random
operators draw the same numbers in float64 (``draws.py``). If the model cannot run in float64 (it fixes a dtype), eager
is the reference, and the report says so.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fuse.check.compare import Comparison, compare
from fuse.check.draws import RecordedDraws, Replayed
from fuse.check.inputs import CheckCall, copied, in_float64
from fuse.check.locate import first_difference
from fuse.check.outcome import CallOutcome, gradients_of, outcome_of, structure_problems, values_of
from fuse.check.sizes import Jittered, sizes
from fuse.cost.count import count_dispatches, count_graph
from fuse.cost.observe import CountingMode
from fuse.cost.profiles import of_device
from fuse.devices import device_of
from fuse.errors import CaptureError
from fuse.graph.backward.joint import capture_joint
from fuse.graph.capture import capture
from fuse.graph.state.attributes import restore
from fuse.graph.state.python_generators import global_generators
from fuse.graph.structure.arguments import flatten_arguments
from fuse.graph.structure.result_structure import named_parts
from fuse.notebook import preformatted
from fuse.runtime.engine import Engine
from fuse.runtime.guards.call_guards import sources_of
from fuse.runtime.module import Fused
from fuse.runtime.programs.steps import Fallback, Launches
from fuse.runtime.variants.compiled import Compiled
from fuse.runtime.variants.mutated_attributes import carried


@dataclass(frozen=True)
class CheckReport:
    """Result of :func:`check`. ``problems`` is empty when the fused call equals eager's.

    ``predicted`` and ``observed`` are launches (before, after); predicted is None for a call that cannot be captured.
    ``observed_backward`` has those of the backward pass, if there is one. ``first_difference`` names the node at fault
    when values differ.
    """

    comparisons: tuple[Comparison, ...]
    problems: tuple[str, ...]
    reference: str
    predicted: tuple[int | None, int | None]
    observed: tuple[int, int]
    regions: int
    fallbacks: tuple[Fallback, ...]
    first_difference: str = ""
    observed_backward: tuple[int, int] | None = None

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def launches_after(self) -> int:
        """All observed launches of the fused call, including its backward pass."""
        return self.observed[1] + (self.observed_backward[1] if self.observed_backward else 0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema_version": 1,
            "passed": self.passed,
            "problems": list(self.problems),
            "first_difference": self.first_difference or None,
            "reference": self.reference,
            "predicted": dict(zip(("before", "after"), self.predicted, strict=True)),
            "observed": dict(zip(("before", "after"), self.observed, strict=True)),
            **(
                {"observed_backward": dict(zip(("before", "after"), self.observed_backward, strict=True))}
                if self.observed_backward
                else {}
            ),
            "regions": self.regions,
            "fallbacks": [{"op": f.op, "source": f.source, "reason": f.reason} for f in self.fallbacks],
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
        }

    def _repr_html_(self) -> str:
        return preformatted(self)

    def __str__(self) -> str:
        lines = [f"reference: {self.reference}"]
        shown = [c for c in self.comparisons if c.problem or c.error or c.name.startswith("result")]
        width = max((len(c.name) for c in shown), default=0)
        for c in shown:
            verdict = c.problem or f"error {c.error:.2e}   eager's {c.eager_error:.2e}   allowed {c.allowed:.2e}"
            lines.append(
                f"{'differs' if c.problem else 'same':<8} {c.name:<{width}}  {c.dtype} {list(c.shape)}  {verdict}"
            )
        if silent := len(self.comparisons) - len(shown):
            lines.append(f"same     {silent} inputs, parameters and buffers afterwards, bit for bit")
        lines.append("launches            before    after")
        launches = [("predicted", self.predicted), ("observed", self.observed)]
        launches += [("  backward", self.observed_backward)] if self.observed_backward else []
        for name, pair in launches:
            before, after = ("?" if n is None else str(n) for n in pair)
            lines.append(f"  {name:<14} {before:>9} {after:>8}")
        lines += [f"fallback: {f.op} at {f.source or '?'}: {f.reason}" for f in self.fallbacks]
        lines += [f"problem: {problem}" for problem in self.problems]
        if self.first_difference:
            lines.append(f"first difference: {self.first_difference}")
        lines.append("passed" if self.passed else "failed")
        return "\n".join(lines)


def check(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = False,
    seed: int = 0,
    atol: float | None = None,
    rtol: float | None = None,
    passes: Sequence[str] | None = None,
    fuel: int | None = None,
    dynamic_shapes: Any = "auto",
) -> CheckReport:
    """Run one call eager and fused, and compare everything that a caller could notice.

    The model and the arguments are copied, not changed. ``train`` runs with gradients, and compares the gradients of
    every parameter and input. ``atol`` and ``rtol`` replace the default tolerance; ``passes`` and ``fuel`` are as in
    ``run_passes``, ``dynamic_shapes`` as in ``fuse.compile``.

    Raises:
        FuseError: the call cannot be copied.

    >>> report = check(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(2, 4),))
    >>> report.passed, report.observed
    (True, (2, 2))
    """
    call = CheckCall(model, tuple(args), dict(kwargs or {}))
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(train):
        counting, counting_backward = CountingMode(), CountingMode()
        eager_call, fused_call = copied(call), copied(call)
        with RecordedDraws() as draws:
            eager = _outcome(eager_call, None, seed, train, counting, counting_backward)
        exact, reference = _reference(call, eager, seed, train, draws)
        engine = Engine(fused_call.model, False, passes, fuel, dynamic_shapes)
        fused = Fused(engine)
        memory, held = _memory(fused_call), fused_call.snapshots()
        first = _outcome(fused_call, fused, seed, train)
        if engine.fills:  # a first call that fills caches: the second one is captured
            counting, counting_backward = CountingMode(), CountingMode()
            eager = _outcome(eager_call, None, seed, train, counting, counting_backward)
            exact, reference = None, "eager, since the first call filled what the second one read"
            memory, held = _memory(fused_call), fused_call.snapshots()
            first = _outcome(fused_call, fused, seed, train)
        run = fused.last_run
        assert run is not None
        compiled = fused.compiled
        rounding = _coarsest(compiled)
        judged = exact, atol, rtol, rounding, cache(partial(_sizes, call, eager, exact, seed, train, draws, rounding))
        comparisons = _compare_all(first, eager, *judged)
        problems = [f"{c.name}: {c.problem}" for c in comparisons if c.problem]
        problems += structure_problems(first, eager)
        after = run.launches if compiled is not None else counting.launches
        if compiled is not None:
            restore(held, operator.is_)
            _restore(fused_call.tensors(), memory)
            again, counted = _again(fused_call, compiled, seed)
            later = _compare_all(again, eager, *judged)
            problems += [f"{c.name}, second call: {c.problem}" for c in later if c.problem and not problems]
            if counted != after:
                problems.append(f"{after} launches counted by the program, {counted} by a dispatch mode")
        predicted = _predicted(call, compiled, seed, train)
        problems += _count_problems(predicted, (counting.launches, after))
        where = ""
        if compiled is not None and compiled.graph is not None and any(c.problem for c in comparisons):
            where = _locate(call, compiled, seed)
    backward = run.backward
    return CheckReport(
        tuple(comparisons),
        tuple(problems),
        reference,
        predicted,
        (counting.launches, after),
        run.regions,
        (*run.fallbacks, *(backward.fallbacks if backward else ())),
        where,
        (counting_backward.launches, backward.launches) if backward else None,
    )


# ---- running -------------------------------------------------------------------------------------------------------


def _outcome(
    call: CheckCall,
    function: Any,
    seed: int,
    train: bool,
    counting: CountingMode | None = None,
    counting_backward: CountingMode | None = None,
) -> CallOutcome:
    _seed(seed)
    for tensor in call.tensors().values() if train else ():
        if tensor.is_leaf:
            tensor.grad = None
    with counting or contextlib.nullcontext():
        result = call.run(function)
    gradients = {}
    if train:
        _backward(result, counting_backward)
        gradients = gradients_of(call)
    return outcome_of(result, call, gradients)


def _seed(seed: int) -> None:
    """Seed torch, ``random`` and numpy, so that every run draws the same numbers."""
    # Without an accelerator torch.manual_seed takes a millisecond: it keeps the stack, for a device that may come.
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(seed)
    for generator in global_generators():
        generator.seed(seed)


def _backward(result: Any, counting: CountingMode | None = None) -> None:
    leaves = [t for t in named_parts(result).values() if isinstance(t, Tensor) and t.requires_grad]
    tangents = [_tangent(t) for t in leaves]
    with counting or contextlib.nullcontext():
        if leaves:
            torch.autograd.backward(leaves, tangents)


def _tangent(leaf: Tensor) -> Tensor:
    """The gradient of a result: numbers from 0.5 to 1.5 that every dtype holds. Equal ones cancel in a softmax."""
    numbers = torch.arange(leaf.numel(), device=leaf.device).mul_(5).remainder_(9).add_(4).view(leaf.shape) / 8
    return torch.empty_like(leaf).copy_(numbers)


def _again(call: CheckCall, compiled: Compiled, seed: int) -> tuple[CallOutcome, int]:
    """A later call of the compiled program, under a mode that counts its dispatches to ATen."""
    _seed(seed)
    leaves, _ = flatten_arguments(call.args, call.kwargs)
    given = compiled.carried.extend(leaves, None)[0] if compiled.carried else leaves
    tensors = compiled.guard.pick((*given, *compiled.guard.state))
    containers = compiled.carried.given(call.args, call.kwargs) or () if compiled.carried else ()
    assert compiled.program is not None
    assert compiled.rebuild is not None
    if compiled.drawing is not None:
        tensors, _ = compiled.drawing.begin(tensors)
    if compiled.training is not None:
        for tensor in call.tensors().values():
            tensor.grad = None
        with CountingMode() as counting:
            result, launches, _ = compiled.training.run(tensors, containers)
    else:
        with CountingMode() as counting:
            values, launches = compiled.program.run(tensors)
        if compiled.effects is not None:
            compiled.effects(tensors)
        result = compiled.rebuild(values, (*tensors, *containers))
    if compiled.learning is not None:
        _, result = result
    if compiled.carried:
        result = compiled.carried.assign(result, containers, tensors)
    if compiled.training is not None:
        _backward(result)
    native = Launches.unpack(launches)
    counted = native.kernels + native.libraries + counting.launches
    return outcome_of(result, call, gradients_of(call)), counted


def _memory(call: CheckCall) -> dict[str, tuple[Tensor, Tensor]]:
    """The memory of each tensor, and a copy of its contents."""
    return {name: (t.data, _bytes(t).clone()) for name, t in call.tensors().items()}


def _restore(tensors: Mapping[str, Tensor], memory: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    for name, tensor in tensors.items():
        tensor.data, contents = memory[name]
        _bytes(tensor).copy_(contents)


def _bytes(tensor: Tensor) -> Tensor:
    """The whole memory behind ``tensor``: the elements of an expanded one cannot be written one by one."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _reference(
    call: CheckCall, eager: CallOutcome, seed: int, train: bool, draws: RecordedDraws
) -> tuple[CallOutcome | None, str]:
    """The call in float64 with eager's random draws, or None, and a description of the reference."""
    try:
        with _default_dtype(torch.float64), Replayed(draws):
            exact = _outcome(in_float64(call), None, seed, train)
    except Exception as error:  # not every model runs in float64
        text = (str(error).splitlines() or [""])[0]
        return None, f"eager (in float64 the model fails: {type(error).__name__}: {text})"
    for name, value in eager.results.items():
        twin = exact.results.get(name)
        if isinstance(value, Tensor) and (not isinstance(twin, Tensor) or twin.shape != value.shape):
            return None, "eager (in float64 the model returns something else)"
    return exact, "float64"


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- judging -------------------------------------------------------------------------------------------------------


def _compare_all(
    fused: CallOutcome,
    eager: CallOutcome,
    exact: CallOutcome | None,
    atol: float | None,
    rtol: float | None,
    rounding: float,
    sizes: Callable[[int], Mapping[str, Tensor]],
) -> list[Comparison]:
    mine, theirs, best = values_of(fused), values_of(eager), values_of(exact) if exact else {}
    found = []
    for name, value in theirs.items():
        if name in mine:
            size = partial(lambda name, runs: sizes(runs).get(name), name)
            pair = name, mine[name], value, best.get(name)
            found.append(compare(*pair, atol=atol, rtol=rtol, size=size, rounding=rounding))
    return found


def _sizes(
    call: CheckCall,
    eager: CallOutcome,
    exact: CallOutcome | None,
    seed: int,
    train: bool,
    draws: RecordedDraws,
    rounding: float,
    runs: int,
) -> dict[str, Tensor]:
    """The size of each element, by so many ``runs`` on other numbers; empty if the call fails on these."""
    values = values_of(exact or eager)
    dtypes = [value.dtype for value in values_of(eager).values() if value.is_floating_point()]
    unit = max([rounding, *(torch.finfo(dtype).eps for dtype in dtypes)])

    def run(mode: Jittered) -> list[Tensor | None]:
        moved = copied(call) if exact is None else in_float64(call)
        wide = contextlib.nullcontext() if exact is None else _default_dtype(torch.float64)
        mode.move(one.detach() for one in moved.tensors().values())
        with wide, Replayed(draws), mode:
            found = values_of(_outcome(moved, None, seed, train))
        return [found.get(name) for name in values]

    try:
        found = sizes(run, list(values.values()), unit, runs)
    except Exception:  # the model may fail on other numbers
        return {}
    return {name: size for name, size in zip(values, found, strict=True) if size is not None}


def _coarsest(compiled: Compiled | None) -> float:
    """The last place of 1 in the coarsest floating-point dtype of the graph; 0 if no graph was captured."""
    if compiled is None or compiled.graph is None:
        return 0.0
    values = pytree.tree_leaves([node.meta.get("val") for node in compiled.graph.graph.nodes])
    dtypes = {v.dtype for v in values if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _predicted(call: CheckCall, compiled: Compiled | None, seed: int, train: bool) -> tuple[int | None, int | None]:
    """Launches before and after, as the graph of the call says; it is captured again where no program was made."""
    graph = compiled.graph if compiled is not None else None
    captured = graph if graph is not None and graph.meta["signature"].dispatches else _captured(call, seed, train)
    if captured is None:
        return None, None
    signature, profile = captured.meta["signature"], of_device(device_of(captured))
    before = count_dispatches(signature.dispatches, profile).launches if signature.eagers else None
    return before, None if graph is None else count_graph(graph, profile).launches


def _captured(call: CheckCall, seed: int, train: bool) -> GraphModule | None:
    _seed(seed)  # a random number in the model may decide which operators launch
    try:
        if train:
            return capture_joint(call.model, call.args, call.kwargs).forward
        return capture(call.model, call.args, call.kwargs)
    except CaptureError:
        return None


def _count_problems(predicted: tuple[int | None, int | None], observed: tuple[int, int]) -> list[str]:
    return [
        f"{guess} launches predicted {when}, {real} observed"
        for when, guess, real in zip(("before", "after"), predicted, observed, strict=True)
        if guess is not None and guess != real
    ]


def _locate(call: CheckCall, compiled: Compiled, seed: int) -> str:
    _seed(seed)
    captured = capture(call.model, call.args, call.kwargs)
    fresh = copied(call)
    leaves, _ = flatten_arguments(fresh.args, fresh.kwargs)
    signature = captured.meta["signature"]
    carry = carried(fresh.model, signature, leaves, None)
    given = carry.extend(leaves, None)[0] if carry else leaves
    sources = sources_of(signature.inputs, fresh.model, len(leaves))
    tensors = [given[source] if isinstance(source, int) else source for source in sources]
    return first_difference(compiled, captured, [t.detach() for t in tensors])
