"""Random recurrent models, rolled or not, held to eager's values, layouts, aliases and launches.

A program is Python text: states, what a step reads, what it computes, what is kept of it, and sometimes a step unlike
the others. A failure prints a model that can be pasted. ``FUSE_LOOP_PROGRAMS=2000 pytest tests/test_loop_programs.py``
looks longer; with ``-s`` it tells how many of the loops rolled.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor, nn
from torch.fx import GraphModule

from fuse.check.oracle import CheckReport, check
from fuse.kernel.cpu import emit, loop_kernel, loop_units
from fuse.passes.roll_loops import LEAST_STEPS
from fuse.rewrite import distributing
from fuse.rewrite.ledger import Ledger
from fuse.rewrite.pipeline import run_passes
from fuse.runtime import engine

EXAMPLES = int(os.environ.get("FUSE_LOOP_PROGRAMS", "100"))
LARGEST = 50.0  # values beyond would drown an error elsewhere
TOLERANCES = {torch.float32: 2e-4, torch.float64: 1e-9, torch.bfloat16: 0.15}
WIDTHS = (1, 2, 5, 16, 17, 24, 40)

READS = (  # what `x` is, and the expression by which a step reads [batch, width] of it
    ("x", "x[t]"), ("x", "x[t]"), ("x", "x[T - 1 - t]"), ("x", "x[t - 1]"), ("x", "x[min(t, T - 2)]"),
    ("x", "x[-1 - t]"), ("x.transpose(0, 1)", "x[:, t]"), ("x.transpose(0, 1).contiguous()", "x[:, t]"),
    ("x.permute(1, 2, 0)", "x[..., t]"), ("x.movedim(0, -1).contiguous()", "x.select(-1, t)"),
    ("x.transpose(0, 1)", "x[:, t : t + 1].squeeze(1)"), ("x", "x[t : t + 1].squeeze(0)"),
    ("x", "x.narrow(0, t, 1)[0]"), ("x.unbind(0)", "x[t]"), ("x.split(1)", "x[t].squeeze(0)"),
    ("torch.cat([x, x.flip(0)])", "x[2 * t]"), ("x[::2].repeat(2, 1, 1)", "x[t]"), ("x", "x[0]"),
    ("x.chunk(T)", "x[t][0]"), ("x.tanh()", "x[t]"), ("x.flatten(1)", "x[t].view(B, -1)"),
    ("x.transpose(1, 2)", "x[t].t()"),
)  # fmt: skip
STARTS = (
    "torch.zeros(B, {n}, dtype=x.dtype)", "h0 @ self.w{m}{k}", "torch.full((B, {n}), 0.25, dtype=x.dtype)",
    "self.b{k}.expand(B, {n})", "(self.b{k} * torch.ones(B, 1, dtype=x.dtype))",
    "torch.ones({n}, B, dtype=x.dtype).t()", "(h0 @ self.w{m}{k}).t().contiguous().t()",
)  # fmt: skip
UNARY = (
    "torch.tanh({a})", "torch.sigmoid({a})", "torch.relu({a})", "{a} * 0.5", "1 - {a}",
    "torch.nn.functional.silu({a})", "{a} * self.b{k}", "{a} + self.b{k}", "torch.nn.functional.gelu({a})",
    "{a}.clamp(-1, 1)", "{a}.contiguous()", "torch.where({a} > 0.3137, {a}, -0.5)",
    "{a}.masked_fill({a} < 0.1618, 0.0)", "{a}.t().tanh().t()", "{a}.neg_().clone()", "{a} * (t / 8)",
    "{a} - 0.1 * t", "{a} * 0.9 ** t", "{a} + t * self.b{k}", "{a} * torch.full((), 0.5 ** t, dtype=x[0].dtype)",
)  # fmt: skip
BINARY = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.lerp({a}, {b}, 0.3)", "torch.maximum({a}, {b})",
    "torch.where(keep[t], {a}, {b})", "torch.where({a} > 0.3137, {a}, {b})", "torch.addcmul({a}, {a}, {b}, value=0.5)",
    "torch.sigmoid({a}) * {b}", "torch.cat([{a}, {b}], 1).chunk(2, 1)[1]", "torch.stack([{a}, {b}]).sum(0)",
)  # fmt: skip
REDUCTIONS = (
    "{a}.softmax(1)", "torch.nn.functional.layer_norm({a}, ({n},))", "{a} - {a}.mean(1, keepdim=True)",
    "{a}.logsumexp(1, keepdim=True) * 0.1 + {a}", "{a} * {a}.sum(-1, keepdim=True).tanh()",
    "{a}.max(1, keepdim=True)[0] - {a}", "torch.nn.functional.layer_norm({a}, ({n},), self.b{k}, self.b{k})",
    "({a}.unsqueeze(2) + self.w{k}{k}).logsumexp(1) * 0.2", "{a} + {a}.argmax(1, keepdim=True)",
    "{a} + {a}.mean(0, keepdim=True)", "{a}.softmax(0)", "{a}.log_softmax(-1) * 0.1",
    "({a}.unsqueeze(2) + self.w{k}{k}).max(1)[0] * 0.3", "{a}.cumsum(1) * 0.1",
    "torch.max({a}.unsqueeze(2) * self.w{k}{k}, 1).values",
)  # fmt: skip
PRODUCTS = (
    "{s} @ self.w{m}{k}", "{s} @ self.w{m}{k}", "torch.nn.functional.linear({s}, self.w{k}{m}, self.b{k})",
    "({s} @ self.w{m}{k}).tanh()", "({s} @ self.wide{m}).chunk(3, 1)[1][:, :1] * self.b{k}",
    "torch.addmm(self.b{k}, {s}, self.w{m}{k})", "torch.mm({s}, self.w{k}{m}.t())",
    "({s} @ torch.cat([self.w{m}{k}, self.w{m}{k} * 2], 1)).chunk(2, 1)[1]", "(({s} @ self.w{m}{m}) @ self.w{m}{k})",
    "({s} @ torch.cat([self.w{m}{k}, self.w{m}{k} + 1], 1)).split({n}, 1)[0]", "({s} * {s}) @ self.w{m}{k}",
    "{s}.softmax(1) @ self.w{m}{k}", "torch.nn.functional.pad(({s} @ self.w{m}{k})[:, 1:], (0, 1))",
    "torch.nn.functional.pad(({s} @ self.w{m}{k})[:, :-1], (1, 0))", "torch.einsum('bi,ij->bj', {s}, self.w{m}{k})",
    "torch.cat([{s}, {s}], 1) @ torch.cat([self.w{m}{k}, self.w{m}{k}])", "({s} @ self.w{m}{k}).roll(1, 1)",
    "({s}.unsqueeze(1) @ self.w{m}{k}).squeeze(1)", "({s} @ self.w{m}{k}).flip(1)",
)  # fmt: skip
LIBRARY = (  # what no kernel computes
    "{a}.sort(1).values", "{a} * ({a} >= {a}.topk(1, 1).values * 0.5)", "{a}.sort(1, descending=True)[0].t().t()",
    "{a}.gather(1, {a}.sort(dim=1, stable=True)[1])", "{a} @ ({b}.t() @ {a}).softmax(1)", "{a}.cummax(1)[0]",
    "torch.linalg.solve(({a} @ {a}.t()).double().tanh() + 5 * torch.eye(B).double(), {b}.double()).to({a}.dtype)",
)  # fmt: skip
GROUPS = (UNARY, BINARY, BINARY, REDUCTIONS, PRODUCTS, PRODUCTS, LIBRARY)
NEXT = (
    "torch.tanh({a})", "torch.sigmoid({a}) * {a}.tanh()", "{a}.tanh() * 0.5 + {h} * 0.5",
    "torch.where(keep[t], {a}.tanh(), {h})", "torch.nn.functional.layer_norm({a}, ({n},))", "{a}.softmax(1)",
    "{a}.clamp(-1, 1)", "{h}", "{a}.tanh().t().contiguous().t()", "({a}.unsqueeze(2) + self.w{k}{k}).max(1)[0].tanh()",
)  # fmt: skip
KEPT = (
    "stack", "stack", "cat", "rows", "columns", "last", "some", "reversed", "pair", "twice", "with first", "scores",
    "sum", "sum of means", "wide",
)  # fmt: skip
AFTERWARDS = (  # another loop behind the first one
    "for t in range(T): z = torch.tanh({read} + z @ self.w00)",
    "for t in reversed(range(T)): z = torch.tanh({read} - z @ self.w00 * 0.5)",
    "for t in range(T): z = torch.tanh({read} @ self.w00 + z @ self.w00.t())",
    "for _ in range(5): z = z + 0.1 * torch.tanh(z @ self.w00)",
    "for t in range(T):\n        for _ in range(3): z = torch.tanh({read} + z @ self.w00)",
)


@dataclass(frozen=True)
class Drawn:
    """A model as text, the widths of its values, what it is called with, and whether threads share small work too."""

    text: str
    widths: tuple[int, int, int]
    inputs: tuple[Tensor, ...]
    shared_out: bool

    def __repr__(self) -> str:
        made = ", ".join(f"{t.dtype}{tuple(t.shape)} strides {t.stride()}" for t in self.inputs)
        return f"\n# widths {self.widths}; {made}{'; shared out' if self.shared_out else ''}\n{self.text}"

    def model(self) -> Model:
        return Model(self.text, self.widths).to(self.inputs[0].dtype).eval()


class Model(nn.Module):
    """Runs the text of a program as its forward; ``wij`` leads from width i to width j."""

    def __init__(self, text: str, widths: tuple[int, int, int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for i, rows in enumerate(widths):
            setattr(self, f"b{i}", nn.Parameter(torch.randn(rows, generator=generator) * 0.5))
            setattr(self, f"wide{i}", nn.Parameter(torch.randn(rows, 3 * rows, generator=generator) * rows**-0.5))
            for j, columns in enumerate(widths):
                setattr(self, f"w{i}{j}", nn.Parameter(torch.randn(rows, columns, generator=generator) * rows**-0.5))
        self.text = text

    def forward(self, *inputs: Tensor) -> Any:
        space: dict[str, Any] = {"torch": torch, "self": self}
        exec(compile(self.text, "<loop>", "exec"), space)
        function: Callable[..., Any] = space["forward"]
        return function(*inputs)


@st.composite
def programs(draw: DrawFn) -> Drawn:
    """A loop over 1 to 12 steps, mostly enough to roll, with one to three states."""
    widths = tuple(draw(st.sampled_from(WIDTHS)) for _ in range(3))
    length = draw(st.integers(4, 12) | st.sampled_from([1, 2, 3, 5]))
    batch = draw(st.integers(1, 7))
    dtype = draw(st.sampled_from([torch.float32] * 9 + [torch.float64, torch.float64, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 5)))
    inputs = tuple(
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((length, batch, widths[0]), (batch, widths[0]), (length, batch, 1))
    )
    program = _Program(draw, widths)
    text = program.text()
    return Drawn(text, widths, inputs, draw(st.booleans()))


class _Program:
    """Draws the lines of one program. ``scope`` are names of ``[batch, width]`` values, with the width's number."""

    def __init__(self, draw: DrawFn, widths: tuple[int, ...]) -> None:
        self.draw = draw
        self.widths = widths
        self.states = {f"h{i}": draw(st.integers(0, 2)) for i in range(1, 1 + draw(st.integers(1, 3)))}
        self.scope: dict[str, int] = dict(self.states)
        self.lagging = {f"g{h[1:]}": h for h in self.states if draw(st.integers(0, 3)) == 0}
        self.scope |= {older: self.states[h] for older, h in self.lagging.items()}

    def pick(self, choices: Any) -> Any:
        return self.draw(st.sampled_from(list(choices)))

    def text(self) -> str:
        made, read = self.pick(READS)
        lines = ["T, B = x.shape[:2]", "keep = mask > 0"]
        lines += [f"{h} = {self.filled(self.pick(STARTS), k)}" for h, k in self.states.items()]
        lines += [f"x = {made}"] if made != "x" else []
        body = [f"v0 = {read}"]
        self.scope["v0"] = 0
        if self.draw(st.integers(0, 3)) == 0:  # the step before's input, or a sum over outer values
            body.append("v0 = v0 + self.b0" if self.draw(st.booleans()) else f"v0 = v0 + {read} * 0.5")
        for number in range(1, 1 + self.draw(st.integers(1, 6))):
            body.append(self.line(f"v{number}"))
        body += self.next_states()
        before, kept, after, results = self.kept()
        body += kept
        for older, h in self.lagging.items():
            lines.append(f"{older} = {h}" if self.draw(st.booleans()) else f"{older} = {h} * 0.5")
            body = [f"{older}_next = {h}", *body, f"{older} = {older}_next"]
        if self.draw(st.integers(0, 4)) == 0:  # a state of integers
            lines.append("n = torch.zeros(B, dtype=torch.long)")
            body += [
                f"h1 = h1 * (n % 2).unsqueeze(1) + {self.pick(self.states)}.sum() * 0",
                "n = (n + h1.argmax(1)) % 5",
            ]
            results.append("n")
        if self.draw(st.integers(0, 5)) == 0:
            body.insert(self.draw(st.integers(1, len(body))), self.irregular())
        shown = [*results, *self.pick([(), *(((h,)) for h in self.states), tuple(self.states)])]
        shown = list(dict.fromkeys(shown)) or ["h1"]
        if self.draw(st.integers(0, 3)) == 0:
            lines.insert(2, f"z = {self.filled(self.pick(STARTS), 0)}")
            after = [self.pick(AFTERWARDS).format(read=read), *after]
            shown = ["z", *shown]
        loop = ["for t in range(T):", *(f"    {line}" for line in body)]
        lines += [*before, *loop, *after, f"return [{', '.join(f'({r})' for r in shown)}]"]
        return "\n    ".join(["def forward(x, h0, mask):", *lines])

    def filled(self, template: str, k: int, h: str = "") -> str:
        """``template`` for a result of width number ``k``: a, b of that width, s of any (number m)."""
        same = [name for name, width in self.scope.items() if width == k]
        source = self.pick(self.scope) if "{s}" in template else ""
        a, b = (self.pick(same), self.pick(same)) if "{a}" in template or "{b}" in template else ("", "")
        return template.format(a=a, b=b, h=h, s=source, m=self.scope.get(source, 0), k=k, n=self.widths[k])

    def line(self, name: str) -> str:
        template = self.pick(self.pick(GROUPS))
        k = self.draw(st.integers(0, 2)) if "{s}" in template else self.pick(self.scope.values())
        expression = self.filled(template, k)
        self.scope[name] = k
        return f"{name} = {expression}"

    def next_states(self) -> list[str]:
        """Assignments of the next states: one after another, or all at once, swapped where widths allow."""
        expressions = {}
        for h, k in self.states.items():
            if self.scope.keys() - self.states.keys() and all(
                self.scope[v] != k for v in self.scope if v not in self.states
            ):
                template = "({h} @ self.w{k}{k}).tanh()"
            else:
                template = self.pick(NEXT)
            expressions[h] = self.filled(template, k, self.pick([n for n, w in self.states.items() if w == k]))
        if self.draw(st.booleans()):
            return [f"{', '.join(expressions)} = {', '.join(expressions.values())}"]
        return [f"{h} = {e}" for h, e in expressions.items()]

    def kept(self) -> tuple[list[str], list[str], list[str], list[str]]:
        """What is kept of the steps: lines before the loop, inside, after it, and results."""
        before, inside, after, results = [], [], [], []
        for number in range(self.draw(st.integers(0, 2))):
            value, y = self.pick(self.scope), f"y{number}"
            k = self.scope[value]
            width = self.widths[k]
            match self.pick(KEPT):
                case "stack":
                    before, inside = [*before, f"{y} = []"], [*inside, f"{y}.append({value})"]
                    results.append(f"torch.stack({y}, {self.pick([0, 1, 2, -1])})")
                case "cat":
                    dim = self.pick([0, 1, 2])
                    before, inside = [*before, f"{y} = []"], [*inside, f"{y}.append({value}.unsqueeze({dim}))"]
                    results.append(f"torch.cat({y}, {dim})")
                case "rows":
                    before.append(f"{y} = torch.empty(T, B, {width}, dtype=x[0].dtype)")
                    inside, results = [*inside, f"{y}[t] = {value}"], [*results, y]
                case "columns":
                    before.append(f"{y} = torch.zeros(B, T, {width}, dtype=x[0].dtype)")
                    inside, results = [*inside, f"{y}[:, t] = {value}"], [*results, y]
                case "last":
                    results.append(f"{value} * 2" if self.draw(st.booleans()) else f"{value}.sum()")
                case "some":
                    inside.append(f"if t == T // 2: {y} = {value} + 1")
                    results.append(y)
                case "reversed":
                    before, inside = [*before, f"{y} = []"], [*inside, f"{y}.append({value})"]
                    results.append(f"torch.stack({y}[::-1])")
                case "pair":
                    other = self.pick(self.scope)
                    before = [*before, f"{y} = []"]
                    inside.append(f"{y}.append(torch.cat([{value}, {other}], 1))")
                    results.append(f"torch.stack({y})")
                case "twice":
                    before, inside = [*before, f"{y} = []"], [*inside, f"{y}.append({value})"]
                    results += [f"torch.stack({y}, 1)", f"torch.cat({y}, 1) + 1"]
                case "scores":
                    before, inside = (
                        [*before, f"{y} = []"],
                        [*inside, f"{y}.append(({value} @ self.wide{k}).softmax(1))"],
                    )
                    results.append(f"torch.stack({y}, {self.pick([0, 1])})")
                case "wide":
                    before = [*before, f"{y} = []"]
                    inside.append(f"{y}.append(torch.relu(torch.nn.functional.linear({value}, self.wide{k}.t())))")
                    results.append(f"torch.cat({y})")
                case "sum":
                    before.append(f"{y} = torch.zeros(B, {width}, dtype=x[0].dtype)")
                    inside, results = [*inside, f"{y} = {y} + {value}.softmax(1)"], [*results, y]
                case "sum of means":
                    before.append(f"{y} = {self.pick([0, 0.0])}")
                    inside.append(f"{y} = {y} + torch.nn.functional.mse_loss({value}, {value}.tanh())")
                    results.append(y)
                case "with first":
                    before = [*before, f"{y} = [{value}]"] if value in self.states else [*before, f"{y} = []"]
                    inside = [*inside, f"{y}.append({value})"]
                    results.append(f"torch.stack({y})")
        return before, inside, after, results

    def irregular(self) -> str:
        when = self.pick(["t == 0", "t == T - 1", "t == T // 2", "t % 2", "t > 1"])
        name = self.pick(self.states)
        return f"if {when}: {name} = " + self.pick(
            [f"{name} * 0.5", f"{name}.cos()", f"{name} + t", f"{name} * keep[t]"]
        )


SHARE: Counter[bool] = Counter()
"""Whether the loop rolled, of each program with steps enough."""


@pytest.fixture(scope="module", autouse=True)
def share_of_rolled_loops() -> Iterator[None]:
    yield
    print(f"\nloops that rolled: {SHARE[True]} of {SHARE.total()}")


def recorded(graph: GraphModule, *rest: Any) -> Ledger:
    """Runs the passes and counts the loops that they roll."""
    ledger = run_passes(graph, *rest)
    SHARE[any(f.pass_name in ("roll_loops", "roll_whole_loops") for f in ledger.fired)] += 1
    return ledger


@pytest.fixture(scope="module", autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def held_to_eager(program: Drawn) -> CheckReport:
    tolerance = TOLERANCES[program.inputs[0].dtype]
    with pytest.MonkeyPatch.context() as patched:
        if len(program.inputs[0]) >= LEAST_STEPS:
            patched.setattr(engine, "run_passes", recorded)
        if program.shared_out:
            patched.setattr(emit, "PARALLEL_WORK", 1)
            patched.setattr(loop_kernel, "PARALLEL_WORK", 1)
            patched.setattr(loop_units, "WORK_FOR_A_THREAD", 1)
            patched.setattr(distributing, "LEAST_WORK", 1)
        report = check(program.model(), program.inputs, atol=tolerance, rtol=tolerance)
    assert report.passed, f"{program}\n{report}"
    failed = [f for f in report.fallbacks if "internal error" in f.reason or "failed (" in f.reason]
    assert not failed, f"{program}\n{report}"
    return report


@given(programs())
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="FUSE_LOOP_PROGRAMS" not in os.environ,
    suppress_health_check=list(HealthCheck),
    database=None,
)
def test_a_random_loop_runs_fused_as_eager_does(program: Drawn) -> None:
    with torch.no_grad():
        try:
            results = program.model()(*(t.clone() for t in program.inputs))
        except (RuntimeError, IndexError):
            assume(False)
    assume(all(r.isfinite().all() and r.abs().max() < LARGEST for r in results if r.is_floating_point()))
    held_to_eager(program)
