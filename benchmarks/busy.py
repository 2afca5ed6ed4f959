"""A recurrent loop and a small network on a machine that other processes use too: eager, tuned by hand, fuse.

    0, 1, 2, 4, 8 busy processes;  pinned to one core;  beside a DataLoader   ->   medians, 90th percentiles, means

Two threads each. In a process for each situation the rivals take turns of 20 milliseconds, so that whatever else the
machine does meets them alike and each bears what its own threads bring about; five seconds for each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fuse
from benchmarks.common import ROOT, save
from models import lstm_loop

THREADS = 2
SECONDS = 5.0
TURN = 0.02
BUSY = {f"{count} busy": count for count in (0, 1, 2, 4, 8)}
PINNED, LOADER = "one core", "DataLoader"
SITUATIONS = (*BUSY, PINNED, LOADER)


class Images(Dataset[Tensor]):
    """Images that take some milliseconds of a worker each."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Tensor:
        image = torch.rand(3, 256, 256, generator=torch.Generator().manual_seed(index))
        return torch.fft.rfft2(image).abs().log1p().mean(0)


def network() -> nn.Module:
    """Products and what is between them: kernels that OpenMP shares out."""
    wide = [nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256)]
    return nn.Sequential(*wide, nn.LayerNorm(256), nn.Softmax(-1))


def cases() -> dict[str, dict[str, Callable[[], Any]]]:
    """The rivals of each case, which all take the same input."""
    x = torch.randn(lstm_loop.seq_length, lstm_loop.batch_size, lstm_loop.input_size)
    loop, rows = lstm_loop.Model(*lstm_loop.get_init_inputs()), torch.randn(128, 256)
    mlp = network()
    rivals = {
        "LSTM loop (64, 4, 128)": ({"eager": loop, "tuned": lstm_loop.tuned(), "fuse": fuse.compile(loop)}, x),
        "network (128 rows, 256 to 1024)": ({"eager": mlp, "fuse": fuse.compile(mlp)}, rows),
    }
    return {
        case: {name: (lambda model=model, given=given: model(given)) for name, model in models.items()}
        for case, (models, given) in rivals.items()
    }


def measured(situation: str, seconds: float) -> dict[str, Any]:
    """Milliseconds of each rival in this situation, by case."""
    torch.set_num_threads(THREADS)
    found = {}
    with torch.no_grad():
        for case, rivals in cases().items():
            for run in rivals.values():
                run()
            with loading() if situation == LOADER else busy(BUSY.get(situation, 0)):
                found[case] = {name: summary(times) for name, times in taken_in_turns(rivals, seconds).items()}
    return found


def taken_in_turns(rivals: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each call: turns of :data:`TURN` seconds, until each rival has had so many seconds."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    spent = dict.fromkeys(rivals, 0.0)
    for shift in itertools.count():
        names = [list(rivals)[(shift + i) % len(rivals)] for i in range(len(rivals))]
        if min(spent.values()) >= seconds:
            return times
        for name in names:
            run, begin = rivals[name], time.perf_counter()
            before = begin
            while before - begin < TURN:
                run()
                now = time.perf_counter()
                times[name].append(1000 * (now - before))
                before = now
            spent[name] += before - begin
    raise AssertionError


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile and mean of calls."""
    ordered = sorted(times)
    return {
        "median": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "mean": statistics.fmean(ordered),
        "calls": len(ordered),
    }


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5 if count else 0)
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """A DataLoader with two workers, of whose images 25 a second are taken away."""
    done = threading.Event()

    def take() -> None:
        for _ in DataLoader(Images(), batch_size=4, num_workers=2, prefetch_factor=8):
            if done.wait(0.04):
                return

    taker = threading.Thread(target=take)
    taker.start()
    try:
        time.sleep(0.5)
        yield
    finally:
        done.set()
        taker.join()


def in_a_process(situation: str, seconds: float) -> dict[str, Any]:
    """What :func:`measured` finds in a new process, pinned to one core if that is the situation."""
    print(situation, file=sys.stderr, flush=True)

    def pin() -> None:
        if situation == PINNED:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    command = [sys.executable, "-m", "benchmarks.busy", "--measure", situation, "--seconds", str(seconds)]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=pin)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", choices=SITUATIONS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each rival in each situation")
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measured(asked.measure, asked.seconds)))
    else:
        before = os.getloadavg()[0]  # later, it is this benchmark's own
        cases = [{"situation": name, "cases": in_a_process(name, asked.seconds)} for name in SITUATIONS]
        save("busy", cases, before)
