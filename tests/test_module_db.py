"""Some modules of PyTorch's own list through both doors, with gradients; ``benchmarks/module_db.py`` runs all."""

from __future__ import annotations

import pytest

from benchmarks import module_db

COMPILE = "BatchNorm2d Conv1d CrossEntropyLoss Embedding GELU GRUCell GroupNorm KLDivLoss MultiheadAttention RNN"
DYNAMO = "Conv2d LSTMCell LayerNorm MSELoss PReLU"


@pytest.mark.sampled
@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "door"),
    [*((name, "compile") for name in COMPILE.split()), *((name, "dynamo") for name in DYNAMO.split())],
)
def test_a_module_trains_as_in_eager(name: str, door: str) -> None:
    (info,) = module_db.modules([f"nn.{name}"])
    outcome = module_db.sweep(info, door, samples=2)
    assert outcome.samples
    assert not outcome.wrong
    assert not outcome.fallbacks
