"""Ctrl-C while a call is captured, compiled or run, and ``fork`` while other threads do: later calls are right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from contextvars import Context, copy_context
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.errors import CompileFailed
from fuse.runtime.building import interrupts
from fuse.runtime.cpu import compiler, toolchain

pytestmark = pytest.mark.usefixtures("interruptible")

PATIENCE = 300.0
"""Of a machine on which a capture takes a minute."""


class Loops(nn.Module):
    """Two loops, which are two translation units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RNNCell(5, 5), nn.GRUCell(5, 5)

    def forward(self, xs: Tensor) -> Tensor:
        h = g = xs.new_zeros(2, 5)
        for x in xs:
            h = self.first(x, h)
        for x in xs:
            g = self.second(x, g)
        return h + g


def slow_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that says when it has begun, and takes a minute."""
    begun, script = directory / "begun", directory / "slow-c++"
    real = toolchain.find().command[0]
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) echo $$ >> {begun}; sleep 60;; esac\nexec {real} "$@"\n', encoding="utf-8"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return begun


def running(begun: Path) -> list[str]:
    """The compilers that have begun and have not ended."""
    return [pid for pid in begun.read_text().split() if Path(f"/proc/{pid}").exists()]


def interrupt_when(begun: Path, units: int, sent: list[float]) -> threading.Thread:
    """Ctrl-C for the main thread, as soon as so many compilers are at work; when that was is added to ``sent``."""

    def wait() -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and (not begun.exists() or len(begun.read_text().split()) < units):
            time.sleep(0.01)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("train", [False, True])
def test_ctrl_c_stops_all_compilers_and_the_next_call_is_fused(
    train: bool, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = slow_compiler(tmp_path, monkeypatch)
    monkeypatch.setattr(compiler, "_loaded", {})
    model, xs = Loops(), torch.randn(9, 2, 5)
    fused = fuse.compile(model)
    threads = threading.active_count()
    sent: list[float] = []
    thread = interrupt_when(begun, 1, sent)
    with torch.set_grad_enabled(train):
        with pytest.raises(KeyboardInterrupt):
            fused(xs)
        thread.join()
        assert time.monotonic() - sent[0] < 50
        while (threading.active_count() > threads or running(begun)) and time.monotonic() - sent[0] < 50:
            time.sleep(0.01)
        assert threading.active_count() == threads
        assert running(begun) == []
        monkeypatch.delenv("CXX")
        torch.testing.assert_close(fused(xs), model(xs))
    assert fused.compiled is not None


class Interrupted(nn.Module):
    """Interrupted in the middle of its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.total += h.sum(0)
        self.calls.append(1)
        if len(self.calls) == 1:
            raise KeyboardInterrupt
        return h.tanh()


def test_ctrl_c_in_a_capture_leaves_the_model_as_it_was() -> None:
    model, x = Interrupted(), torch.randn(3, 4)
    weight = model.inner.weight
    fused = fuse.compile(model)
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            fused(x)
        assert model.inner.weight is weight
        assert type(model.total) is Tensor
        model.calls.append(1)
        before = model.total.clone()
        result = fused(x)
        torch.testing.assert_close(result, model.inner(x).tanh())
        torch.testing.assert_close(model.total, before + model.inner(x).sum(0))


def test_ctrl_c_between_calls_of_a_program_changes_nothing() -> None:
    """Interrupted at moments that nobody chose: each call returns the right values or raises."""
    model, xs = Loops(), torch.randn(9, 2, 5)
    fused = fuse.compile(model)
    with torch.no_grad():
        want = fused(xs)
        interrupted = 0
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        for number in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.00003 * number)
                for _ in range(300):
                    assert torch.equal(fused(xs), want)
                time.sleep(0.05)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert torch.equal(fused(xs), want)
    assert interrupted > 50


FORKS = textwrap.dedent("""
    import gc, os, signal, sys, threading, torch, fuse
    from torch._subclasses.fake_tensor import FakeTensor

    during, done = threading.Event(), threading.Event()

    class Meeting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.LSTMCell(8, 40)
            self.meet = False
        def forward(self, xs):
            h = c = xs.new_zeros(xs.shape[1], 40)
            for x in xs:
                h, c = self.inner(x, (h, c))
            if isinstance(xs, FakeTensor) and self.meet:
                during.set()
                done.wait(60)
            return h

    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    model = Meeting()
    fused = fuse.compile(model)
    old, new = torch.randn(9, 20, 8), torch.randn(12, 7, 8)
    want = {id(x): model(x) for x in (old, new)}
    torch.testing.assert_close(fused(old), want[id(old)])
    model.meet = True
    thread = threading.Thread(target=lambda: (torch.set_grad_enabled(False), fused(new)))
    thread.start()
    during.wait(60)  # a thread captures, and holds all that threads hold then
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        torch.set_num_threads(1)  # as a data loader's worker does
        done.set()
        model.meet = False
        for x in (old, new, old):
            torch.testing.assert_close(fused(x), want[id(x)])
            assert fused.compiled is not None
        assert gc.isenabled()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
    torch.testing.assert_close(fused(new), want[id(new)])
    print("child", status)
""")


def test_a_child_forked_while_a_thread_captures_calls_and_compiles() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=200)
    assert ran.stdout == "child 0\n", ran.stderr


FORKS_EARLY = textwrap.dedent("""
    import os, signal, torch, fuse

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    fused, x = fuse.compile(model), torch.randn(3, 4)
    fused(x)  # whose gradients' kernels are still compiled
    child = os.fork()
    signal.alarm(100)
    fused(x).sum().backward()
    found = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, model[0].weight.grad)
    if child == 0:
        os._exit(0)
    print("child", os.waitpid(child, 0)[1])
""")


def test_a_child_forked_while_gradients_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, script = toolchain.find().command[0], tmp_path / "slow-c++"
    script.write_text(f'#!/bin/sh\nsleep 1\nexec {real} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("FUSE_CACHE_DIR", str(tmp_path / "cache"))
    ran = subprocess.run([sys.executable, "-c", FORKS_EARLY], capture_output=True, text=True, timeout=200)
    assert ran.stdout == "child 0\n", ran.stderr


def test_a_thread_of_an_interrupted_caller_does_not_wait_for_compilations_of_others() -> None:
    contexts: list[Context] = []

    def interrupted() -> None:
        with interrupts.stopped_on_interrupt():
            contexts.append(copy_context())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(CompileFailed, match="the call was interrupted"):
        contexts[0].run(interrupts.awaited, Future())
