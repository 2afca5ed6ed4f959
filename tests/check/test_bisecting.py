"""The first rewrite that breaks a model is found among right ones, and shown by a file that fails alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fuse import cli, verbs
from fuse.check.bisecting import bisect
from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass, unregister
from fuse.rewrite.verdict import Verdict, rewrite

aten = torch.ops.aten


class Several(nn.Module):
    """Five operators that the wrong pass looks at, of which it breaks the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
            x = torch.tanh(self.linear(x)) * scale
        return x


@pytest.fixture
def _wrong_for_four() -> Iterator[None]:
    @register_pass(after="no_ops", before="fuse_pointwise")
    def swap_factors(graph: GraphModule) -> Iterator[Verdict]:
        """Say 4 * x as x + x + x, and other products as they are."""
        for product in graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            yield rewrite(product, build, product)

    def build(product: torch.fx.Node) -> None:
        x, factor = product.args
        surgery.replace(product, surgery.insert(product, aten.mul.Tensor, x, 3.0 if factor == 4.0 else factor))

    yield
    unregister("swap_factors")


def test_a_model_that_is_right_has_no_culprit():
    found = bisect(Several(), (torch.randn(2, 4),))
    assert found.passed
    assert str(found) == f"all {found.rewrites} rewrites are right"
    assert found.checks == 1


@pytest.mark.usefixtures("_wrong_for_four")
def test_the_first_wrong_rewrite_is_found_by_halving():
    found = bisect(Several(), (torch.randn(2, 4),), passes=["swap_factors"])
    assert found.rewrites == 5
    assert found.culprit is not None
    assert (found.culprit.number, found.culprit.pass_name) == (4, "swap_factors")
    assert found.culprit.nodes == ("mul_3",)
    assert found.culprit.source.startswith("test_bisecting.py:")
    assert found.checks <= 5
    text = str(found)
    assert text.startswith("rewrite 4 of 5 breaks it: swap_factors at test_bisecting.py:")
    assert "right with --fuel 3, wrong with --fuel 4" in text


@pytest.mark.usefixtures("_wrong_for_four")
def test_the_repro_is_the_operators_of_that_rewrite():
    found = bisect(Several(), (torch.randn(2, 4),), passes=["swap_factors"])
    assert found.repro is not None
    assert not found.whole
    assert [line.strip() for line in found.repro.splitlines() if "aten" in line] == [
        "mul_3 = torch.ops.aten.mul.Tensor(tanh_3, 4.0);  tanh_3 = None"
    ]


@pytest.fixture
def _wrong_with_company() -> Iterator[None]:
    @register_pass(after="no_ops", before="fuse_pointwise")
    def drop_cosine(graph: GraphModule) -> Iterator[Verdict]:
        """Take cos(x) for sin(x) where somebody computes both."""
        if graph.graph.find_nodes(op="call_function", target=aten.sin.default):
            for cosine in graph.graph.find_nodes(op="call_function", target=aten.cos.default):
                yield rewrite(cosine, build, cosine)

    def build(cosine: torch.fx.Node) -> None:
        surgery.replace(cosine, surgery.insert(cosine, aten.sin.default, *cosine.args))

    yield
    unregister("drop_cosine")


@pytest.mark.usefixtures("_wrong_with_company")
def test_where_the_operators_alone_are_right_the_whole_graph_is_the_repro():
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x) + torch.cos(x)

    found = bisect(Both(), (torch.randn(4, 3).t(),), passes=["drop_cosine"])
    assert found.whole
    assert found.repro is not None
    assert "torch.empty_strided([3, 4], [1, 3], dtype=torch.float32).copy_(torch.randn([3, 4]))" in found.repro


MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 4.0

def get_init_inputs():
    return []

def get_inputs():
    return [torch.randn(4)]
"""


@pytest.mark.usefixtures("_wrong_for_four")
def test_the_command_writes_a_repro_that_fails_until_the_pass_is_left_out(tmp_path: Path, capsys):
    model, repro = tmp_path / "model.py", tmp_path / "repro.py"
    model.write_text(MODEL)
    assert cli.run(["bisect", str(model), "--repro", str(repro)]) == verbs.FAILED
    printed = capsys.readouterr()
    assert "breaks it: swap_factors at model.py:6" in printed.out
    assert f"wrote {repro}" in printed.err
    assert cli.run(["check", str(repro)]) == verbs.FAILED
    assert cli.run(["check", str(repro), "--ignore", "swap_factors"]) == verbs.GOOD
    capsys.readouterr()
    assert cli.run(["bisect", str(model), "--ignore", "swap_factors", "--json"]) == verbs.GOOD
    assert json.loads(capsys.readouterr().out)["culprit"] is None
