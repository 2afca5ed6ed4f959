"""A few dozen operators of PyTorch's own list through ``fuse.compile``; ``benchmarks/op_db.py`` runs all of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("expecttest", reason="PyTorch's list of operators needs it")
pytest.importorskip("torch.testing._internal.common_methods_invocations")

KERNELS = (
    "add abs argmax cat clamp div exp expand flip lerp log_softmax logsumexp masked_fill maximum mean mul "
    "nn.functional.gelu nn.functional.layer_norm nn.functional.leaky_relu nn.functional.group_norm nn.functional.pad "
    "permute pow repeat reshape rsub softmax stack std sub sum tanh tril unsqueeze var where"
)
OTHERS = "bmm matmul addmm linalg.svd nn.functional.conv2d nn.functional.dropout sort topk cumsum unique"


def sweeper() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "op_db.py"
    spec = importlib.util.spec_from_file_location("op_db_sweep", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SWEEP = sweeper()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*KERNELS.split(), *OTHERS.split()])
def test_an_operator_gives_what_eager_gives(name: str) -> None:
    for op in SWEEP.operators([name]):
        outcome = SWEEP.sweep(op, samples=3)
        assert not outcome.wrong
        if name in KERNELS.split() and not op.variant_test_name:
            assert outcome.place == "kernel", outcome.fallbacks
