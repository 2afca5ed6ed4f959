"""Made-up calls: the user's arguments at other sizes, without data. They are captured; nothing is compiled or run.

x [64, 8], declared to vary          x [11, 8] is captured first    (fuse/runtime/sizes/rehearsing.py)
x [46, 8], beyond captured sizes     x [69, 8] is captured instead  (fuse/runtime/sizes/reaching.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.fx import GraphModule

from fuse.graph.fakes.fake_mode import FakeMode
from fuse.graph.strides import dense_strides, memory_order
from fuse.graph.structure.arguments import flatten_arguments, with_tensors
from fuse.kernel.sizes.region_text import Numbers
from fuse.runtime.autograd.training import Finish, Training
from fuse.runtime.guards.call_guards import integers_of
from fuse.runtime.making import Maker, ModelCall, captured, joint
from fuse.runtime.programs.reference import Reference
from fuse.runtime.programs.steps import Fallback
from fuse.runtime.size_uses.probing_sizes import arguments_at
from fuse.runtime.sizes.varying import VaryingSize


def made_up_call(call: ModelCall, numbers: Numbers) -> ModelCall:
    """``call`` with other integers, and tensors of other layouts, whose memory is not written; ``numbers`` are the
    integers, sizes and strides."""
    args, kwargs = arguments_at(call.args, call.kwargs, numbers)
    return ModelCall(args, kwargs, args if call.spec is None else flatten_arguments(args, kwargs)[0], call.spec)


def graphs_of(
    maker: Maker, call: ModelCall, each: Callable[[GraphModule], object]
) -> tuple[GraphModule, Training | None]:
    """The rewritten graph of a made-up call, and its training; ``each`` is called with every rewritten graph."""
    mode = FakeMode(allow_non_fake_inputs=True)
    tensors = {id(leaf): leaf for leaf in call.leaves if isinstance(leaf, Tensor)}
    fakes = {key: mode.from_tensor(leaf) for key, leaf in tensors.items()}
    args, kwargs = with_tensors(call.args, call.kwargs, lambda leaf: fakes[id(leaf)])
    without_data = ModelCall(args, kwargs, [fakes.get(id(leaf), leaf) for leaf in call.leaves], call.spec)

    def begin(graph: GraphModule) -> Finish:
        each(graph)
        return lambda: Reference(graph, Fallback("", "", "it is not run"))

    if maker.needs_gradients(call.leaves):
        return joint(maker, without_data, begin)
    graph = captured(maker, without_data)
    each(graph)
    return graph, None


def call_at(call: ModelCall, tensors: Sequence[Tensor], sizes: Mapping[VaryingSize, int]) -> ModelCall:
    """``call`` at other sizes."""
    shapes = [list(tensor.shape) for tensor in tensors]
    for size, value in sizes.items():
        for (i, dim), shift in size.places:
            shapes[i][dim] = value + shift
    numbers = list(integers_of(call.leaves))
    for tensor, shape in zip(tensors, shapes, strict=True):
        same = tuple(shape) == tensor.shape
        numbers += [*shape, *(tensor.stride() if same else dense_strides(shape, memory_order(tensor)[::-1]))]
    return made_up_call(call, tuple(numbers))
