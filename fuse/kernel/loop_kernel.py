"""Lower a loop to one persistent kernel: time inside, states in memory that stays in cache, threads that live as long as the loop."""

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
from fuse.kernel.lower import Declined, Kernel
from fuse.kernel.recipes import Unsupported

HEADERS = ("threads.h", "products.h")

Share = Callable[[Frame, str], tuple[str, int, int]]


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
    """The kernel that runs all steps, or the reason why there is none."""
    if not loop.spec.carries:
        return Declined("no state is carried from step to step")
    reasons = []
    for share, cut in ((units_text, False), (rows_text, False), (rows_text, True)):
        try:
            step = read_step(loop, operands, cut)
            return _kernel(Frame(step, loop.spec, tuple(operands), tuple(results)), share)
        except (Unsupported, NotAffine) as why:
            reasons.append(str(why))
        except SplitNeeded as need:
            reasons.append(f"the loop over {need.atom} would have to be split")
    return Declined(reasons[-1])


def _kernel(frame: Frame, share: Share) -> Kernel:
    text, threads, size = share(frame, "loop")
    digest = hashlib.sha256(f"{threads} {size} {text}".encode()).hexdigest()[:8]
    name = f"loop_{digest}"
    text, threads, size = share(frame, name)
    lines = [f"// {line}" for line in frame.step.lines]
    entry = [
        f'extern "C" int {name}(char *const *args) {{',
        f"    return fuse_run_team({name}_share, args, {threads});",
        "}",
    ]
    source = "\n".join([*lines, text + "\n".join(entry), ""])
    return Kernel(name, source, frozenset(), threads > 1, size + ALIGNMENT)
