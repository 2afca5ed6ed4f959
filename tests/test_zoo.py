"""Models of published packages, as far as they are installed (``pip install -e '.[zoo]'``): right, fused, and harmless
to the packages they come from."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from torch import Tensor, nn

import fuse
from benchmarks.zoo_world import compared, is_equal
from fuse.check.oracle import check

NEEDED = {
    "einops": "einops",
    "transformers": "transformers",
    "timm": "timm",
    "x-transformers": "x_transformers",
    "vit-pytorch": "vit_pytorch",
    "snntorch": "snntorch",
    "torchdiffeq": "torchdiffeq",
    "ncps": "ncps",
    "pytorch-crf": "torchcrf",
    "mambapy": "mambapy",
}
"""What is imported of each package."""

SMALL = (
    "zoo_text:transformers:albert", "zoo_text:transformers:gpt2", "zoo_text:transformers:llama",
    "zoo_images:timm:vit_tiny_patch16_224", "zoo_images:vit-pytorch:simple_vit", "zoo_sequences:x-transformers:decoder",
    "zoo_sequences:snntorch:leaky", "zoo_sequences:torchdiffeq:rk4", "zoo_sequences:ncps:cfc",
    "zoo_sequences:pytorch-crf:loss", "zoo_sequences:mambapy:mamba",
)  # fmt: skip


def installed(package: str) -> None:
    if importlib.util.find_spec(NEEDED[package]) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("name", SMALL)
def test_a_model_of_a_package_is_right_and_fused(name: str) -> None:
    group, package, _ = name.split(":")
    installed(package)
    case = importlib.import_module(f"benchmarks.{group}").CASES[name.partition(":")[2]]
    torch.manual_seed(0)
    model, args, kwargs = case(1)
    report = check(model.eval(), args, kwargs)
    assert report.problems == ()
    assert report.fallbacks == ()
    assert report.observed[1] < report.observed[0]


def test_a_process_that_ran_fuse_builds_and_runs_every_model_as_one_without_fuse() -> None:
    names = [name for name in SMALL if importlib.util.find_spec(NEEDED[name.split(":")[1]]) is not None]
    if not names:
        pytest.skip("none of the packages is installed")
    found = list(compared([(group, case) for group, _, case in (name.partition(":") for name in names)]))
    assert len(found) == len(names)
    assert [one for one in found if not is_equal(one)] == []


def test_einops_is_captured_in_the_first_call() -> None:
    installed("einops")
    from einops import rearrange, reduce
    from einops.layers.torch import Rearrange

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4)
            self.linear = nn.Linear(48, 32)

        def forward(self, x: Tensor) -> Tensor:
            heads = rearrange(self.linear(self.cut(x)).tanh(), "b n (h d) -> b h n d", h=4)
            return reduce(heads, "b h n d -> b d", "mean")

    from einops import _backends

    with torch.no_grad():
        Patches()(torch.randn(2, 3, 16, 16))
        known = dict(_backends._type2backend)
        fused = fuse.compile(Patches())
        fused(torch.randn(2, 3, 16, 16))
    assert fused.last_run is not None
    assert fused.last_run.fallbacks == ()
    assert _backends._type2backend == known
