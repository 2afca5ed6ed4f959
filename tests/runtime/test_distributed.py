"""Fused models on PyTorch's own engine for several processes: two of them, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fuse
from fuse.errors import FuseError
from tests.conftest import without_optimising

STEPS = 25
FEW = 6
ROWS = 8


class Block(nn.Module):
    """A loop and a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, a: Tensor) -> Tensor:
        h = a.new_zeros(len(a), 8)
        for t in range(5):
            h = torch.tanh(self.inner(a) * (t + 1) + self.state(h))
        return a + F.gelu(self.norm(h))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 3))


def batches(rank: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This process' half of each batch; all of it for one process (rank -1)."""
    own = slice(None) if rank < 0 else slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(ROWS, 4, generator=generator)
        yield x[own], x[own, :3].argmax(1)


def curve(run: Callable[..., Any], parameters: Any, rank: int, steps: int) -> list[float]:
    """Losses over all processes."""
    optimizer = torch.optim.SGD(parameters, 0.05)
    losses = []
    for x, y in batches(rank, steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    if rank >= 0:
        dist.all_reduce(total)
        total /= 2
    return total.tolist()


def blocks_fused() -> nn.Sequential:
    """A model whose blocks are compiled one by one."""
    made = model()
    return nn.Sequential(made[0], *(fuse.compile(block) for block in (made[1], made[2])), made[3])


def in_a_process(rank: int) -> dict[str, Any]:
    """What one of two processes finds."""
    found: dict[str, Any] = {}
    warnings.filterwarnings("error", message=".*(runs eager|runs op by op)")

    fused = fuse.compile(model())
    seen = []
    fused.get_parameter("0.weight").register_post_accumulate_grad_hook(lambda weight: seen.append(1))
    found["DDP"] = curve(DistributedDataParallel(fused), fused.parameters(), rank, STEPS)
    found["hooks"] = len(seen)
    found["fallbacks"] = [f.reason for f in (*fused.last_run.fallbacks, *fused.last_run.backward.fallbacks)]

    parts = blocks_fused()
    small = DistributedDataParallel(parts, bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    small.register_comm_hook(None, default_hooks.allreduce_hook)
    found["buckets"] = curve(small, parts.parameters(), rank, FEW)

    fused = fuse.compile(model())
    unsynced = DistributedDataParallel(fused, find_unused_parameters=True)
    with unsynced.no_sync():
        for x, y in batches(rank, 1):
            F.cross_entropy(unsynced(x), y).backward()
    found["accumulated"] = curve(unsynced, fused.parameters(), rank, FEW)

    parts = blocks_fused()
    for block in (parts[1], parts[2]):
        assert block.last_run is None
    fully_shard(parts)
    found["FSDP"] = curve(parts, parts.parameters(), rank, FEW)
    found["FSDP fallbacks"] = [f.reason for f in parts[1].last_run.fallbacks]

    with pytest.raises(FuseError, match="compile its blocks"):
        fully_shard(fuse.compile(model()))
    with pytest.warns(UserWarning, match="runs eager: .*DTensor"):
        found["sharded first"] = curve(run := fuse.compile(fully_shard(model())), run.parameters(), rank, FEW)
    with pytest.warns(UserWarning, match="wrap the compiled model in it instead"):
        found["DDP first"] = curve(run := fuse.compile(DistributedDataParallel(model())), run.parameters(), rank, FEW)
    return found


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # FSDP would take the model there
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(folder)], stderr=subprocess.PIPE, text=True, env=env)
        for rank in range(2)
    ]
    for process in started:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def one_process(steps: int) -> list[float]:
    eager = model()
    return curve(eager, eager.parameters(), -1, steps)


def test_two_processes_train_as_one(processes: list[dict[str, Any]]) -> None:
    expected = one_process(STEPS)
    for found in processes:
        assert found["DDP"] == pytest.approx(expected, rel=1e-4)
        assert found["hooks"] == STEPS
        assert found["fallbacks"] == []
    assert expected[-1] < 0.8 * expected[0]


@pytest.mark.parametrize("name", ["buckets", "FSDP", "sharded first", "DDP first"])
def test_other_ways_of_two_processes_train_as_one(processes: list[dict[str, Any]], name: str) -> None:
    for found in processes:
        assert found[name] == pytest.approx(one_process(FEW), rel=1e-4)
        assert found["FSDP fallbacks"] == []


def test_gradients_of_a_step_without_synchronization_are_added_to_the_next(processes: list[dict[str, Any]]) -> None:
    assert processes[0]["accumulated"] == processes[1]["accumulated"]
    assert processes[0]["accumulated"][0] == pytest.approx(one_process(1)[0], rel=1e-4)


if __name__ == "__main__":
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=2)
    with without_optimising():
        (folder / f"{number}.json").write_text(json.dumps(in_a_process(number)))
    dist.barrier()  # the other may still talk to this one
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads do not always end before the process does, which then aborts
