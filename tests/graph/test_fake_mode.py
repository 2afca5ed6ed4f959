"""Fake tensors without ``torch._dynamo``, which works as ever for who imports it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fuse.graph.fakes.fake_mode import FakeMode

ROOT = Path(__file__).parents[2]


def run(code: str) -> str:
    """What a fresh process prints that runs ``code`` in the repository's root."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("model", ["lstm_loop", "mlp"])
def test_showing_a_model_imports_neither_dynamo_nor_sympy(model: str) -> None:
    out = run(
        f"""
import sys
from fuse.cli import run
assert run(["show", "models/{model}.py", "--ignore", "match_patterns", "-q"]) == 0
print("\\n", *sorted({{"torch._dynamo", "sympy", "torch._inductor", "networkx"}} & set(sys.modules)))
"""
    )
    assert out.splitlines()[-1].strip() == ""


def test_torchs_own_rules_do_not_import_dynamo_and_are_switched_off_once_it_is_there() -> None:
    out = run(
        """
import sys, torch, fuse
from fuse.graph.fakes.fake_mode import FakeMode

def results(x):
    index = torch.zeros(3, 4, dtype=torch.int64)
    return [
        torch.cat([x, x.t()[:, :3].reshape(3, 4)], 1), torch.where(x > 0, x, 1.0), x ** 2, x.clamp(0), x.mean(1),
        torch.nn.functional.elu(x), torch.nn.functional.cosine_similarity(x, x), x.cumsum(1), torch.eye(4),
        torch.clone(x).sigmoid_(), torch.nn.functional.cross_entropy(x, index[:, 0]),
    ]

def layouts(values):
    return [(value.shape, value.stride(), value.dtype) for value in values]

with FakeMode():
    before = layouts(results(torch.empty(3, 4)))
assert "torch._dynamo" not in sys.modules
import torch._dynamo
with FakeMode():
    after = layouts(results(torch.empty(3, 4)))
x = torch.randn(3, 4)
eager = layouts(results(x))
assert before == after == eager
torch._refs.where(x > 0, x, x)
rule = torch._refs.where.__wrapped__.__wrapped__
assert rule.__dynamo_disable.__module__.startswith("torch")
print("works")
"""
    )
    assert out.split() == ["works"]


def test_dynamo_works_after_fuse_has_put_it_off() -> None:
    out = run(
        """
import sys, torch, fuse
model = torch.nn.Linear(3, 2)
fuse.capture(model, (torch.zeros(4, 3),))
before = sys.modules.get("torch._dynamo")
config = torch._dynamo.config
assert before is None and "torch._dynamo" not in sys.modules
held = torch._dynamo
with torch._dynamo.config.patch(suppress_errors=True):  # what torch imports later reads the same configuration
    import torch._dynamo as real
    assert real.config.suppress_errors
assert sys.modules["torch._dynamo"] is real is torch._dynamo is not held
assert real.config is config is sys.modules["torch._dynamo.config"]
from torch._dynamo import config as imported
assert imported is config
assert held.reset is real.reset and "optimize" in dir(held)
x = torch.randn(4, 3)
compiled = torch.compile(model, backend="eager", fullgraph=True)
torch.testing.assert_close(compiled(x), model(x))
torch.testing.assert_close(torch.compile(model, backend="fuse")(x), model(x))
print("works")
"""
    )
    assert out.split() == ["works"]


FIRST_USES = (
    "torch.compile(model, backend='aot_eager')(x)",
    "torch.optim.SGD(model.parameters(), 0.1).zero_grad()",
    "torch._dynamo.reset()",
    "torch.export.export(model, (x,))",
    "import torch._dynamo.testing",
    "torch.manual_seed(0)",
    "torch._dynamo.mark_dynamic(x, 0)",
)


def test_whatever_asks_for_dynamo_first_gets_the_real_one() -> None:
    """Each in a child of one process, which has imported the rest."""
    out = run(
        f"""
import os, sys, torch, fuse
torch.set_num_threads(1)
model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
fuse.capture(model, (x,))
for first_use in {FIRST_USES}:
    if (child := os.fork()) == 0:
        exec(first_use)
        import torch._dynamo
        assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__file__
        assert torch.compile(model, backend="eager")(x).shape[1] == 2
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""
    )
    assert out.split() == ["0"] * len(FIRST_USES)


def test_dynamo_that_is_there_already_is_left_alone() -> None:
    out = run(
        """
import torch, torch._dynamo, fuse
before = torch._dynamo
fuse.capture(torch.nn.Linear(3, 2), (torch.zeros(4, 3),))
print(torch._dynamo is before)
"""
    )
    assert out.split() == ["True"]


def test_a_real_tensor_has_one_twin_that_shares_what_it_shares() -> None:
    mode = FakeMode()
    x = torch.randn(3, 4)
    twin, view = mode.from_tensor(x), mode.from_tensor(x.detach())
    assert mode.from_tensor(x) is twin
    assert isinstance(twin, FakeTensor)
    assert view.untyped_storage()._cdata == twin.untyped_storage()._cdata
    assert mode.from_tensor(x.t()).stride() == (1, 4)


def test_a_parameter_stays_one() -> None:
    mode = FakeMode()
    frozen, trained = nn.Parameter(torch.randn(3), requires_grad=False), nn.Parameter(torch.randn(3))
    for real in (frozen, trained):
        twin = mode.from_tensor(real)
        assert isinstance(twin, nn.Parameter)
        assert twin.is_leaf
        assert twin.requires_grad == real.requires_grad
