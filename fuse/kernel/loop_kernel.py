"""Lower a loop to one persistent kernel: time inside, states and weights in cache, threads that live as long as it.

    loop(h0, xs, w)  ->  step (values, products)  ->  threads share out units, or rows of the batch  ->  C++

Sharing out units is tried first: it serves recurrent cells, whose products read the whole state. What it cannot express
(norms, softmax, states of other shapes, steps without products) is shared out by rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files

from torch import Tensor

from fuse.graph.loop import Loop
from fuse.kernel.index import NotAffine, SplitNeeded
from fuse.kernel.loop_frame import ALIGNMENT, Frame
from fuse.kernel.loop_rows import rows_text
from fuse.kernel.loop_step import read_step
from fuse.kernel.loop_units import units_text
from fuse.kernel.lower import MAX_NAME_PARTS, Declined, Kernel, deep_recursion
from fuse.kernel.recipes import Unsupported

HEADERS = ("threads.h", "products.h")

Share = Callable[[Frame, str], tuple[str, int, int]]
"""A schedule: the text of one thread's function, the number of threads that pay, bytes of workspace."""


@cache
def loop_prelude() -> str:
    """The C++ text that sources of loop kernels need behind the prelude.

    >>> "fuse_product" in loop_prelude()
    True
    """
    folder = files("fuse.kernel")
    texts = (folder.joinpath(header).read_text(encoding="utf-8") for header in HEADERS)
    return "\n".join(text.replace("#pragma once\n", "") for text in texts)


def lower_loop(loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor]) -> Kernel | Declined:
    """The kernel that runs all steps of ``loop``, or the reason why there is none.

    Args:
        loop: its body is a captured graph of one step.
        operands: as ``loop`` is called; only shapes, strides, dtypes and devices are read.
        results: as the caller allocates them: last states, then what is collected, with their strides.

    Returns:
        A kernel whose arguments are pointers to the operands, the results, and ``workspace_bytes`` of memory. Its
        source needs :func:`loop_prelude` behind the prelude.

    >>> import torch
    >>> from fuse.graph.capture import capture
    >>> from fuse.graph.loop import LoopSpec
    >>> class Step(torch.nn.Module):
    ...     def forward(self, h, w):
    ...         return torch.tanh(h @ w)
    >>> h, w = torch.zeros(2, 16), torch.zeros(16, 16)
    >>> loop = Loop(capture(Step(), (h, w)), LoopSpec(trip_count=9, carries=1, step_inputs=(), collected=0))
    >>> kernel = lower_loop(loop, [h, w], [h])
    >>> kernel.parallel, kernel.source.count("fuse_tanh")
    (False, 1)
    """
    if not loop.spec.carries:
        return Declined("no state is carried from step to step")
    reasons = []
    for share, cut in ((units_text, False), (rows_text, False), (rows_text, True)):
        try:
            with deep_recursion():
                step = read_step(loop, operands, cut)
                return _kernel(Frame(step, loop.spec, tuple(operands), tuple(results)), share)
        except (Unsupported, NotAffine) as why:
            reasons.append(str(why))
        except SplitNeeded as need:
            reasons.append(f"the loop over {need.atom} would have to be split")
    return Declined(reasons[-1])


def _kernel(frame: Frame, share: Share) -> Kernel:
    text, threads, size = share(frame, "LOOP")
    comment = "".join(f"// {line}\n" for line in frame.step.lines)
    digest = hashlib.sha256(f"{threads} {size} {comment} {text}".encode()).hexdigest()[:8]
    parts = list(dict.fromkeys(frame.step.value_names.values()))[:MAX_NAME_PARTS]
    name = "_".join(["loop", *parts, digest])
    entry = f"""extern "C" int {name}(char *const *args) {{
    return fuse_run_team({name}_share, args, {threads});
}}
"""
    source = comment + text.replace("LOOP_share", f"{name}_share") + entry
    return Kernel(name, source, frozenset(), threads > 1, size + ALIGNMENT)
