"""One operator of a graph is made wrong, or one cast loses digits: the operator that is named is that one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional
from torch.utils import _pytree as pytree

from fuse.check.inputs import CheckCall
from fuse.check.precision.chains import measure
from fuse.check.precision.exact import wide
from fuse.check.precision.run import as_kernels, chains, inputs_of
from fuse.graph.capture import capture
from fuse.graph.precision import Precision, in_precision
from fuse.rewrite.pipeline import run_passes

aten = torch.ops.aten


class Block(nn.Module):
    """A feed-forward part with a norm and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.wide, self.narrow = nn.Linear(24, 64), nn.Linear(64, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.narrow(functional.gelu(self.wide(self.norm(x))))
        return torch.sigmoid(x) * torch.tanh(x) - x.mean(-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 4.0
        return torch.softmax(scores.masked_fill(mask, -1e4), dim=-1) @ self.value(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 8)
        for row in x:
            h, c = self.step(row, (h, c))
        return h + c


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.max_pool2d(torch.relu(self.filter(x)), 2).flatten(1).logsumexp(1)


class Scan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x.cumsum(0)
        return (total.exp() / (1 + total.exp())).sum(0).sqrt()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "block": (Block, lambda: (torch.randn(12, 24),)),
    "attention": (Attention, lambda: (torch.randn(2, 12, 16), torch.ones(12, 12).triu(1).bool())),
    "recurrent": (Recurrent, lambda: (torch.randn(6, 4, 8),)),
    "image": (Image, lambda: (torch.randn(2, 3, 10, 10),)),
    "scan": (Scan, lambda: (torch.randn(64, 24) / 8,)),
}

Fault = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def scaled(factor: float) -> Fault:
    return lambda run, args, kwargs: run(*args, **kwargs) * factor


def instead(other: Callable[..., Any]) -> Fault:
    return lambda run, args, kwargs: other(*args)


def through(dtype: torch.dtype) -> Fault:
    """The result is rounded to ``dtype`` on its way."""

    def fault(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(*args, **kwargs)
        return result.to(dtype).to(result.dtype)

    return fault


def summed_narrow(x: Tensor, dims: list[int]) -> Tensor:
    """A sum that is rounded after each number."""
    total = torch.zeros_like(x[0])
    for row in x:
        total = total + row
    return total


def biased(x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """A layer norm with the unbiased variance."""
    mean, deviation = x.float().mean(-1, keepdim=True), x.float().std(-1, keepdim=True)
    return ((x.float() - mean) / deviation * weight + bias).to(x.dtype), mean, 1 / deviation


def overflowing(a: Tensor, b: Tensor) -> Tensor:
    """A product whose sums are scaled beyond what float16 holds, and back."""
    return (torch.bmm(a.double(), b.double()) * 2.0**18).to(a.dtype) * 2.0**-18


def one_wrong(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A kernel that leaves out the last element."""
    result = run(*args, **kwargs).clone(memory_format=torch.contiguous_format)
    result.view(-1)[-1] = 0
    return result


def shifted(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A kernel that reads one place too far."""
    return run(*args, **kwargs).roll(1, -1)


@dataclass(frozen=True)
class Planted:
    model: str
    dtype: str
    op: Any
    fault: Fault
    which: int = 0


WRONG_OPERATORS = {
    "sub_for_add": Planted("block", "bf16", aten.add.Tensor, instead(torch.sub)),
    "relu_for_gelu": Planted("block", "bf16", aten.gelu.default, instead(torch.relu)),
    "tanh_for_sigmoid": Planted("block", "f16", aten.sigmoid.default, instead(torch.tanh)),
    "norm_with_unbiased_variance": Planted("block", "bf16", aten.native_layer_norm.default, instead(biased)),
    "product_two_percent_too_large": Planted("block", "bf16", aten.addmm.default, scaled(1.02), 1),
    "gelu_one_percent_too_small": Planted("block", "bf16", aten.gelu.default, scaled(0.99)),
    "sum_rounded_after_each_number": Planted("scan", "bf16", aten.sum.dim_IntList, instead(summed_narrow)),
    "tanh_rounded_to_bf16_in_f16": Planted("block", "f16", aten.tanh.default, through(torch.bfloat16)),
    "product_rounded_to_eight_bits": Planted("block", "bf16", aten.mul.Tensor, through(torch.float8_e4m3fn)),
    "scores_not_scaled": Planted("attention", "bf16", aten.div.Tensor, instead(lambda x, by: x)),
    "softmax_over_the_wrong_dimension": Planted(
        "attention", "bf16", aten._softmax.default, instead(lambda x, dim, flag: x.softmax(-2))
    ),
    "scores_overflow_in_f16": Planted("attention", "f16", aten.bmm.default, instead(overflowing)),
    "probabilities_rounded_to_bf16_in_f16": Planted("attention", "f16", aten._softmax.default, through(torch.bfloat16)),
    "last_element_missing": Planted("attention", "bf16", aten.bmm.default, one_wrong, 1),
    "values_read_one_place_too_far": Planted("attention", "f16", aten.addmm.default, shifted, 2),
    "third_step_forgets": Planted("recurrent", "bf16", aten.sigmoid.default, scaled(0.97), 7),
    "last_step_adds_wrong": Planted("recurrent", "f16", aten.add.Tensor, instead(torch.maximum), 5),
    "filter_rounded_to_bf16_in_f16": Planted("image", "f16", aten.convolution.default, through(torch.bfloat16)),
    "relu_leaks": Planted("image", "bf16", aten.relu.default, instead(lambda x: functional.leaky_relu(x, 0.05))),
    "exponentials_overflow": Planted(
        "image", "f16", aten.logsumexp.default, instead(lambda x, dims: (x * 16).exp().sum(dims).log() / 16)
    ),
    "sum_without_its_first_row": Planted("scan", "bf16", aten.cumsum.default, instead(lambda x, d: x.cumsum(d) - x)),
    "root_is_an_approximation": Planted("scan", "f16", aten.sqrt.default, scaled(1.002)),
}


def faulty(planted: Planted, target: Node) -> Callable[[Node, tuple[Any, ...], dict[str, Any]], Any]:
    def execute(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert callable(node.target)
        return planted.fault(node.target, args, kwargs) if node is target else node.target(*args, **kwargs)

    return execute


@pytest.mark.parametrize("planted", WRONG_OPERATORS.values(), ids=WRONG_OPERATORS)
def test_the_operator_that_is_wrong_is_named(planted: Planted) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[planted.model]
    call = CheckCall(make(), inputs(), {})
    graph = capture(in_precision(call.model, Precision(planted.dtype)), call.args)
    given = inputs_of(graph, call)
    target = [node for node in graph.graph.nodes if node.target is planted.op][planted.which]
    chain = measure(graph, given, [wide(t) for t in given], execute=faulty(planted, target))
    assert chain.first_beyond is not None
    assert chain.first_beyond.name.partition(".")[0] == target.name
    assert chain.first_beyond.source == target.meta["source"]


class Ids(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        same = ids.to(x.dtype)  # planted
        return x * torch.cos(same / 100) + 1


class ThroughHalf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = (x.float() * 3e4 + 1e5).tanh() * 1e5
        x = x.half()  # planted
        return x.to(torch.bfloat16) / 2


class ThroughBrain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x) + 1
        y = y.bfloat16()  # planted
        return y.half() * 2


class ResidualNarrowed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x.double().exp()
        total = total.type(torch.float32)  # planted
        return total.double().log()


class NormNarrowed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        scale = scale.to(torch.bfloat16)  # planted
        return (wide * scale.float()).to(torch.float32)


LOSSY_CASTS: dict[str, tuple[nn.Module, tuple[Tensor, ...], str]] = {
    "numbers_of_texts_to_bf16": (Ids(), (torch.randn(600), torch.arange(600)), "bf16"),
    "beyond_the_range_of_f16": (ThroughHalf(), (torch.randn(32),), "bf16"),
    "to_bf16_within_f16": (ThroughBrain(), (torch.randn(32),), "f16"),
    "float64_to_float32": (ResidualNarrowed(), (torch.randn(32),), "bf16"),
    "a_scale_kept_in_bf16": (NormNarrowed(), (torch.randn(8, 32),), "autocast"),
}


@pytest.mark.parametrize(("model", "args", "dtype"), LOSSY_CASTS.values(), ids=LOSSY_CASTS)
def test_the_cast_that_loses_digits_is_named(model: nn.Module, args: tuple[Tensor, ...], dtype: str) -> None:
    with open(__file__, encoding="utf-8") as file:
        lines = file.readlines()
    chain, _ = chains(model, args, {}, Precision(dtype), fused=False)
    assert chain.first_beyond is not None
    assert chain.first_beyond.op == "aten._to_copy.default"
    number = int(chain.first_beyond.source.rpartition(":")[2])
    assert "# planted" in lines[number - 1]
    assert type(model).__name__ in "".join(lines[number - 5 : number])


class Waves(nn.Module):
    """Three kernels with a product between each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * 2) + x
        x = self.first(x)
        x = torch.sigmoid(x) * x
        x = self.second(x)
        return torch.exp(-x * x) / 2


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_kernel_that_is_wrong_is_named(which: int) -> None:
    torch.manual_seed(0)
    call = CheckCall(Waves(), (torch.randn(4, 16),), {})
    graph = capture(in_precision(call.model, Precision("bf16")), call.args)
    run_passes(graph)
    given = inputs_of(graph, call)
    kernels = [node for node in graph.graph.nodes if node.op == "call_module"]
    assert len(kernels) == 3
    right = as_kernels(graph)

    def execute(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = right(node, args, kwargs)
        return pytree.tree_map(lambda t: t * 1.05, result) if node is kernels[which] else result

    exact = [wide(t) for t in given]
    assert measure(graph, given, exact, execute=right).first_beyond is None
    found = measure(graph, given, exact, execute=execute).first_beyond
    assert found is not None
    assert found.name.partition(".")[0] == kernels[which].name


@pytest.mark.parametrize("dtype", ["bf16", "f16", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_named_where_nothing_is_wrong(name: str, dtype: str) -> None:
    torch.manual_seed(1)
    make, inputs = MODELS[name]
    chain, _ = chains(make(), inputs(), {}, Precision(dtype), fused=False)
    assert chain.first_beyond is None, chain.first_beyond


def test_thirty_faults_are_planted() -> None:
    assert len(WRONG_OPERATORS) + len(LOSSY_CASTS) + 3 >= 30
