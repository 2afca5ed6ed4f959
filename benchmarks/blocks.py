"""Forty blocks of two to six operators, a product or a convolution and what people write behind it, at moderate sizes.

    python -m benchmarks.blocks                 all, about ten minutes
    python -m benchmarks.blocks linear_relu     some; the others keep the figures that they have

Each is timed eager, under ``torch.compile`` and fused in one process, interleaved; launches of ``torch.compile`` are
counted in the code that it generates. Nothing is frozen on either side.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import RESULTS, save
from fuse.report.timing.bench import bench

ROWS, WIDTH = 128, 512
SECONDS = 0.7


class Block(nn.Module):
    """Layers by name, and a function of them and the inputs."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = (forward,)
        for name, layer in layers.items():
            if isinstance(layer, nn.Module):
                self.add_module(name, layer)
            else:
                self.register_buffer(name, layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function[0](self, *inputs)


Case = Callable[[], tuple[Block, tuple[Tensor, ...]]]


def dense(function: Callable[..., Tensor], inputs: int = 1, **others: Any) -> Case:
    """A block around ``linear``; ``others`` make further layers, or tensors of their own."""

    def made() -> tuple[Block, tuple[Tensor, ...]]:
        layers = {name: make() for name, make in others.items()}
        block = Block(function, linear=nn.Linear(WIDTH, WIDTH), **layers)
        return block, tuple(torch.randn(ROWS, WIDTH) for _ in range(inputs))

    return made


def image(function: Callable[..., Tensor], inputs: int = 1, **others: Any) -> Case:
    """A block around ``conv``, which keeps 32 channels of 32 x 32."""

    def made() -> tuple[Block, tuple[Tensor, ...]]:
        layers = {"conv": nn.Conv2d(32, 32, 3, padding=1), **{name: make() for name, make in others.items()}}
        return Block(function, **layers), tuple(torch.randn(4, 32, 32, 32) for _ in range(inputs))

    return made


def heads(function: Callable[..., Tensor]) -> Case:
    """A block of queries, keys and values [2, 8, 128, 64]."""
    return lambda: (Block(function), tuple(torch.randn(2, 8, 128, 64) for _ in range(3)))


def sequence(function: Callable[..., Tensor]) -> Case:
    """A block around a one-dimensional convolution of [8, 128, 200]."""
    return lambda: (Block(function, conv=nn.Conv1d(128, 128, 5, padding=2)), (torch.randn(8, 128, 200),))


def trained(norm: nn.Module) -> nn.Module:
    """A batch norm with statistics that change something."""
    norm.running_mean.uniform_(-0.5, 0.5)
    norm.running_var.uniform_(0.5, 1.5)
    return norm


def bn() -> nn.Module:
    return trained(nn.BatchNorm2d(32))


def wide() -> nn.Module:
    return nn.Linear(WIDTH, 2 * WIDTH)


def glu(self: Any, x: Tensor) -> Tensor:
    value, gate = self.wide(x).chunk(2, -1)
    return value * torch.sigmoid(gate)


def rms(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)


def standardized(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    return (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + 1e-5)


def centred(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x).amax(-1, keepdim=True)
    return F.gelu(y - y.mean(0, keepdim=True))


def attention(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(64), -1) @ v


def causal(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * 0.125
    mask = torch.ones(128, 128, dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v


def excited(self: Any, x: Tensor) -> Tensor:
    y = self.conv(x)
    return y * torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3))))))[:, :, None, None]


CASES: dict[str, Case] = {
    "linear_relu": dense(lambda m, x: F.relu(m.linear(x))),
    "linear_gelu": dense(lambda m, x: F.gelu(m.linear(x))),
    "linear_gelu_tanh": dense(lambda m, x: F.gelu(m.linear(x), approximate="tanh")),
    "linear_silu": dense(lambda m, x: F.silu(m.linear(x))),
    "linear_tanh_scale": dense(lambda m, x: torch.tanh(m.linear(x)) * 2.0),
    "linear_sigmoid_residual": dense(lambda m, x: torch.sigmoid(m.linear(x)) + x),
    "linear_residual": dense(lambda m, x: m.linear(x) + x),
    "linear_residual_norm": dense(lambda m, x: m.norm(m.linear(x) + x), norm=lambda: nn.LayerNorm(WIDTH)),
    "linear_norm_gelu": dense(lambda m, x: F.gelu(m.norm(m.linear(x))), norm=lambda: nn.LayerNorm(WIDTH)),
    "linear_softmax": dense(lambda m, x: torch.softmax(m.linear(x), -1)),
    "linear_scale_softmax": dense(lambda m, x: torch.softmax(m.linear(x) * 0.125, -1)),
    "linear_log_softmax": dense(lambda m, x: torch.log_softmax(m.linear(x), -1)),
    "linear_logsumexp": dense(lambda m, x: torch.logsumexp(m.linear(x), -1)),
    "linear_sum_swish": dense(lambda m, x: F.silu(m.linear(x).sum(-1, keepdim=True))),
    "linear_standardize": dense(standardized),
    "linear_rms_norm": dense(rms),
    "linear_max_centre_gelu": dense(centred),
    "linear_glu": dense(glu, wide=wide),
    "linear_swiglu": dense(lambda m, x: F.silu(m.linear(x)) * m.up(x), up=lambda: nn.Linear(WIDTH, WIDTH)),
    "linear_batch_norm_relu": dense(
        lambda m, x: F.relu(m.norm(m.linear(x))), norm=lambda: trained(nn.BatchNorm1d(WIDTH))
    ),
    "linear_group_norm_hardtanh": dense(
        lambda m, x: F.hardtanh(m.norm(m.linear(x))), norm=lambda: nn.GroupNorm(8, WIDTH)
    ),
    "linear_scale_clamp_logsumexp_mish": dense(
        lambda m, x: F.mish(torch.logsumexp((m.linear(x) * 2.0).clamp(-1.0, 1.0), -1, keepdim=True))
    ),
    "linear_swish_divide_clamp_tanh": dense(lambda m, x: torch.tanh((F.silu(m.linear(x)) / 2.0).clamp(-1.0, 1.0))),
    "mlp": dense(lambda m, x: m.out(F.gelu(m.linear(x))), out=lambda: nn.Linear(WIDTH, WIDTH)),
    "attention": heads(attention),
    "causal_attention": heads(causal),
    "conv_relu": image(lambda m, x: F.relu(m.conv(x))),
    "conv_bn_relu": image(lambda m, x: F.relu(m.norm(m.conv(x))), norm=bn),
    "conv_bn_residual_relu": image(lambda m, x: F.relu(m.norm(m.conv(x)) + x), norm=bn),
    "conv_hardswish": image(lambda m, x: F.hardswish(m.conv(x))),
    "conv_scale_sigmoid": image(lambda m, x: torch.sigmoid(m.conv(x) * 0.5 + 0.1)),
    "conv_group_norm_silu": image(lambda m, x: F.silu(m.norm(m.conv(x))), norm=lambda: nn.GroupNorm(8, 32)),
    "conv_instance_norm_divide": image(lambda m, x: F.instance_norm(m.conv(x)) / 2.0),
    "conv_relu_max_pool": image(lambda m, x: F.max_pool2d(F.relu(m.conv(x)), 2)),
    "conv_avg_pool_sigmoid_sum": image(lambda m, x: torch.sigmoid(F.avg_pool2d(m.conv(x), 2)).sum((1, 2, 3))),
    "conv_global_pool_linear": image(lambda m, x: m.out(m.conv(x).mean((2, 3))), out=lambda: nn.Linear(32, 10)),
    "conv_softmax_channels": image(lambda m, x: torch.softmax(m.conv(x), 1)),
    "depthwise_bn_relu6_pointwise": image(
        lambda m, x: m.conv(F.relu6(m.norm(m.depthwise(x)))),
        conv=lambda: nn.Conv2d(32, 32, 1),
        depthwise=lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32),
        norm=bn,
    ),
    "conv_squeeze_excite": image(excited, down=lambda: nn.Linear(32, 8), up=lambda: nn.Linear(8, 32)),
    "conv1d_gelu_residual": sequence(lambda m, x: F.gelu(m.conv(x)) + x),
}


def measured(name: str) -> dict[str, Any]:
    """One block: the same random weights and inputs for all."""
    torch.manual_seed(0)
    block, inputs = CASES[name]()
    report = bench(block.eval(), inputs, against=("eager", "compile"), seconds=SECONDS, target=name).to_dict()
    return {key: value for key, value in report.items() if key not in ("machine", "versions", "schema_version")}


def summary(cases: list[dict[str, Any]]) -> str:
    ratios = {peer: [case["ratios"][peer]["median"] for case in cases] for peer in ("eager", "compile")}
    fewer = sum(case["observed"]["after"] <= case["compiled_launches"] for case in cases)
    return (
        f"{len(cases)} blocks: faster than eager on {sum(r > 1 for r in ratios['eager'])}; geometric mean "
        f"{statistics.geometric_mean(ratios['eager']):.2f} against eager, "
        f"{statistics.geometric_mean(ratios['compile']):.2f} against torch.compile; launches at most those of "
        f"torch.compile on {fewer}; results differ on {sum(bool(case['disagreements']) for case in cases)}"
    )


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in CASES]:
        sys.exit(f"no block {unknown[0]!r}; there are {', '.join(CASES)}")
    path = RESULTS / "blocks.json"
    kept = {case["target"]: case for case in json.loads(path.read_text())["cases"]} if path.exists() else {}
    for name in names or list(CASES):
        kept[name] = case = measured(name)
        times = {who: f"{taken['median']:.3f}" for who, taken in case["milliseconds"].items()}
        launches = f"{case['observed']['before']} -> {case['observed']['after']}, compile {case['compiled_launches']}"
        ratios = ", ".join(f"{peer} {ratio['median']:.2f}" for peer, ratio in case["ratios"].items())
        print(f"{name:34} {ratios:28} {launches:22} {times}", flush=True)
    cases = [kept[name] for name in CASES if name in kept]
    save("blocks", cases)
    print(summary(cases))


if __name__ == "__main__":
    main(sys.argv[1:])
