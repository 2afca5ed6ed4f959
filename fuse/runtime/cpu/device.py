"""The ``Runtime`` of processors (:mod:`fuse.runtime.device`)."""

from __future__ import annotations

from typing import Any

import torch

from fuse.runtime.cpu.blas import product
from fuse.runtime.cpu.choice import lower_measured, preferred
from fuse.runtime.cpu.functions import addresses_of
from fuse.runtime.cpu.tables import Tables, runner, scratch_bytes
from fuse.runtime.device import Empty, Runtime

_guards: Any = torch._C._dynamo.guards
empty: Empty = _guards._empty_strided_cpu
"""``torch.empty_strided`` without the dispatcher, as the code that ``torch.compile`` writes makes its results."""

RUNTIME = Runtime(lower_measured, preferred, product, addresses_of, Tables, runner, scratch_bytes, empty)
