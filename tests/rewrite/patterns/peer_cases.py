# ruff: noqa: E501 (the page has a paragraph a line)
"""The cases of PyTorch's own tests of its two matchers, written again for the patterns of fuse.

    test/fx/test_subgraph_rewriter.py           replace_pattern(graph, pattern, replacement)
    test/inductor/test_pattern_matcher.py       register_replacement, and the fusions that Inductor has built in

Each says how often PyTorch's matcher fires there, and what is to come of it here: how often the pattern matches, and
whether its replacement is used, or, where generic passes do the work, how many launches are left. The table of them is
``docs/matcher-cases.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.graph.function import Function
from fuse.rewrite.patterns.definition import Pattern, define
from fuse.rewrite.patterns.pairs import define_pair

aten = torch.ops.aten

PAGE = Path(__file__).parents[3] / "docs" / "matcher-cases.md"

FX, INDUCTOR = "test/fx/test_subgraph_rewriter.py", "test/inductor/test_pattern_matcher.py"
USED, DECLINED, REFUSED, NONE, PASSES, NOT_ASKED = "used", "declined", "refused", "no match", "passes", "not asked"


@dataclass(frozen=True)
class Case:
    """One case: ``name`` of the test there, ``there`` what it holds PyTorch's matcher to, ``here`` what becomes of it.

    ``matches`` counts matches of ``pattern`` in ``model``; ``launches`` are those of a model for which no pattern is
    needed, before and after. ``why`` says why it differs, where it does.
    """

    file: str
    name: str
    there: str
    here: str
    why: str = ""
    pattern: Callable[[], Pattern] | None = None
    model: Any = None
    arguments: tuple[Tensor, ...] = ()
    matches: int = 0
    launches: tuple[int, int] | None = None

    @property
    def row(self) -> str:
        """Its line in the table."""
        count = f"{self.matches} {'match' if self.matches == 1 else 'matches'}"
        launches = f"no pattern: {self.launches[0]} -> {self.launches[1]} launches" if self.launches else ""
        declined = f"{count}; the replacement is declined"
        used = {
            USED: count,
            DECLINED: declined,
            REFUSED: f"{count}; the replacement is refused",
            NONE: "0 matches",
            PASSES: launches,
        }
        return f"| `{self.name}` | {self.there} | {used.get(self.here, '-')} | {self.why} |"


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES: list[Case] = []

OTHER_MEANING = "the replacement computes something else, and fuse tests it before use"
RUN_ONCE = "equal computations become one value before patterns are matched"
NO_PATTERN = "generic passes do this without a pattern"
QUANTISED = (
    "written without `dequantize`: quantised tensors are not captured, and a pattern with `dequantize` is refused"
)
OF_THE_LIBRARY = "tests the library's internals, not what is matched"


def pair(
    file: str,
    name: str,
    there: str,
    search: Callable[..., Any],
    replace: Callable[..., Any],
    model: Any,
    *arguments: Tensor,
    matches: int = 1,
    here: str = USED,
    why: str = "",
    **options: Any,
) -> None:
    """A case of a pair of functions."""

    def pattern() -> Pattern:
        return define_pair(search, replace, name="pattern", **options)

    CASES.append(Case(file, name, there, here, why, pattern, model, arguments, matches))


def single(file: str, name: str, there: str, pattern: Any, model: Any, *arguments: Tensor, **told: Any) -> None:
    """A case of a pattern without a replacement."""
    matches = told.pop("matches", 1)
    here = told.pop("here", USED if matches else NONE)
    CASES.append(Case(file, name, there, here, told["why"], lambda: define(pattern), model, arguments, matches))


def passes(name: str, there: str, launches: tuple[int, int], model: Any, *arguments: Tensor, why: str = "") -> None:
    """A case that needs no pattern here."""
    CASES.append(Case(INDUCTOR, name, there, PASSES, why or NO_PATTERN, None, model, arguments, 0, launches))


def left_out(file: str, name: str, there: str, why: str) -> None:
    CASES.append(Case(file, name, there, NOT_ASKED, why))


# ---- torch.fx ------------------------------------------------------------------------------------------------------


def neg_and_relu(x: Tensor) -> Tensor:
    return torch.neg(x) + torch.relu(x)


def doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def model(*given: Tensor) -> Tensor:
        value = function(*given)
        return torch.add(value, value)

    return model


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.neg(x) + torch.relu(x)


class Sigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class Two(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def added(number: int) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        return torch.tanh(x) + torch.tensor([number])

    return model


def several(function: Callable[..., Tensor], times: int) -> Callable[..., Tensor]:
    def model(x: Tensor) -> Tensor:
        for _ in range(times):
            x = function(x)
        return x

    return model


def half_of_sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x).to(torch.float16)


def written(x: Tensor) -> Tensor:
    x += 3
    return half_of_sigmoid(x)


def catted(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    return torch.addmm(b1, torch.cat([w1, w2]), torch.cat([x, b2]).t())


def catted_twice(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> tuple[Tensor, ...]:
    _unread = torch.addmm(b1, torch.cat([w1, w2]), torch.cat([x, b2]).t())
    return torch.sum(w1, 1), torch.addmm(b1, torch.cat([w1, w2]), torch.cat([x, b2]).t()).sum()


def product_and_scaled(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    product = F.linear(a, b, bias=bias)
    return product, a * product


def product_and_gate(a: Tensor, b: Tensor, bias: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    product = F.linear(a, b, bias=bias)
    return product, c * product


def gated_layers(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    first = F.linear(F.linear(y, w, b), w + 1, bias=b)
    third = F.linear(y * first + y, w + 2, bias=b)
    middle = third * torch.sigmoid(third)
    last = F.linear(F.linear(x, w + 3, b), w + 4, bias=b)
    return torch.cat([middle, x * last + x], 1)


def sig_relu_sub(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a = x - y
    return torch.sigmoid(a), torch.relu(a), a


def scaled_in_steps(x: Tensor, y: Tensor) -> Tensor:
    x = torch.relu(torch.add(x, 2)) * 3
    return torch.relu(torch.add(x, y)) * 3


pair(FX, "preserves_logic", "1", neg_and_relu, neg_and_relu, doubled(neg_and_relu), r(1, 3))
pair(
    FX,
    "with_oneliner_pattern",
    "1",
    torch_neg := lambda x: torch.neg(x),
    lambda x: torch.relu(x),
    doubled(torch_neg),
    r(1, 3),
    here=REFUSED,
    why=OTHER_MEANING,
)
pair(
    FX,
    "single_pattern_match",
    "1",
    neg_and_relu,
    lambda x: torch.relu(x),
    doubled(neg_and_relu),
    r(1, 3),
    here=REFUSED,
    why=OTHER_MEANING,
)
pair(
    FX,
    "multiple_pattern_match",
    "2",
    lambda w1, w2: torch.cat([w1, w2]).sum(),
    lambda w1, w2: w1.sum() + w2.sum(),
    lambda x, w1, w2: x + torch.max(torch.cat([w1, w2]).sum()) + torch.max(torch.cat([w1, w2]).sum()),
    r(1, 3),
    r(2, 3),
    r(2, 3),
    why=RUN_ONCE,
)
pair(
    FX,
    "graph_argument_order",
    "1",
    lambda x, y: torch.mm(x, y),
    lambda x, y: torch.mm(x, y),
    lambda x, y: torch.mm(x, y),
    r(3, 4),
    r(4, 5),
)
pair(
    FX,
    "correct_output_replacement",
    "1",
    lambda x: torch.relu(x),
    lambda x: x.clamp(min=0),
    lambda x, y: doubled(lambda one: torch.neg(y) + torch.relu(one))(x),
    r(4, 4),
    r(4, 4),
)
pair(
    FX,
    "traced_as_callable",
    "1",
    Sum(),
    Sigmoid(),
    doubled(neg_and_relu),
    r(3, 4),
    here=REFUSED,
    why=OTHER_MEANING,
)
pair(
    FX,
    "pattern_is_entire_graph",
    "1",
    lambda x: doubled(torch_neg)(x),
    lambda x: x * -2.0,
    lambda x: doubled(torch_neg)(x),
    r(3, 4),
)
pair(
    FX,
    "pattern_output_pattern_node_can_have_users_that_are_not_matched",
    "1",
    lambda x: torch.relu(x),
    lambda x: x.clamp(min=0),
    lambda x: torch.neg(torch.relu(x)) - torch.relu(x),
    r(3, 4),
)
pair(
    FX,
    "internal_pattern_nodes_cannot_have_users_that_are_not_matched",
    "0",
    catted,
    lambda x, w1, w2, b1, b2: torch.addmm(b1, torch.cat([w1, w2]), torch.cat([x, b2]).mT),
    catted_twice,
    r(2, 3),
    r(2, 3),
    r(2, 3),
    r(4),
    r(2, 3),
    why=f"{RUN_ONCE}; the other reader in that test is dead code, which fuse removes",
)
pair(
    FX,
    "placeholder_matching",
    "1",
    half_of_sigmoid,
    lambda x: torch.sigmoid(x).half(),
    written,
    r(3, 4),
    why=QUANTISED,
)
pair(
    FX,
    "replaces_referenced_submodules",
    "1",
    Two(nn.Sigmoid()),
    Two(nn.Tanh()),
    lambda x: torch.relu(torch.sigmoid(x + 1)),
    r(3, 4),
    here=REFUSED,
    why=OTHER_MEANING + "; fuse compares a module by its operators, not by its name",
)
left_out(FX, "annotations_int", "types of placeholders", OF_THE_LIBRARY)
pair(
    FX,
    "replace_consecutive_submodules",
    "3",
    lambda x: torch.sigmoid(x),
    lambda x: 1 / (1 + torch.exp(-x)),
    several(torch.sigmoid, 3),
    r(3, 4),
    matches=3,
)
pair(
    FX,
    "with_overlapping_matches",
    "2",
    several(torch.sigmoid, 2),
    lambda x: torch.neg(x),
    several(torch.sigmoid, 4),
    r(3, 4),
    matches=2,
    here=REFUSED,
    why=OTHER_MEANING,
)
pair(
    FX,
    "replace_with_multiple_outputs",
    "1",
    lambda a: (torch.sigmoid(a), torch.relu(a)),
    lambda a: (1 / (1 + torch.exp(-a)), a.clamp(min=0)),
    lambda x: torch.sigmoid(x) + torch.relu(x),
    r(3, 4),
)
pair(
    FX,
    "replace_with_duplicated_outputs",
    "1",
    sig_relu_sub,
    lambda x, y: ((a := torch.abs(y)), a, torch.exp(x)),
    lambda x, y: sum(sig_relu_sub(x, y)[:2]),
    r(3, 4),
    r(3, 4),
    here=DECLINED,
    why="every call is declined, because two results would be one tensor, which the caller would notice",
)
pair(
    FX,
    "with_unused_args",
    "1",
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y, z: x + y,
    r(3, 4),
    r(3, 4),
    r(3, 4),
    here=REFUSED,
    why=OTHER_MEANING,
)
pair(
    FX,
    "call_method",
    "1",
    half_of_sigmoid,
    lambda x: x.sigmoid().half(),
    half_of_sigmoid,
    r(3, 4),
    why=QUANTISED,
)
pair(
    FX,
    "nodes_with_kwargs",
    "1",
    product_and_scaled,
    lambda a, b, bias: ((y := torch.addmm(bias, a, b.t())), y * a),
    lambda x, w, b: x * F.linear(x, w, b) + x,
    r(4, 8),
    r(8, 8),
    r(8),
)
pair(
    FX,
    "local_revert",
    "2",
    product_and_gate,
    lambda a, b, bias, c: ((y := torch.addmm(bias, a, b.t())), y * c),
    gated_layers,
    r(4, 8),
    r(4, 8) + 1,
    r(8, 8),
    r(8),
    matches=2,
    why="the third candidate needs its own result as `c`, and is declined as not convex",
)
pair(
    FX,
    "replace_pattern_with_filters",
    "1 of 2",
    lambda x, number: torch.relu(torch.add(x, number)) * 3,
    lambda x, number: (x + number).clamp(min=0) * 3,
    scaled_in_steps,
    r(3, 4),
    r(3, 4),
    why="no filter is needed: a parameter whose example is a number is a number. Quantised tensors are not captured",
    examples=(torch.empty(3, 4), 2),
)
pair(
    FX,
    "matching_pattern_with_list_type_arg",
    "1",
    lambda x, shape: torch.tanh(torch.tile(x, shape)),
    lambda x, shape: torch.tile(x, shape).tanh(),
    lambda x: torch.tanh(torch.tile(x, (2, 3))),
    r(3, 4),
    why="a list among the examples is a constant of the pattern; `_reshape_alias_copy` alone would be a copy",
    examples=(torch.empty(3, 4), (4, 5)),
)
pair(
    FX,
    "replacement_with_attrs",
    "1",
    added(1),
    added(3),
    lambda x: torch.tanh(x) + torch.tensor([1]) - torch.tensor([2]),
    r(3, 4),
    here=DECLINED,
    why="a pattern may create a tensor, which is compared by value; a replacement gets it as a parameter",
)


# ---- Inductor: what a user registers -------------------------------------------------------------------------------


class Powers:
    """Pattern and replacement as methods of an object with a number of its own."""

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def pattern(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x.pow(self.exponent) + y.pow(self.exponent) + z.pow(self.exponent)

    def replacement(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return z.pow(self.exponent) + (y.pow(self.exponent) + x.pow(self.exponent))


def powers(x: Tensor) -> Tensor:
    y = x.relu()
    z = y.tanh()
    for exponent in (2, 3, 4):
        z = x.pow(exponent) + y.pow(exponent) + z.pow(exponent)
    return z + 5


def sine_sum(x: Tensor) -> Tensor:
    return torch.add(x, torch.sin(x))


def sine_sum_written(x: Tensor, y: Tensor) -> Tensor:
    a = torch.sin(x)
    x.copy_(y)
    return torch.add(x, a)


def sine_sum_out(x: Tensor, y: Tensor) -> Tensor:
    a = torch.sin(x)
    torch.add(y, 1, out=x)
    return torch.add(x, a)


def sine_sum_without_gradient(x: Tensor) -> Tensor:
    a = torch.sin(x)
    with torch.no_grad():
        return torch.add(x, a)


def add_one(x: Tensor) -> Tensor:
    return x + 1


SQUARES = r(16, 16), r(16, 16), r(16, 16)
scalars = {"examples": (torch.empty(8), torch.empty(8, 8), torch.empty(8, 8), 2.0, 3.0)}

pair(
    INDUCTOR,
    "duplicate_search",
    "1 each",
    add_one,
    lambda x: 1 + x,
    lambda x: (x + 1).relu() + 2,
    r(3, 5),
    why="a literal matches itself only; `x + 2` is another pattern",
)
pair(
    INDUCTOR,
    "bound_method_pattern_matcher",
    "1",
    Powers(4).pattern,
    Powers(4).replacement,
    powers,
    r(5, 4),
)
single(
    INDUCTOR,
    "match_with_mutation (nothing between)",
    "1",
    sine_sum,
    sine_sum,
    r(5, 5),
    why="",
)
single(
    INDUCTOR,
    "match_with_mutation (`x.copy_(y)` between)",
    "0",
    sine_sum,
    sine_sum_written,
    r(5, 5),
    r(5, 5) + 1,
    matches=0,
    why="",
)
single(
    INDUCTOR,
    "match_with_mutation (`out=x` between)",
    "0",
    sine_sum,
    sine_sum_out,
    r(5, 5),
    r(5, 5) + 1,
    matches=0,
    why="",
)
single(
    INDUCTOR,
    "match_with_mutation (`no_grad` between)",
    "0",
    sine_sum,
    sine_sum_without_gradient,
    r(5, 5),
    why="values are the same; in training such a call is differentiated as eager does it",
)
left_out(
    INDUCTOR,
    "match_with_mutation (`autocast`, `manual_seed` between)",
    "0",
    "neither writes to a tensor; casts are operators of the graph, and a call that seeds runs eager",
)
single(
    INDUCTOR,
    "input_output_same",
    "no crash",
    lambda x, y: (torch.add(x, y), x),
    lambda x, y: torch.sub(torch.add(x, y), x),
    r(3, 3),
    r(3, 3) + 1,
    why="",
)
for number, (given, said) in enumerate(
    (
        (lambda a, b, c: aten.addmm(a, b, c), "as it is"),
        (lambda a, b, c: aten.addmm(a, b, c, beta=1.0), "beta=1.0"),
        (lambda a, b, c: aten.addmm(a, b, c, beta=1.0, alpha=1.0), "both 1.0"),
    ),
    1,
):
    single(
        INDUCTOR,
        f"match_equivalent_function_invocations{number} ({said})",
        "1",
        lambda a, b, c: torch.addmm(a, b, c),
        given,
        r(20),
        r(10, 15),
        r(15, 20),
        why="",
    )
pair(
    INDUCTOR,
    "addmm_alpha_beta_with_pointwise",
    "right",
    lambda x, a, b, alpha, beta: torch.relu(torch.addmm(x, a, b, alpha=alpha, beta=beta)),
    lambda x, a, b, alpha, beta: torch.relu(torch.mm(a, b) * alpha + x * beta),
    lambda x, a, b: torch.relu(torch.addmm(x, a, b, alpha=0.8, beta=0.2)),
    r(2),
    r(2, 3),
    r(3, 2),
    why="",
    **scalars,
)
single(
    INDUCTOR,
    "addmm",
    "2",
    lambda a, b, c: torch.addmm(a, b, c),
    lambda a, b, c: (torch.add(a, torch.mm(b, c)), torch.mm(b, c) + a),
    *SQUARES,
    matches=0,
    why=f"{RUN_ONCE}: both sums read one product, which stays",
)
single(
    INDUCTOR,
    "addmm (bias of a row that is repeated)",
    "0",
    lambda a, b, c: torch.addmm(a, b, c),
    lambda a, b, c: torch.add(a, torch.mm(b, c)),
    r(1, 16),
    *SQUARES[1:],
    why="`torch.addmm` takes such a bias, and gives the same",
)
pair(
    INDUCTOR,
    "addmm (bias with one dimension more)",
    "0",
    lambda a, b, c: torch.addmm(a, b, c),
    lambda bias, x, w: torch.addmm(bias, x, w),
    lambda a, b, c: torch.add(a, torch.mm(b, c)),
    r(1, 16, 16),
    *SQUARES[1:],
    here=DECLINED,
    why="PyTorch's fake tensors accept such a bias, but real tensors raise; the call is declined",
)
single(
    INDUCTOR,
    "addmm (a number as bias)",
    "0",
    lambda a, b, c: torch.addmm(a, b, c),
    lambda b, c: torch.add(torch.mm(b, c), 4),
    *SQUARES[1:],
    matches=0,
    why="",
)
single(
    INDUCTOR,
    "addmm_dtype_mismatch",
    "0",
    lambda a, b, c: torch.addmm(a, b, c),
    lambda a, b, c: torch.mm(b, c) + a,
    r(16, 16),
    r(16, 16).half(),
    r(16, 16).half(),
    matches=0,
    why="",
)
pair(
    INDUCTOR,
    "symint_pattern_matching",
    "1",
    lambda x, y: x + y,
    lambda x, y: (x - (-y.size(0))) - (y * -1) - y.size(0),
    lambda x, y: x + y,
    r(8, 1),
    r(10),
    why="adding and subtracting a size rounds, within the tolerance",
)
pair(
    INDUCTOR,
    "empty_like_pattern_matching",
    "1",
    lambda x: x + torch.zeros(x.shape) * 2,
    lambda x: x * 1,
    lambda x: x + torch.zeros_like(x) * 2,
    r(4, 4),
    matches=0,
    here=NONE,
    why="with `empty` it would read uninitialised memory; zeros are folded into the graph's constants",
)
pair(
    INDUCTOR,
    "failed_match_constant_args_format_string",
    "0, with the reason",
    add_one,
    lambda x: 1 + x,
    lambda x: x + 2,
    r(4, 4),
    matches=0,
    here=NONE,
    why="`fuse explain` says: `add` has 2 where the pattern has 1",
)
pair(
    INDUCTOR,
    "pattern_match_debug_output",
    "1, with a message",
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x + y,
    r(4, 4),
    r(4, 4) + 1,
    here=REFUSED,
    why=OTHER_MEANING,
)
single(
    INDUCTOR,
    "batched_pattern_matcher_pass",
    "1",
    add_one,
    lambda x: (x + 1) * 2,
    r(10),
    why="",
)
single(
    INDUCTOR,
    "batched_pattern_matcher_pass_multiple_matches",
    "3",
    add_one,
    several(add_one, 3),
    r(10),
    matches=3,
    why="",
)
left_out(INDUCTOR, "batched_pattern_matcher_pass_empty_passes", "0", OF_THE_LIBRARY)
left_out(
    INDUCTOR,
    "multioutput_register_replacement",
    "1",
    "an operator that writes to its arguments and has no functional form is not captured; the call runs eager",
)


# ---- Inductor: what it has built in --------------------------------------------------------------------------------


def scaled_softmax(x: Tensor, scale: Any) -> Tensor:
    return F.softmax(x * scale, dim=0)


def pieces_and_whole(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    whole = torch.cat([a, b, c], 1)
    return [piece**2 for piece in whole.split([2, 3, 5], 1)] + [whole**3]


def gumbel(logits: Tensor) -> Tensor:
    probabilities = torch.softmax(logits / 0.8, -1)
    return torch.argmax(probabilities / torch.empty_like(logits).exponential_(1), -1, keepdim=True)


for argument in (r(10, 10), r(10), r(1, 10)):
    passes(
        f"scaled_softmax (scale {list(argument.shape)})",
        "1" if argument.shape != (10, 10) else "0",
        (2, 1),
        scaled_softmax,
        r(10, 10),
        argument,
        why="softmax and factor are one kernel, whether or not the factor changes within a row",
    )
passes("scaled_softmax (a number)", "1", (2, 1), lambda x: scaled_softmax(x, 1e6), r(10, 10))
passes("pointless_view_pair", "removed", (0, 0), lambda x: x.view(3, 5, 7).view(15, 7), r(15, 7))
passes("pointless_permute_pair, _3d", "removed", (0, 0), lambda x: x.permute(1, 0).permute(1, 0), r(15, 7))
passes(
    "pointless_convert",
    "1 of 2 left",
    (2, 1),
    lambda x: x.to(torch.float16).float(),
    r(8, 8),
    why="one kernel; the rounding to float16 stays, for eager rounds",
)
passes(
    "pointless_cumsum",
    "replaced by `arange`",
    (2, 2),
    lambda x: (x, torch.cumsum(torch.full((5, 4), 2), 0)),
    r(2),
    why="operators that read neither inputs nor constants are left unchanged",
)
passes("remove_pointless_clones", "removed", (2, 1), lambda a, b: torch.mm(a, b).clone(), r(8, 8), r(8, 8))
passes(
    "remove_noop_pass_with_remove_passes",
    "removed",
    (1, 1),
    lambda x: x.view(x.shape) + 1,
    r(8, 16),
)
passes(
    "splitwithsizes_cat",
    "1",
    (2, 1),
    lambda a: torch.cat(a.split([8, 24], 1), 1) ** 2,
    r(2, 32),
)
passes(
    "splitwithsizes_cat (another order)",
    "0",
    (2, 1),
    lambda a: torch.cat([(s := a.split([3, 2, 3], 1))[1], s[0], s[2]], 1) ** 2,
    r(2, 8),
)
passes(
    "cat_splitwithsizes",
    "1",
    (4, 1),
    lambda a, b, c: [s**2 for s in torch.cat([a, b, c], 1).split([2, 3, 5], 1)],
    r(2, 2),
    r(2, 3),
    r(2, 5),
)
passes(
    "cat_splitwithsizes (read once more)",
    "0",
    (5, 1),
    pieces_and_whole,
    r(2, 2),
    r(2, 3),
    r(2, 5),
)
passes(
    "cat_slice_cat",
    "1",
    (2, 1),
    lambda a, b: torch.cat([(whole := torch.cat([a, b], 1)), whole[:, :19]], 1),
    r(2, 32),
    r(2, 16),
)
passes(
    "replace_mul_zero", "folded", (2, 1), lambda x, y: x + y * 0, r(256), r(256) + 1, why="not folded: NaN * 0 is NaN"
)
passes(
    "unfuse_bias_addmm",
    "product alone",
    (2, 1),
    lambda b, x, w: F.gelu(torch.addmm(b, x, w)),
    r(20),
    r(10, 15),
    r(15, 20),
)
passes(
    "original_aten_preserved_split_addmm",
    "1",
    (2, 1),
    lambda b, x, w: torch.addmm(b, x, w).sin(),
    r(16, 32),
    r(16, 24),
    r(24, 32),
)
passes(
    "mm_plus_mm", "1", (3, 2), lambda a, b, c, d: torch.add(torch.mm(a, b), torch.mm(c, d)), *SQUARES, SQUARES[0] + 1
)
passes(
    "mixed_mm, _epi_works, _bad_cases, _cpu",
    "1",
    (2, 2),
    lambda a, b: torch.mm(a, b.to(a.dtype)),
    r(8, 8),
    (r(8, 8) * 9).to(torch.int8),
)
passes("cat_mm", "products into one buffer", (4, 4), lambda a, b, c: torch.cat([a @ b, b @ c, a @ c], 1), *SQUARES)
passes(
    "cat_addmm",
    "products into one buffer",
    (4, 4),
    lambda a, b, c: torch.cat([torch.addmm(a, b, c), torch.addmm(b, c, a), torch.addmm(c, a, b)], 1),
    *SQUARES,
)
passes("bmm_to_mm", "`mm`", (1, 1), lambda a, b: torch.bmm(a, b), r(1, 16, 8), r(1, 8, 32))
passes("addmm_broadcasting_bias", "right", (1, 1), lambda x, w, b: F.linear(x, w, b), r(3, 4), r(4, 4), r(4))
passes(
    "successful_partial_reuse, unsuccessful_partial_reuse",
    "1, 0",
    (2, 2),
    lambda x: (torch.amax(x, [0], True), torch.amax(x)),
    r(64, 64),
    why="fuse does not compute one reduction from another",
)
passes("gumbel_max_trick", "1", (5, 2), gumbel, r(4, 10), why="eager draws the random numbers")
left_out(INDUCTOR, "fused_int_mm_mul, _epilogue, _gating", "GPU only", "products of integers stay library calls")
left_out(
    INDUCTOR, "addmm_symbolic_scalar, pointless_view_pair_dynamic_shapes", "right", "sizes are captured; see limits.md"
)
left_out(INDUCTOR, "mixed_mm_exhaustive_dtypes, mixed_mm_gating", "GPU only", "templates for GPUs")
left_out(
    INDUCTOR,
    "serialized_patterns_up_to_date",
    "patterns as files",
    "patterns are traced, and kept under a hash of their code",
)
left_out(INDUCTOR, "stable_topological_sort, mutation_op_matching", "helpers", OF_THE_LIBRARY)
left_out(INDUCTOR, "fwd_only_generate_original_aten_meta", "metadata", OF_THE_LIBRARY)


def show(case: Case) -> fuse.Report:
    """What fuse makes of a case that needs no pattern."""
    return fuse.show(Function(case.model), case.arguments)


HEAD = "| case | PyTorch | fuse | why it differs |\n|---|---|---|---|\n"


def table(file: str) -> str:
    return HEAD + "\n".join(one.row for one in CASES if one.file == file)


def page() -> str:
    """``docs/matcher-cases.md``; ``python -m tests.rewrite.patterns.peer_cases`` writes it."""
    return f"""# The cases of PyTorch's own matchers

PyTorch has two pattern matchers, and tests of both. This page lists every case of these tests, written again for `fuse.pattern`: how often PyTorch's matcher fires, what fuse does, and why fuse differs. [tests/rewrite/patterns/test_peers.py](../tests/rewrite/patterns/test_peers.py) runs each case, and compares every match with the values of the graph.

Three differences occur often:

- PyTorch's tests replace a match by a different computation, to see that it was replaced. fuse tests a replacement before it uses it, and **refuses** one that computes something else.
- Equal computations in a model become **one value** before patterns are matched.
- A fusion that Inductor has as a pattern often **needs no pattern** in fuse: generic passes do it.

## `torch.fx.subgraph_rewriter`

The tests are `{FX}` in [pytorch/pytorch](https://github.com/pytorch/pytorch), each named `test_subgraph_rewriter_...` or `test_...`.

{table(FX)}

## Inductor's pattern matcher

The tests are `{INDUCTOR}`. A case with several inputs has a line for each input whose result differs.

{table(INDUCTOR)}

Launches are those that `fuse show` predicts for the case's inputs.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
