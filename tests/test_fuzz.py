"""Random programs, fused and held to eager. ``python -m tests.fuzz --minutes 60 --seed 1000`` looks longer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from fuse.rewrite.pipeline import run_passes
from tests.fuzz import judging, loops, straight
from tests.fuzz.__main__ import main
from tests.fuzz.drawing import Program
from tests.fuzz.judging import judge
from tests.fuzz.shrinking import shrink


@pytest.mark.sampled
@pytest.mark.usefixtures("seldom_optimised")
@pytest.mark.parametrize("seed", range(25))
def test_a_random_program_runs_fused_as_eager_does(seed: int) -> None:
    program = straight.program(seed)
    assert not (problem := judge(program).problem), f"{program}\n{problem}"


@pytest.mark.sampled
@pytest.mark.usefixtures("seldom_optimised")
@pytest.mark.parametrize("seed", range(30))
def test_a_random_loop_runs_fused_as_eager_does(seed: int) -> None:
    program = loops.program(seed)
    assert not (problem := judge(program).problem), f"{program}\n{problem}"


@pytest.mark.parametrize("draw", [straight.program, loops.program])
def test_a_seed_names_one_program(draw) -> None:
    for seed in range(20):
        one, other = draw(seed), draw(seed)
        assert str(one) == str(other)
        for mine, theirs in zip(one.calls, other.calls, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_failing_program_shrinks_to_what_fails() -> None:
    text = """def forward(v0, v1):
    v2 = v0.tanh() + v1
    v3 = v1.cos() * v2
    for t in range(3):
        v3 = v3 * 0.5
        v2 = v2 + torch.sigmoid(v3.exp())
    v4 = v0.sum(-1)
    return [v4, v2, v3]"""
    drawn = Program(7, text, ((torch.ones(3, 4), torch.ones(3, 4)),) * 3, 1e-4, shared_out=True)
    small = shrink(drawn, lambda program: "sigmoid" in program.text)
    body = [line.strip() for line in small.text.splitlines()]
    assert body == ["def forward(v0, v1):", "for t in range(3):", "v2 = torch.sigmoid(v3.exp())", "return [v3]"]
    assert len(small.calls) == 1
    assert not small.shared_out


def subtracting(graph: GraphModule, *rest: Any) -> Any:
    """The passes, on a graph whose sums have become differences."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.add.Tensor:
            node.target = torch.ops.aten.sub.Tensor
    return run_passes(graph, *rest)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_wrong_result_is_found(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.ones(3, 4), torch.ones(3, 4)
    program = Program(0, "def forward(v0, v1):\n    return [v0.tanh() + v1]", (inputs,) * calls, 1e-4)
    assert not judge(program).problem
    monkeypatch.setattr(judging, "run_passes", subtracting)
    assert "error" in judge(program).problem


def test_a_program_that_eager_refuses_says_nothing() -> None:
    assert judge(Program(0, "def forward(v0):\n    return [v0 @ v0]", ((torch.ones(3, 4),),), 1e-4)).unfit


def test_the_command_logs_each_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    assert main(["--minutes", "3", "--programs", "2", "--seed", "5", "--unoptimised", "--log", str(log)]) == 0
    assert [json.loads(line)["seed"] for line in log.read_text().splitlines()] == [5, 6]
    assert "seeds 5 to 6" in capsys.readouterr().out
