"""Random recurrent models: states, what a step reads, what it computes, what is kept of it, steps unlike the others."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.drawing import Draw, Program

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
    "{a} @ ({b}.t() @ {a}).softmax(1)", "{a}.cummax(1)[0]",
    "{a}.kthvalue(1, 1, True)[0] + {a}", "{a}.median(1, keepdim=True)[0] * {b}",
    "{a}.scatter(1, {a}.argmax(1, keepdim=True), 0.25)",
    "torch.linalg.solve(({a} @ {a}.t()).double().tanh() + 5 * torch.eye(B).double(), {b}.double()).to({a}.dtype)",
)  # fmt: skip
LOOKUPS = (  # by what a step computes, of a table or of all steps
    "self.w{k}{k}[{a}.argmax(1)] * 0.5", "torch.nn.functional.embedding({a}.argmax(1), self.w{k}{k}) + {b}",
    "({a}.softmax(1) @ self.w{k}{k}.t()).softmax(1) @ self.w{k}{k}", "{a}.gather(1, {b}.argmax(1, keepdim=True)) * {a}",
    "torch.nn.functional.one_hot({a}.argmax(1), {n}).to({a}.dtype) * {b}",
    "self.b{k}[{a}.argmax(1)].unsqueeze(1) * {b}", "torch.einsum('bi,bi->b', {a}, {b}).unsqueeze(1).tanh() * {a}",
    "torch.einsum('bi,bj->bij', {a}, {b}).mean(2)",
    "(({a} @ {b}.t()) * 0.5 - 9 * (torch.ones(B, B, dtype={a}.dtype).triu(1))).softmax(-1) @ {a}",
    "torch.nn.functional.scaled_dot_product_attention({a}.unsqueeze(1), {b}.unsqueeze(1), {a}.unsqueeze(1)).squeeze(1)",
    "torch.bmm({a}.unsqueeze(1), {b}.unsqueeze(2)).squeeze(2).tanh() * {a}",
    "torch.nn.functional.rms_norm({a}, ({n},))",
    "torch.nn.functional.conv1d({a}.unsqueeze(1), self.b{k}[:1].view(1, 1, 1), padding=0).squeeze(1)",
    "torch.nn.functional.avg_pool1d({a}.unsqueeze(1), 3, 1, 1).squeeze(1)", "{a}.cumprod(1)",
    "{a}.logcumsumexp(1) * 0.1",
)  # fmt: skip
RANKED = (  # by the largest elements, some of them equal; and windows of a value's own
    "{a}.sort(1).values", "{a} * ({a} >= {a}.topk(1, 1).values * 0.5)", "{a}.sort(1, descending=True)[0].t().t()",
    "{a}.gather(1, {a}.round().sort(dim=1, stable=True)[1])", "{a}.scatter_add(1, {a}.argsort(1), {b}) * 0.5",
    "{a}.topk(2, 1).values.sum(1, keepdim=True) * {b}", "{a}.scatter(1, {b}.topk(2, 1)[1], {b}[:, :2])",
    "{a}.gather(1, ({b} * 2).round().topk({n}, 1, False)[1])", "{a} * ({a} >= {a}.topk(2, 1).values[:, 1:])",
    "{a}.scatter(1, {b}.argmax(1, keepdim=True).repeat(1, 2), {a}[:, -2:] * 0.5)",
    "{a}.gather(1, {a}.round().topk({n}, 1, sorted=False).indices.flip(1)) + {b}",
    "torch.nn.functional.pad({a}, (-1, 1)) + {b}", "torch.nn.functional.pad({a}, (2, -2), value=0.5) * {b}",
    "torch.nn.functional.conv1d({a}[None], {b}[:, None, :2].tanh(), padding=1, groups=B)[0, :, 1:]",
    "torch.nn.functional.conv1d({a}[:, None], {b}[:1, None, :2].tanh(), padding=1, dilation=2)[:, 0]",
)  # fmt: skip
WRITES = (  # into a copy of a value, and what a step keeps in containers and inner loops
    "{a}.clone(); {v}[:, 0] = {b}[:, -1]", "{a}.clone(); {v}[:, ::2] *= 0.5", "{a} * 1; {v}.t()[0].add_(0.25)",
    "{a}.clone(); {v}[{v} > 0.3137] = 0.25", "torch.zeros_like({a}); {v}[:, :1] = {b}[:, :1]; {v} += {a}",
    "{a}.clone(); {v}.masked_fill_(~keep[t], 0.5)", "{a} + 0; {v}.chunk(2, 1)[0].mul_(0.5)",
    "{a} * 2; {v}[0] = {b}[-1]", "({a}, {b}); {v} = {v}[0] - {v}[1] * 0.5",
    "{{'a': {a}, 'b': {b}}}; {v} = torch.tanh({v}['a'] * {v}['b'])",
    "{a}\n        for _ in range(3): {v} = {v} * 0.5 + {b}.tanh()",
    "{a}\n        for s in range(2): {v} = torch.tanh({v} + s)",
)  # fmt: skip
GROUPS = (UNARY, BINARY, BINARY, REDUCTIONS, PRODUCTS, PRODUCTS, LIBRARY, LOOKUPS, RANKED, WRITES)
NEXT = (
    "torch.tanh({a})", "torch.sigmoid({a}) * {a}.tanh()", "{a}.tanh() * 0.5 + {h} * 0.5",
    "torch.where(keep[t], {a}.tanh(), {h})", "torch.nn.functional.layer_norm({a}, ({n},))", "{a}.softmax(1)",
    "{a}.clamp(-1, 1)", "{h}", "{a}.tanh().t().contiguous().t()", "({a}.unsqueeze(2) + self.w{k}{k}).max(1)[0].tanh()",
)  # fmt: skip
KEPT = (
    "stack", "stack", "cat", "rows", "columns", "last", "some", "reversed", "pair", "twice", "with first", "scores",
    "sum", "sum of means", "wide", "read so far", "written so far", "places", "parts",
)  # fmt: skip
AFTERWARDS = (  # another loop behind the first one
    "for t in range(T): z = torch.tanh({read} + z @ self.w00)",
    "for t in reversed(range(T)): z = torch.tanh({read} - z @ self.w00 * 0.5)",
    "for t in range(T): z = torch.tanh({read} @ self.w00 + z @ self.w00.t())",
    "for _ in range(5): z = z + 0.1 * torch.tanh(z @ self.w00)",
    "for t in range(T):\n        for _ in range(3): z = torch.tanh({read} + z @ self.w00)",
)


def program(seed: int) -> Program:
    """A loop over 1 to 12 steps, mostly enough to roll, with one to three states; some called with several lengths.

    Some loops are so long that graphs leave out steps. They are in float64, since errors grow from step to step.
    """
    draw = Draw(seed)
    widths = tuple(draw.pick(WIDTHS) for _ in range(3))
    length = draw.number(4, 12) if draw.once_in(2) else draw.pick([1, 2, 3, 5, 8, 11])
    batch = draw.number(1, 7)
    dtype = draw.pick([torch.float32] * 9 + [torch.float64, torch.float64, torch.bfloat16])
    train = draw.once_in(4)
    more = draw.number(28, 34) if draw.once_in(6) else 0
    if more:
        length, dtype = length + more, torch.float64
    sizes = [(length, batch)]
    if draw.once_in(4):
        sizes += [(more + draw.number(2, 12), batch if draw.once_in(2) else draw.number(1, 7)) for _ in range(2)]
        sizes.append(sizes[0])
    text = LoopText(draw, widths).text()
    start = draw.number(0, 5)
    calls = tuple(_inputs(*size, widths[0], dtype, start + number, train) for number, size in enumerate(sizes))
    return Program(seed, text, calls, TOLERANCES[dtype], train, widths, draw.once_in(2))


def _inputs(
    length: int, batch: int, width: int, dtype: torch.dtype, seed: int, train: bool
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (length, batch, width), (batch, width), (length, batch, 1)
    x, start, mask = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x.requires_grad_(train), start.requires_grad_(train), mask


class LoopText:
    """Draws the lines of one program. ``scope`` are names of ``[batch, width]`` values, with the width's number."""

    def __init__(self, draw: Draw, widths: tuple[int, ...]) -> None:
        self.draw = draw
        self.widths = widths
        self.states = {f"h{i}": draw.number(0, 2) for i in range(1, 1 + draw.number(1, 3))}
        self.scope: dict[str, int] = dict(self.states)
        self.lagging = {f"g{h[1:]}": h for h in self.states if draw.once_in(4)}
        self.scope |= {older: self.states[h] for older, h in self.lagging.items()}

    def pick(self, choices: Any) -> Any:
        return self.draw.pick(choices)

    def text(self) -> str:
        made, read = self.pick(READS)
        lines = ["T, B = x.shape[:2]", "keep = mask > 0"]
        lines += [f"{h} = {self.filled(self.pick(STARTS), k)}" for h, k in self.states.items()]
        lines += [f"x = {made}"] if made != "x" else []
        body = [f"v0 = {read}"]
        self.scope["v0"] = 0
        if self.draw.once_in(4):  # the step before's input, or a sum over outer values
            body.append("v0 = v0 + self.b0" if self.draw.once_in(2) else f"v0 = v0 + {read} * 0.5")
        for number in range(1, 1 + self.draw.number(1, 6)):
            body.append(self.line(f"v{number}"))
        body += self.next_states()
        before, kept, after, results = self.kept()
        body += kept
        for older, h in self.lagging.items():
            lines.append(f"{older} = {h}" if self.draw.once_in(2) else f"{older} = {h} * 0.5")
            body = [f"{older}_next = {h}", *body, f"{older} = {older}_next"]
        if self.draw.once_in(5):  # a state of integers
            lines.append("n = torch.zeros(B, dtype=torch.long)")
            body += [
                f"h1 = h1 * (n % 2).unsqueeze(1) + {self.pick(self.states)}.sum() * 0",
                "n = (n + h1.argmax(1)) % 5",
            ]
            results.append("n")
        if self.draw.once_in(6):
            body.insert(self.draw.number(1, len(body)), self.irregular())
        shown = [*results, *self.pick([(), *(((h,)) for h in self.states), tuple(self.states)])]
        shown = list(dict.fromkeys(shown)) or ["h1"]
        if self.draw.once_in(4):
            lines.insert(2, f"z = {self.filled(self.pick(STARTS), 0)}")
            after = [self.pick(AFTERWARDS).format(read=read), *after]
            shown = ["z", *shown]
        loop = ["for t in range(T):", *(f"    {line}" for line in body)]
        lines += [*before, *loop, *after, f"return [{', '.join(f'({r})' for r in shown)}]"]
        return "\n    ".join(["def forward(x, h0, mask):", *lines])

    def filled(self, template: str, k: int, h: str = "", name: str = "") -> str:
        """``template`` for a result of width number ``k``, named v: a, b of that width, s of any (number m)."""
        same = [name for name, width in self.scope.items() if width == k]
        source = self.pick(self.scope) if "{s}" in template else ""
        a, b = (self.pick(same), self.pick(same)) if "{a}" in template or "{b}" in template else ("", "")
        return template.format(a=a, b=b, h=h, v=name, s=source, m=self.scope.get(source, 0), k=k, n=self.widths[k])

    def line(self, name: str) -> str:
        template = self.pick(self.pick(GROUPS))
        k = self.draw.number(0, 2) if "{s}" in template else self.pick(self.scope.values())
        expression = self.filled(template, k, name=name)
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
        if self.draw.once_in(2):
            return [f"{', '.join(expressions)} = {', '.join(expressions.values())}"]
        return [f"{h} = {e}" for h, e in expressions.items()]

    def kept(self) -> tuple[list[str], list[str], list[str], list[str]]:
        """What is kept of the steps: lines before the loop, inside, after it, and results."""
        before, inside, after, results = [], [], [], []
        for number in range(self.draw.number(0, 2)):
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
                case "places":
                    before.append(f"{y} = torch.ones(2 * T + 3, B, {width}, dtype=x[0].dtype)")
                    place = self.pick(["t + 1", "-1 - t", "T - t", "2 * t", "t - T", "t - 3", "t // 2", "t % 3"])
                    inside.append(f"{y}[{place}] = {value}")
                    inside += self.pick([[], [], [f"{y}[t] = {value} * 2"], [f"{y}[t + 2] += 1"], [f"{y}[t, 0] = 0.5"]])
                    results += self.pick([[y], [y, f"{y}[3]"], [f"{y}.transpose(0, 1)"]])
                case "parts":
                    before, inside = [*before, f"{y} = []"], [*inside, f"{y}.append({value})"]
                    part = self.pick(["[::2]", "[1:]", "[:-1]", "[-2:]", "[T // 2 :]", "[:3]"])
                    results.append(f"torch.stack({y}{part} + {y}[:1])")
                case "last":
                    results.append(f"{value} * 2" if self.draw.once_in(2) else f"{value}.sum()")
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
                case "read so far":
                    h = self.pick([name for name, other in self.scope.items() if other == k])
                    before, inside = [*before, f"{y} = []"], [*inside, f"{y}.append({value} * 0.5)"]
                    how = self.pick(["mean(0)", "amax(0)", "sum(0).tanh()"])
                    inside.append(f"{h} = {h} * 0.5 + torch.stack({y}).{how}")
                    results.append(f"{h} + 1")
                case "written so far":
                    h = self.pick([name for name, other in self.states.items() if other == k] or [value])
                    before.append(f"{y} = torch.zeros(T, B, {width}, dtype=x[0].dtype)")
                    inside.append(f"{y}[t] = {value}")
                    read = self.pick([f"{y}.mean(0)", f"{y}[: t + 1].mean(0)", f"{y}[t // 2]", f"{y}[max(t - 2, 0)]"])
                    inside.append(f"{h} = torch.tanh({h} + {read})")
                    results.append(y)
                case "with first":
                    before = [*before, f"{y} = [{value}]"] if value in self.states else [*before, f"{y} = []"]
                    inside = [*inside, f"{y}.append({value})"]
                    results.append(f"torch.stack({y})")
        return before, inside, after, results

    def irregular(self) -> str:
        when = self.pick(["t == 0", "t == T - 1", "t == T // 2", "t % 2", "t > 1", "t % 5 == 4"])
        name = self.pick(self.states)
        return f"if {when}: {name} = " + self.pick(
            [f"{name} * 0.5", f"{name}.cos()", f"{name} + t", f"{name} * keep[t]", f"{name}.detach()", f"{name} * -0.0"]
        )
