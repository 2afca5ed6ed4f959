"""The C++ target: chooses the schedule of a region's kernel (loops, tiles or whole rows of a product, attention)."""

from __future__ import annotations

from dataclasses import replace

from fuse.kernel.config import Config
from fuse.kernel.cpu.attention import attention
from fuse.kernel.cpu.emit import emit, with_sizes
from fuse.kernel.cpu.loop_ends import end_kernel, kernel_with_ends
from fuse.kernel.cpu.loop_kernel import loop_kernel
from fuse.kernel.cpu.names import is_reserved
from fuse.kernel.cpu.phases import in_phases
from fuse.kernel.cpu.product_frame import PACKING
from fuse.kernel.cpu.tiled_products import tiled
from fuse.kernel.cpu.weight_gradients import gradient_of_weight
from fuse.kernel.cpu.whole_rows import whole_rows
from fuse.kernel.cpu.work import is_parallel
from fuse.kernel.names import fit_names
from fuse.kernel.nests.schedule import schedule
from fuse.kernel.recipes.products import is_reduced, products_below
from fuse.kernel.recipes.registry import Unsupported
from fuse.kernel.target import Target, Written
from fuse.kernel.traversals import within_stage
from fuse.kernel.values import Computation, Correlation


def write(computation: Computation, name: str, config: Config) -> Written:
    """The C++ kernel of a region; see :class:`fuse.kernel.target.Target`."""
    computation = fit_names(computation, is_reserved)
    values, members = [output.value for output in computation.outputs], computation.members
    sums = [v for v in within_stage(values, through_reductions=True) if isinstance(v, Correlation)]
    products = products_below(values)
    if not products and not sums:
        body = schedule(computation)
        body = replace(body, statements=tuple(in_phases(body.statements)))
        parallel = is_parallel(body, config.threads, members)
        return Written(emit(body, name, config.threads, members), parallel=parallel)
    if members is not None:
        raise Unsupported("there is no loop over products")
    if sums:
        return gradient_of_weight(computation, sums[0], name, config)
    if len(products) > 1:
        return attention(computation, name, config)
    return (whole_rows if any(map(is_reduced, values)) else tiled)(computation, name, config)


TARGET = Target("cpu", PACKING, write, loop_kernel, kernel_with_ends, end_kernel, with_sizes)
