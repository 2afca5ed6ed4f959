"""Writes at places that buffers or attributes hold: a queue, a ring. One program serves all places; what eager does at
the ends is done."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse


class Model(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.place = 0
        self.register_buffer("queue", torch.randn(4, 12))
        self.register_buffer("ring", torch.randn(6, 4))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@torch.no_grad()
def enqueued(m, keys):
    """As MoCo writes its queue."""
    ptr = int(m.ptr)
    assert m.queue.shape[1] % len(keys) == 0
    m.queue[:, ptr : ptr + len(keys)] = keys.T
    m.ptr[0] = (ptr + len(keys)) % m.queue.shape[1]


def queue(m, x):
    y = m.linear(x)
    logits = y @ m.queue.clone().detach()
    enqueued(m, y)
    return logits


def ring(m, x):
    y = torch.tanh(m.linear(x))
    with torch.no_grad():
        m.ring[m.place] = y.mean(0)
        m.place = (m.place + 1) % len(m.ring)
    return y - m.ring.mean(0)


def ring_of_a_buffer(m, x):
    y = torch.tanh(m.linear(x))
    ptr = int(m.ptr)
    with torch.no_grad():
        m.ring[ptr % 6, 1:3] = y[0, 2:].double()
        m.ring[-1 - ptr % 3] = 7 * y[:1].mean()
    m.ptr += 1
    return y * m.ring[0]


def an_item(m, x):
    y = m.linear(x)
    ptr = m.ptr.item()
    with torch.no_grad():
        m.queue[1:3, ptr : ptr + 2] = y[0, :2]
        m.ptr[0] = int(ptr + 1) % 8
    return y @ m.queue


def from_itself(m, x):
    """Rows of the tensor that is written."""
    ptr = int(m.ptr)
    m.ring[ptr % 3 : ptr % 3 + 2] = m.ring[4:6]
    m.ptr += 1
    return m.linear(x) * m.ring[0]


def followed_by_gradients(m, x):
    y = torch.tanh(m.linear(x))
    z = torch.zeros(6, 4) + m.ring
    z[int(m.ptr) % 6] = y[0]
    m.ptr += 1
    return y * z.sum(0)


def cut_off(m, x):
    """A slice that reaches beyond the end, where eager cuts it off."""
    ptr = int(m.ptr)
    m.ring[ptr : ptr + 3] = 2.0
    m.ring[ptr : ptr + 3] = m.linear(x)[0].detach()
    m.ptr += 1
    return m.linear(x) * m.ring.sum()


def counted(m, x):
    """Python needs the number itself."""
    ptr = int(m.ptr)
    m.ptr += 1
    return [m.linear(x) * i for i in range(ptr % 2)]


def another_int(m, x):
    int = float
    m.ptr += 1
    return m.linear(x) * int(m.ptr / 2)


def too_long(m, x):
    """Two rows for one place: eager raises, and the code goes on."""
    ptr = int(m.ptr)
    m.ptr += 1
    rows = 1 if ptr == 4 else 2
    try:
        m.ring[ptr % 4 : ptr % 4 + rows] = m.linear(x)[:2].detach()
    except RuntimeError:
        m.ring[0] = 0
    return m.linear(x) * m.ring.sum()


def too_long_for_its_length(m, x):
    """As above; the length is read from a tensor."""
    ptr, rows = int(m.ptr), int(2 - (m.ptr + 1) // 5 % 2)
    m.ptr += 1
    try:
        m.ring[ptr % 4 : ptr % 4 + rows] = m.linear(x)[:2].detach()
    except RuntimeError:
        m.ring[0] = 0
    return m.linear(x) * m.ring.sum()


def asked_for_its_type(m, x):
    ptr = int(m.ptr)
    m.ptr += 1
    return m.linear(x) * ptr if type(ptr) is int else m.linear(x)


def out_of_range(m, x):
    ptr = int(m.ptr)
    m.ptr += 1
    m.ring[ptr] = m.linear(x)[0].detach()
    return m.linear(x) * m.ring.sum()


ONE_PROGRAM = (queue, ring, ring_of_a_buffer, an_item)
SEVERAL = (
    from_itself,
    followed_by_gradients,
    cut_off,
    counted,
    another_int,
    asked_for_its_type,
    out_of_range,
    too_long,
    too_long_for_its_length,
)


@pytest.mark.sampled
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("function", ONE_PROGRAM + SEVERAL)
def test_every_place_is_written_as_eager_writes_it(function: Callable[[Any, Tensor], Any], training: bool) -> None:
    eager = Model(function)
    model = copy.deepcopy(eager)
    fused, launches = fuse.compile(model), []
    for call in range(9):
        x = torch.randn(4, 4)
        left = []
        with torch.set_grad_enabled(training), warnings.catch_warnings():
            warnings.simplefilter("error" if function in ONE_PROGRAM else "ignore")
            for one, own in ((eager, eager), (fused, model)):
                own.zero_grad()
                before = [b._version for b in own.buffers()]
                try:
                    result = one(x)
                except IndexError as error:
                    result = torch.zeros(len(str(error)))
                if training and isinstance(result, Tensor) and result.requires_grad:
                    result.sum().backward()
                raised = [b._version - n for b, n in zip(own.buffers(), before, strict=True)]
                grads = [p.grad for p in own.parameters()]
                left.append([result, dict(own.named_buffers()), own.place, grads, raised])
        torch.testing.assert_close(left[1], left[0], check_stride=True)
        launches.append(fused.last_run.launches if call != 6 or function is not out_of_range else 1)
    assert function in SEVERAL or 0 not in launches


class Masked(nn.Module):
    """Takes its masks from a buffer, and draws new ones when the batch has another size, as SpeechBrain's layers do."""

    masks: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.place, self.batch = nn.Linear(4, 4), 0, 1
        self.register_buffer("masks", torch.rand(100, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.batch != x.shape[0]:
            self.batch = x.shape[0]
            self.masks = torch.rand(100, 4)
        mask = self.masks[self.place : self.place + self.batch]
        self.place = self.place + self.batch
        return torch.tanh(self.linear(x)) * mask


def test_a_length_that_forward_compared_is_known() -> None:
    """The batch, a number that ``forward`` may assign, equals a size: the slice has a length, and the place is any."""
    eager = Masked()
    model = copy.deepcopy(eager)
    fused = fuse.compile(model)
    for call, batch in enumerate([2, 2, 2, 3, 3, 3, 3, 2, 2, 2]):
        x = torch.randn(batch, 4)
        torch.manual_seed(call)
        expected = eager(x)
        torch.manual_seed(call)
        torch.testing.assert_close(fused(x), expected)
        assert (model.place, model.batch) == (eager.place, eager.batch)
        assert fused.last_run is not None
        assert not fused.last_run.fallbacks
        assert fused.last_run.recaptured == "" or call < 5
